"""A captured graph, run uncompiled, does everything that eager mode does."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ksopt.reference import chain_to_dense


class Frozen(nn.Module):
    """A frozen weight with a pattern in front of a checkpoint."""

    def __init__(self):
        super().__init__()
        factor = chain_to_dense([torch.randn(4, 3, 2, 1)])
        self.frozen = nn.Parameter(factor, requires_grad=False)
        self.register_buffer("blocks", torch.randn(4, 3, 5))


class Written(Frozen):
    """What the checkpoint reads is written behind it: its backward pass reads the new values."""

    def forward(self, x):
        y = F.linear(x, self.frozen).view(-1, 4, 3).transpose(0, 1)
        y = checkpoint(lambda y: torch.bmm(y, self.blocks.tanh()), y, use_reentrant=False)
        F.relu(self.blocks, inplace=True)
        return y.sigmoid()


class Dropped(Frozen):
    """The checkpoint's backward pass draws the forward pass's numbers once more."""

    def forward(self, x):
        y = F.linear(x, self.frozen)
        return checkpoint(lambda y: F.dropout(y, 0.5).sigmoid() * y, y, use_reentrant=False)


class Nested(Frozen):
    """A checkpoint inside a checkpoint, with random numbers of its own."""

    def forward(self, x):
        def inner(y):
            return F.dropout(y, 0.5).sigmoid() * y

        def outer(y):
            return checkpoint(inner, y * 2, use_reentrant=False) + F.dropout(y, 0.5).exp()

        return checkpoint(outer, F.linear(x, self.frozen), use_reentrant=False)


class Selected(Frozen):
    """A checkpoint that saves the author's selection."""

    def forward(self, x):
        y = F.linear(x, self.frozen)
        keep = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])

        def body(y):
            return F.dropout(y @ y.T, 0.5).sigmoid()

        return checkpoint(body, y, use_reentrant=False, context_fn=keep)


def gradient(model, x):
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    y = model(x)
    y.square().sum().backward()
    return y.detach(), x.grad


@pytest.mark.parametrize("kind", [Written, Dropped, Nested, Selected])
def test_a_frozen_weight_that_leaves_its_pattern(kind, compiled_by_eager):
    torch.manual_seed(0)
    eager = kind()
    other = kind()
    other.load_state_dict(eager.state_dict())
    compiled = torch.compile(other, backend="ksopt", fullgraph=True)
    x = torch.randn(6, 8)
    compiled(x.requires_grad_())
    dense = torch.randn(12, 8)
    for model in (eager, other):
        model.blocks.copy_(torch.linspace(-1, 1, 60).view(4, 3, 5))
        with torch.no_grad():
            model.frozen.copy_(dense)
    for own, theirs in zip(
        gradient(compiled, x.detach()), gradient(eager, x.detach()), strict=True
    ):
        torch.testing.assert_close(own, theirs)
