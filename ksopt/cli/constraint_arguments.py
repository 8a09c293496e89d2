"""The options that limit which chains there are, of ``ksopt search`` and ``ksopt space`` alike."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from ksopt.search.space.families import NAMES

HELP = """\
constraints:
  families     dense, low_rank, square_dyadic (or butterfly), kaleidoscope, block_butterfly,
               monarch, deformable_butterfly (any chain); some joined by commas
  block sizes  the b and c of every factor: a list (16,32,64), a range with its ends (16-256)
               or multiples (multiple:16)
  aligned      float16, bfloat16: b a multiple of 8, c*d of 8, d of 8 or one of 1 2 3 4 6 12;
               float32: b a multiple of 8, c*d of 4, d of 4 or one of 1 2 3 6;
               batch_last: b a multiple of 16, c of 16 (float32: 8)
"""


def add_arguments(add: Callable[..., Any]) -> None:
    """Add them to a command or a group of its arguments."""
    add(
        "--families",
        metavar="NAME[,NAME...]",
        help=f"only chains of these families: {', '.join(NAMES)}",
    )
    add(
        "--block-sizes",
        metavar="SIZES",
        help="the b and c that factors may have: 16,32,64 or 16-256 or multiple:16",
    )
    add(
        "--chainable",
        action="store_true",
        help="only chainable chains, whose factorization has guarantees",
    )
    add(
        "--aligned",
        action="store_true",
        help="only chains whose every factor the fast kernels of --dtype and --layout take",
    )


def options(args: argparse.Namespace) -> dict[str, Any]:
    """What a request takes of them."""
    return {
        "families": () if args.families is None else args.families,
        "block_sizes": args.block_sizes,
        "chainable": args.chainable,
        "aligned": args.aligned,
    }
