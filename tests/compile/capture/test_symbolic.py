"""Sizes that depend on the batch: they leave out their own site, not the graph."""

import pytest
import torch
from torch import nn

from ksopt.compile.capture.index_map import Atom
from ksopt.compile.capture.reshape_plan import plan
from ksopt.compile.sites import Verdict


class TensorTrainBesideBlocks(nn.Module):
    """A tensor train, whose last dim is passed as -1, and then a factor (4, 16, 16, 1)."""

    def __init__(self):
        super().__init__()
        shapes = ((1, 4, 4, 3), (3, 4, 4, 3), (3, 4, 4, 1))
        self.cores = nn.ParameterList([nn.Parameter(torch.randn(shape) / 4) for shape in shapes])
        self.w = nn.Parameter(torch.randn(4, 16, 16) / 4)

    def forward(self, x):
        v = x.view(-1, 64)
        v = v.view(v.shape[0], 4, 4, 4, -1)
        for core in self.cores:
            v = torch.einsum("bn...k,knml->b...ml", v, core)
        return torch.einsum("bki,koi->bko", v.reshape(-1, 4, 16), self.w).flatten(1)


def test_a_size_that_cannot_be_fixed_leaves_the_other_sites(compiled_by_eager):
    model = TensorTrainBesideBlocks()
    compiled = torch.compile(model, backend="ksopt", dynamic=True, fullgraph=True)
    for shape in ((2, 3, 64), (5, 7, 64)):
        x = torch.randn(shape)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    (report,) = compiled_by_eager.reports  # no batch was fixed
    assert [str(site.chain) for site in report.sites if site.verdict is Verdict.LOWERED] == [
        "(4,16,16,1)"
    ]
    assert report.notes == []


@pytest.mark.parametrize(
    ("have", "want", "splits", "order", "groups"),
    [
        # [24, 4] as it is, also if 24 is two digits of which neither is moved
        ([(0, 2), (1, 12)], [[0, 1]], ((24,),), (0,), (1,)),
        # a third digit moves between them: both are split off
        ([(0, 2), (1, 12)], [[0], [1]], ((2, 12),), (0, 1), (1, 1)),
        ([(0, 2), (1, 12)], [[1, 0]], ((2, 12),), (1, 0), (2,)),
    ],
)
def test_digits_that_stay_neighbours_are_not_split(have, want, splits, order, groups):
    atoms = [Atom(axis, size, 1) for axis, size in have]
    move = plan([tuple(atoms)], [tuple(atoms[at] for at in dim) for dim in want])
    assert (move.splits, move.order, move.groups) == (splits, order, groups)
