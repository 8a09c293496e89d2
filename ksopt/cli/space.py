"""``ksopt space``: its arguments, and what it prints."""

from __future__ import annotations

import argparse
import sys

from ksopt.cli import constraint_arguments
from ksopt.cli.search import in_options, options_named
from ksopt.report import tables
from ksopt.search.request import SearchRequest

EPILOG = f"""\
The space is what `ksopt search` chooses from: see docs/search.md. Counting is cut off after so many
choices as --visits allows, and then says "more than".

{constraint_arguments.HELP}
examples:
  ksopt space --dims 768x3072 --budget 25%
  ksopt space --dims 4096x11008 --budget 10% --factors 2 --order rho --limit 50
  ksopt space --dims 768x3072 --budget 25% --chainable --aligned --dtype float16
  ksopt space --dims 1024x1024 --families monarch,block_butterfly --block-sizes 16-256
  ksopt space --dims 768x3072 --budget 25% --limit 0 --visits 20000000      # only count

exit codes: 0 done, 1 failed, 2 an argument is not allowed, 130 stopped with Ctrl-C
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments; --json and --traceback are the caller's."""
    add = command.add_argument
    add("--dims", required=True, metavar="INxOUT", help="size of the layer, such as 768x3072")
    add("--budget", default="100%", metavar="SIZE", help="most weights, such as 25%% or 600k")
    add("--min-rank", type=int, metavar="RANK", help="least rank (full: the smaller of IN and OUT)")
    add(
        "--factors",
        type=int,
        default=SearchRequest.max_factors,
        metavar="MOST",
        help="most factors, 1 to 3 (%(default)s)",
    )
    constraint_arguments.add_arguments(add)
    add(
        "--dtype",
        default=SearchRequest.dtype,
        help="for --aligned: float32 (default), float16 or bfloat16",
    )
    add(
        "--layout",
        default=SearchRequest.layout,
        help="for --aligned: batch_first (default) or batch_last",
    )
    add(
        "--train",
        action="store_true",
        help="for --aligned: the transposed factors too, for the input's gradient",
    )
    add("--limit", type=int, default=20, metavar="COUNT", help="chains listed (%(default)s)")
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


def run(given: argparse.Namespace) -> int:
    """Count and list as the arguments say; the exit code."""
    from ksopt.search.space.listing import listing
    from ksopt.search.space.smallest import no_chain

    with options_named():
        request = SearchRequest(
            dims=given.dims,
            budgets=(given.budget,),
            max_factors=given.factors,
            min_rank=given.min_rank,
            dtype=given.dtype,
            layout=given.layout,
            train=given.train,
            **constraint_arguments.options(given),
        )
        found = listing(request, given.limit, given.order, given.visits)
    if given.json:
        sys.stdout.write(found.to_json())
        return 0
    print(found.sentence)
    if found.total == 0 and found.exact:
        print(f"\n{in_options(no_chain(request))}.")
    if found.chains:
        of = "them" if found.exact else "those counted"
        print(f"\nThe first {len(found.chains)} of {of}, by {found.order}:\n")
        tables.write(found.table(), sys.stdout)
    return 0
