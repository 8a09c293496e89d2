"""Other code than products by Kronecker-sparse weights is unchanged, with equal results."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ksopt.compile.sites import Verdict


class Case(nn.Module):
    """A negative case: ``shape`` of its input; ``call`` computes."""

    shape = (4, 32)
    parameters_of: tuple = ()

    def __init__(self):
        super().__init__()
        for name, size in self.parameters_of:
            setattr(self, name, nn.Parameter(torch.randn(size) / 4))


class Attention(Case):
    shape = (2, 5, 32)
    parameters_of = (("qkv", (96, 32)),)

    def forward(self, x):
        q, k, v = F.linear(x, self.qkv).view(2, 5, 3, 4, 8).permute(2, 0, 3, 1, 4)
        return ((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).reshape(2, 5, 32)


class ActivationsOnly(Case):
    def forward(self, x):
        left = x.view(4, 4, 8)
        return torch.einsum("bgi,bgj->bij", left, left.sin())


class GroupedActivations(Case):
    """The form of a block-diagonal product, but its "weight" depends on the input."""

    def forward(self, x):
        weight = x.view(4, 4, 8).mean(0).view(4, 8, 1) * torch.ones(8)
        return torch.bmm(x.view(4, 4, 8).transpose(0, 1), weight).transpose(0, 1).flatten(1)


class HyperNetwork(Case):
    """A weight that depends on a parameter and on the input."""

    parameters_of = (("w", (4, 8, 8)),)

    def forward(self, x):
        weight = self.w * x.mean()
        return torch.einsum("bgi,goi->bgo", x.view(4, 4, 8), weight).flatten(1)


class MappedSumWithInput(Case):
    """In a vmap the product is added to a function of the input: nothing holds it alone."""

    parameters_of = (("w", (4, 8, 8)),)

    def forward(self, x):
        blocks = x.view(4, 4, 8)
        return torch.vmap(F.linear, in_dims=(1, 0, 1), out_dims=1)(blocks, self.w, blocks).flatten(
            1
        )


class WeightGradient(Case):
    """xᵀ g for every group, as a hand-written backward computes it."""

    parameters_of = (("w", (32, 32)),)

    def forward(self, x):
        g = F.linear(x, self.w)
        return torch.einsum("bgi,bgo->gio", x.view(4, 4, 8), g.view(4, 4, 8))


class DenseLinear(Case):
    parameters_of = (("w", (48, 32)), ("b", (48,)))

    def forward(self, x):
        return F.gelu(F.linear(x, self.w, self.b))


class DenseMLP(Case):
    """Two dense layers with a wide middle are no low-rank pair."""

    parameters_of = (("up", (128, 32)), ("down", (32, 128)))

    def forward(self, x):
        return F.linear(F.linear(x, self.up), self.down)


class Bottleneck(Case):
    """Two narrow layers with an activation between them are no product of matrices."""

    parameters_of = (("down", (4, 32)), ("up", (32, 4)))

    def forward(self, x):
        return F.linear(F.relu(F.linear(x, self.down)), self.up)


class SharedLatent(Case):
    """A narrow middle that something else reads: both layers must run anyway."""

    parameters_of = (("down", (4, 32)), ("up", (32, 4)))

    def forward(self, x):
        latent = F.linear(x, self.down)
        return torch.cat([F.linear(latent, self.up), latent], dim=-1)


class BiasedBottleneck(Case):
    """The first layer has a bias, so the middle is affine."""

    parameters_of = (("down", (4, 32)), ("b", (4,)), ("up", (32, 4)))

    def forward(self, x):
        return F.linear(F.linear(x, self.down, self.b), self.up)


class DenseConvolution(Case):
    shape = (2, 8, 6, 6)
    parameters_of = (("w", (12, 8, 3, 3)),)

    def forward(self, x):
        return F.conv2d(x, self.w, padding=1)


class DepthwiseConvolution(Case):
    shape = (2, 8, 9)
    parameters_of = (("w", (8, 1, 3)),)

    def forward(self, x):
        return F.conv1d(x, self.w, padding=2, groups=8)[..., :9]


class StridedPointwise(Case):
    """A grouped 1x1 convolution that also skips positions."""

    shape = (2, 8, 10)
    parameters_of = (("w", (8, 4, 1)),)

    def forward(self, x):
        return F.conv1d(x, self.w, stride=2, groups=2)


class TransposedConvolution(Case):
    shape = (2, 8, 5)
    parameters_of = (("w", (8, 3, 1)),)

    def forward(self, x):
        return F.conv_transpose1d(x, self.w, groups=2)


class Normalisation(Case):
    """An elementwise scale and a sum that are not a product by a matrix."""

    parameters_of = (("g", (32,)), ("b", (32,)))

    def forward(self, x):
        return F.layer_norm(x, (32,), self.g, self.b) * self.g


class Pooling(Case):
    """Scores by a parameter, summed over tokens too: not over the features alone."""

    shape = (3, 6, 32)
    parameters_of = (("w", (4, 8)),)

    def forward(self, x):
        return (x.view(3, 6, 4, 8) * self.w).sum(dim=(1, 3))


class NearlyBlockDiagonal(Case):
    """A frozen dense weight with one small entry outside the blocks."""

    parameters_of = (("w", (32, 32)),)

    def __init__(self):
        super().__init__()
        blocks = torch.block_diag(*torch.randn(4, 8, 8))
        blocks[0, 31] = 1e-6
        self.w = nn.Parameter(blocks, requires_grad=False)

    def forward(self, x):
        return F.linear(x, self.w)


class TrainedBlockDiagonal(Case):
    """Its values are block-diagonal today, but it is trained."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.block_diag(*torch.randn(4, 8, 8)))

    def forward(self, x):
        return F.linear(x, self.w)


