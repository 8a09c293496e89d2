"""The command ``ksopt show``: its arguments and its output."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ksopt.errors import InvalidInputError
from ksopt.patterns.chain import Chain
from ksopt.system.plurals import counted
from ksopt.system.untrusted import reason

SUMMARY = "Draw a pattern or a chain: where its factors may be nonzero, and what it costs."
EPILOG = """\
A factor (a,b,c,d) has a diagonal blocks, each of b x c diagonals of length d. One of its a*d dense
b x c sub-matrices is drawn in another colour. The last factor of a chain meets the input first.

examples:
  ksopt show "(2,3,2,3)*(6,2,2,1)"
  ksopt show "(16,192,51,1)*(1,204,192,4)" --svg chain.svg

exit codes: 0 done, 1 failed, 2 an argument is not allowed, 130 stopped with Ctrl-C
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments; the caller adds those of every command."""
    command.add_argument("chain", metavar="CHAIN", help="such as (2,3,2,3)*(6,2,2,1)")
    command.add_argument("--svg", metavar="FILE", help="write the drawing to this file, too")


def run(args: argparse.Namespace) -> int:
    """Draw the chain; return the exit code."""
    from ksopt import drawing
    from ksopt.report import drawing_style, tables
    from ksopt.system.atomic_files import write_whole

    chain = Chain.parse(args.chain)
    if args.svg is not None:
        drawn = drawing_style.standalone(drawing.to_svg(chain))
        try:
            write_whole(Path(args.svg), drawn)
        except (OSError, ValueError) as error:
            raise InvalidInputError(
                f"--svg {args.svg} cannot be written: {reason(error)}"
            ) from None
    if args.json:
        print(json.dumps(_facts(chain), indent=2))
        return 0
    drawing.write(chain, sys.stdout)
    tables.write(_table(chain), sys.stdout)
    print(f"\n{_sentence(chain)}")
    return 0


def _table(chain: Chain) -> Any:
    from ksopt.report import tables

    heads = (
        ">factor", "pattern (a,b,c,d)", ">outputs", ">inputs", ">weights", ">zeros", ">rho"
    )  # fmt: skip
    rows = [
        (
            str(place),
            str(pattern),
            f"{pattern.out_features:,}",
            f"{pattern.in_features:,}",
            f"{pattern.nnz:,}",
            f"{100 * pattern.sparsity:.1f}%",
            f"{pattern.rho:.4f}",
        )
        for place, pattern in enumerate(chain, start=1)
    ]
    return tables.of(heads, rows)


def _sentence(chain: Chain) -> str:
    dense = chain.in_features * chain.out_features
    text = (
        f"in_features={chain.in_features}, out_features={chain.out_features}: "
        f"{counted(chain.nnz, 'weight')}, {100 * chain.nnz / dense:.3g}% of the dense layer's "
        f"{dense:,}. The product has a rank of at most {chain.rank_bound:,}."
    )
    full = "every output depends on every input" if chain.is_dense_support else (
        "not every output depends on every input"
    )  # fmt: skip
    can = "is" if chain.is_chainable else "is not"
    return f"{text} It {can} chainable, and {full}."


def _facts(chain: Chain) -> dict[str, Any]:
    return {
        "chain": str(chain),
        "in_features": chain.in_features,
        "out_features": chain.out_features,
        "parameters": chain.nnz,
        "share_of_dense": chain.nnz / (chain.in_features * chain.out_features),
        "rank_bound": chain.rank_bound,
        "chainable": chain.is_chainable,
        "dense_support": chain.is_dense_support,
        "factors": [
            {
                "pattern": [pattern.a, pattern.b, pattern.c, pattern.d],
                "out_features": pattern.out_features,
                "in_features": pattern.in_features,
                "parameters": pattern.nnz,
                "rho": pattern.rho,
            }
            for pattern in chain
        ],
    }
