"""The command ``ksopt space``: its arguments and its output."""

from __future__ import annotations

import argparse
import sys

from ksopt.cli import constraint_arguments
from ksopt.cli.search import in_options, options_named
from ksopt.errors import InvalidInputError
from ksopt.report import tables
from ksopt.search.layer_request import LayerRequest
from ksopt.search.options import SearchOptions
from ksopt.system import option_fields

SUMMARY = "Count and list the chains that a search of a layer chooses from."
EPILOG = f"""\
The space is what `ksopt search` chooses from: see docs/searching.md. Counting is cut off after so
many choices as --visits allows, and then says "more than".

{constraint_arguments.HELP}
examples:
  ksopt space 768x3072 --budget 25%
  ksopt space 4096x11008 --budget 10% --factors 2 --order rho --limit 50
  ksopt space 768x3072 --budget 25% --chainable --aligned --dtype float16
  ksopt space 1024x1024 --families monarch,block_butterfly --block-sizes 16-256
  ksopt space 768x3072 --budget 25% --limit 0 --visits 20000000      # only count

exit codes: 0 done, 1 failed, 2 an argument is not allowed, 130 stopped with Ctrl-C
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments; the caller adds --json and --traceback."""
    add = command.add_argument_group("the layer and its chains").add_argument
    add("size", nargs="?", metavar="INxOUT", help="size of the layer, such as 768x3072")
    add("--dims", metavar="INxOUT", help="the same as an option")
    add("--budget", default="100%", metavar="SIZE", help="most weights, such as 25%% or 600k")
    add("--min-rank", type=int, metavar="RANK", help="least rank (full: the smaller of IN and OUT)")
    add(
        "--factors",
        type=int,
        default=LayerRequest.max_factors,
        metavar="MOST",
        help="most factors, 1 to 3 (%(default)s)",
    )
    for name in constraint_arguments.NAMES:
        option_fields.add_argument(add, SearchOptions, name)
    add(
        "--dtype",
        default=LayerRequest.dtype,
        help="for --aligned: float32 (default), float16 or bfloat16",
    )
    add(
        "--layout",
        default=LayerRequest.layout,
        help="for --aligned: batch_first (default) or batch_last",
    )
    add(
        "--train",
        action="store_true",
        help="for --aligned: the transposed factors too, for the input's gradient",
    )
    add("--limit", type=int, default=100, metavar="COUNT", help="chains listed (%(default)s)")
    add(
        "--order",
        default="weights",
        help="which come first: those with the fewest weights (weights), with the most "
        "(most-weights), or with the largest rho (rho); weights is the default",
    )
    add(
        "--visits",
        type=int,
        default=500_000,
        metavar="COUNT",
        help="choices the enumeration may make for each number of factors (%(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Count and list chains as the arguments specify; return the exit code."""
    from ksopt.search.space.listing import listing
    from ksopt.search.space.smallest import no_chain

    dims = args.size or args.dims
    if dims is None or (args.size and args.dims):
        raise InvalidInputError("space: give one size, such as ksopt space 768x3072, or --dims")
    with options_named():
        request = LayerRequest(
            dims=dims,
            budgets=(args.budget,),
            max_factors=args.factors,
            min_rank=args.min_rank,
            dtype=args.dtype,
            layout=args.layout,
            train=args.train,
            **{name: getattr(args, name) for name in constraint_arguments.NAMES},
        )
        listed = listing(request, args.limit, args.order, args.visits)
    if args.json:
        sys.stdout.write(listed.to_json())
        return 0
    print(listed.sentence)
    if listed.total == 0 and listed.exact:
        print(f"\n{in_options(no_chain(request))}.")
    if listed.chains:
        of = "them" if listed.exact else "those counted"
        print(
            f"\nThe first {len(listed.chains)} of {of}, by {listed.order}. Those of the same "
            "factors, weights, rho and rank share a line:\n"
        )
        tables.write(listed.table(), sys.stdout)
    return 0