class DetachedMiddle(Case):
    """Gradients stop between two narrow layers."""

    parameters_of = (("down", (4, 32)), ("up", (32, 4)))

    def forward(self, x):
        return F.linear(F.linear(x, self.down).detach(), self.up) + x * 0


class SharedBlock(Case):
    """One small weight for all groups: a dense product of more rows."""

    parameters_of = (("w", (6, 8)),)

    def forward(self, x):
        return F.linear(x.view(4, 4, 8), self.w).flatten(1)


class Double(Case):
    """float64 is left alone."""

    parameters_of = (("w", (4, 8, 8)),)

    def __init__(self):
        super().__init__()
        self.double()

    def forward(self, x):
        return torch.einsum("bgi,goi->bgo", x.double().view(4, 4, 8), self.w).flatten(1)


class FloatInsideAutocast(Case):
    """mul and sum stay float32 under autocast; the operator would not."""

    parameters_of = (("w", (4, 6, 8)),)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return (x.view(4, 4, 1, 8) * self.w).sum(-1).flatten(1)


class ScaledBias(Case):
    parameters_of = (("w", (4, 8, 6)), ("b", (4, 1, 6)))

    def forward(self, x):
        rows = x.view(4, 4, 8).transpose(0, 1)
        return torch.baddbmm(self.b, rows, self.w, beta=0.5, alpha=2.0).transpose(0, 1).flatten(1)


class UnevenChunks(Case):
    parameters_of = (("one", (8, 20)), ("two", (8, 12)))

    def forward(self, x):
        head, tail = x.split([20, 12], dim=-1)
        return torch.cat([head @ self.one.t(), tail @ self.two.t()], dim=-1)


CASES = Case.__subclasses__()


def gradients(function, parameters, x):
    leaf = x.clone().requires_grad_()
    y = function(leaf)
    targets = [leaf, *parameters]
    actual = torch.autograd.grad(y.float().square().sum(), targets, allow_unused=True)
    return [y, *(grad for grad in actual if grad is not None)]


@pytest.mark.sweep
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_stays_untouched_and_equal(case, compiled_by_eager):
    model, twin = case(), case()
    twin.load_state_dict(model.state_dict())
    compiled = torch.compile(model, backend="ksopt", fullgraph=True)
    x = torch.randn(case.shape)
    actual = gradients(compiled, [p for p in model.parameters() if p.requires_grad], x)
    expected = gradients(twin, [p for p in twin.parameters() if p.requires_grad], x)
    # The graph is the author's: nothing but the order of AOTAutograd's sums may differ.
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    (graph,) = compiled_by_eager.graphs
    assert not any(str(node.target).startswith("ksopt") for node in graph.nodes)
    (report,) = compiled_by_eager.reports
    assert report.count(Verdict.LOWERED) == report.count(Verdict.NOT_LOWERED) == 0
    assert report.notes == []


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Double, "it computes in float64, for which there are no kernels"),
        (FloatInsideAutocast, "it computes in float32, but autocast is on where it is computed"),
        (ScaledBias, "scales the product or the bias"),
        (Pooling, "one operand alone is summed over an index"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_almost_one_is_reported_with_the_reason(case, reason, compiled_by_eager):
    torch.compile(case(), backend="ksopt")(torch.randn(case.shape))
    (site,) = compiled_by_eager.reports[0].sites
    assert site.verdict is Verdict.NOT_RECOGNISED
    assert reason in site.reason
    assert site.place.file == __file__


def test_there_are_enough_cases():
    assert len(CASES) >= 20
