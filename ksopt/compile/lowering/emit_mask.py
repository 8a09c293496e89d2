"""Insert the nodes of an elementwise function of weights on a support."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from ksopt.compile.capture.values import Applied
from ksopt.compile.lowering.emit import Emitter


def emit_applied(emit: Emitter, origin: Applied, pieces: Sequence[fx.Node]) -> fx.Node:
    """A node that computes an `Applied`; ``pieces`` have the dims of the origin's pieces."""
    laid_out = [
        _in_order(emit, piece, letters, origin.out)
        for piece, letters in zip(pieces, origin.letters, strict=True)
    ]
    return emit.call(origin.function, *laid_out, *origin.more)


def _in_order(emit: Emitter, node: fx.Node, letters: str, out: str) -> fx.Node:
    """A piece with a dim for each letter of the result, of size 1 where it has none."""
    for letter in out:
        while letters.count(letter) > 1:
            first = letters.index(letter)
            second = letters.index(letter, first + 1)
            node = emit.call(torch.diagonal, node, 0, first, second)  # the diagonal comes last
            letters = letters[:first] + letters[first + 1 : second] + letters[second + 1 :] + letter
    order = [letters.index(letter) for letter in out if letter in letters]
    if order != sorted(order):
        node = emit.call(torch.permute, node, order)
    for at, letter in enumerate(out):
        if letter not in letters:
            node = emit.call(torch.unsqueeze, node, at)
    return node
