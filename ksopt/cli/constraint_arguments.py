"""The options that constrain the chains, with their help for ``ksopt search`` and ``space``."""

from __future__ import annotations

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
NAMES = ("families", "block_sizes", "chainable", "aligned")
"""The fields of these options in a request."""
