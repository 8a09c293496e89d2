"""Weights that are zero but on a support: masks, Kronecker products, blocks written by slices."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ksopt
from ksopt.compile.capture.diagonal_axes import merged
from ksopt.compile.capture.index_map import Atom
from ksopt.compile.capture.recognize import NotKroneckerSparseError
from ksopt.compile.capture.values import Variable
from ksopt.compile.sites import Verdict

BLOCKS = torch.block_diag(*torch.ones(4, 8, 4))  # [32, 16]
STRIDED = torch.kron(torch.ones(8, 4), torch.eye(4))


class Layer(nn.Module):
    """``weight`` [32, 16] makes a matrix of the parameter ``w`` and the buffer ``m``."""

    def __init__(self, weight, w, m=None):
        super().__init__()
        self.weight = weight
        self.w = nn.Parameter(torch.randn(w) / 3)
        self.register_buffer("m", BLOCKS.clone() if m is None else m.clone())

    def forward(self, x):
        return F.linear(x, self.weight(self))


def masked(layer):
    return layer.w * layer.m


def by_where(layer):
    return torch.where(layer.m != 0, layer.w, torch.zeros_like(layer.w))


def by_fill(layer):
    return layer.w.masked_fill(layer.m == 0, 0)


def by_kron(layer):
    return torch.kron(torch.eye(4), layer.w)


def by_diag_embed(layer):
    return torch.diag_embed(layer.w).permute(2, 0, 3, 1).reshape(32, 16)


def by_slices(layer):
    weight = torch.zeros(32, 16, dtype=layer.w.dtype)
    for i in range(4):
        weight[i * 8 : (i + 1) * 8, i * 4 : (i + 1) * 4] = layer.w[i]
    return weight


def by_block_diag(layer):
    return torch.block_diag(*layer.w)


def frozen(layer):
    return layer.m


WAYS = {
    masked: (32, 16),
    by_where: (32, 16),
    by_fill: (32, 16),
    by_kron: (8, 4),
    by_diag_embed: (8, 4, 4),
    by_slices: (4, 8, 4),
    by_block_diag: (4, 8, 4),
    frozen: (1,),
}
ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


def results(function, layer, x):
    leaf = x.clone().requires_grad_()
    y = function(leaf)
    targets = [leaf, *layer.parameters()]
    grads = torch.autograd.grad(y.float().square().sum(), targets, allow_unused=True)
    return [y, *(grad for grad in grads if grad is not None)]


@pytest.mark.sweep
@ways
def test_values_and_gradients_are_the_authors(way, compiled_by_eager):
    layer, x = Layer(way, WAYS[way]), torch.randn(5, 16)
    compiled = torch.compile(layer, backend="ksopt", fullgraph=True)
    torch.testing.assert_close(results(compiled, layer, x), results(layer, layer, x))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), layer(x))
    for report in compiled_by_eager.reports:
        assert [str(site.chain) for site in report.sites] == ["(4,8,4,1)"]
        assert report.covered == 1.0


@pytest.mark.slow
def test_a_masked_weight_has_no_gradient(compiled_by_eager):
    layer = Layer(masked, (32, 16), STRIDED)
    torch.compile(layer, backend="ksopt")(torch.randn(3, 16)).sum().backward()
    assert torch.equal(layer.w.grad != 0, STRIDED.bool())


@pytest.mark.sweep
@ways
def test_autocast_finds_what_float32_does_and_float64_is_left_alone(way, compiled_by_eager):
    layer, x = Layer(way, WAYS[way]), torch.randn(5, 16)
    with torch.autocast("cpu", torch.bfloat16):
        explanation = ksopt.explain(layer, x)
        y = torch.compile(layer, backend="ksopt")(x)
        assert y.dtype is torch.bfloat16
        torch.testing.assert_close(y, layer(x), rtol=2e-2, atol=2e-2)
    (site,) = explanation.sites
    assert (str(site.chain), site.verdict, site.dtype) == (
        "(4,8,4,1)",
        Verdict.LOWERED,
        "bfloat16",
    )
    assert explanation.report.covered == 1.0
    (site,) = ksopt.explain(layer.double(), x.double()).sites
    assert site.verdict is Verdict.NOT_RECOGNISED
    assert "it computes in float64, for which there are no kernels" in site.reason


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("mask", "chain"),
    [
        (BLOCKS.bool(), "(4,8,4,1)"),
        (BLOCKS.long(), "(4,8,4,1)"),
        (BLOCKS.half() * 3, "(4,8,4,1)"),
        (BLOCKS * (torch.rand(32, 16) > 0.3), "(4,8,4,1)"),  # holes inside the support
        (-2.5 * STRIDED, "(1,8,4,4)"),
    ],
)
def test_masks_of_any_type_and_values(mask, chain, compiled_by_eager):
    layer, x = Layer(masked, (32, 16), mask), torch.randn(5, 16)
    compiled = torch.compile(layer, backend="ksopt", fullgraph=True)
    torch.testing.assert_close(results(compiled, layer, x), results(layer, layer, x))
    assert [str(site.chain) for site in compiled_by_eager.reports[0].sites] == [chain]


def test_several_masks_and_scales_are_one_factor(compiled_by_eager):
    def weight(layer):
        return layer.w * layer.m * layer.scale * layer.other * -1.5

    layer, x = Layer(weight, (32, 16)), torch.randn(5, 16)
    layer.register_buffer("scale", torch.randn(32, 1))
    layer.register_buffer("other", torch.kron(torch.ones(16, 8), torch.eye(2)).bool())
    compiled = torch.compile(layer, backend="ksopt", fullgraph=True)
    torch.testing.assert_close(results(compiled, layer, x), results(layer, layer, x))
    (site,) = compiled_by_eager.reports[0].sites
    assert (str(site.chain), site.verdict) == ("(4,4,2,2)", Verdict.LOWERED)


class Changing(nn.Module):
    """Something is written between the weight and the product, or around them."""

    def __init__(self, call):
        super().__init__()
        self.call = call
        self.w = nn.Parameter(torch.randn(32, 16) / 3)
        self.register_buffer("m", BLOCKS.clone())
        self.register_buffer("v", torch.randn(32, 16) / 3)

    def forward(self, x):
        return self.call(self, x)


def weight_after_mask(own, x):
    weight = own.v * own.m
    own.v.mul_(2.0)
    return F.linear(x, weight)


def mask_after_mask(own, x):
    weight = own.w * own.m
    own.m.mul_(2.0)
    return F.linear(x, weight)


def mask_before(own, x):
    own.m.add_(0.5)
    return F.linear(x, own.w * own.m)


def product_then_mask(own, x):
    y = F.linear(x, own.w * own.m)
    own.m.fill_(1.0)
    return y


def weight_itself(own, x):
    weight = own.w.detach() * own.m
    weight[0, 15] = 3.0
    return F.linear(x, weight)


def result_in_place(own, x):
    y = F.linear(x, own.w * own.m)
    half = y[:, :16]
    half.mul_(2.0)
    return y.relu_()


@pytest.mark.sweep
@pytest.mark.parametrize(
    "call",
    [weight_after_mask, mask_after_mask, mask_before, product_then_mask, weight_itself,
     result_in_place],
    ids=lambda call: call.__name__,
)  # fmt: skip
@pytest.mark.parametrize("calls", [1, 3])
def test_writes_are_seen(call, calls, compiled_by_eager):
    model, twin = Changing(call), Changing(call)
    twin.load_state_dict(model.state_dict())
    compiled = torch.compile(model, backend="ksopt")
    for _ in range(calls):
        x = torch.randn(5, 16)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), twin(x))
    torch.testing.assert_close(model.state_dict(), twin.state_dict())


def test_a_mask_that_changes_between_calls_is_noticed(compiled_by_eager):
    layer, x = Layer(masked, (32, 16)), torch.randn(5, 16)
    compiled = torch.compile(layer, backend="ksopt")
    torch.testing.assert_close(compiled(x), layer(x))
    layer.m[3, 15] = 2.0  # leaves the support
    torch.testing.assert_close(compiled(x), layer(x))
    layer.m.copy_(BLOCKS * 4)  # and is back in it
    torch.testing.assert_close(results(compiled, layer, x), results(layer, layer, x))


class Gradients(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.layer = Layer(way, WAYS[way])

    def forward(self, x):
        with torch.no_grad():
            weight = self.layer.weight(self.layer)
        return F.linear(x, weight) + x.sum()


@pytest.mark.sweep
@ways
def test_a_weight_created_without_gradients_has_none(way, compiled_by_eager):
    model, x = Gradients(way), torch.randn(5, 16)
    compiled = torch.compile(model, backend="ksopt", fullgraph=True)
    actual, expected = results(compiled, model, x), results(model, model, x)
    assert len(actual) == len(expected) == 2
    torch.testing.assert_close(actual, expected)


def test_a_weight_that_is_cast_before_a_write(compiled_by_eager):
    def call(own, x):
        weight = own.m.bfloat16()
        own.m.mul_(2.0)
        return F.linear(x.bfloat16(), weight)

    model, twin, x = Changing(call), Changing(call), torch.randn(5, 16)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="ksopt")(x), twin(x))


def off_pattern(own, x):
    return F.linear(x, own.w * own.other)


def computed_mask(own, x):
    return F.linear(x, own.w * (own.w.abs() > 0.1))


def unequal_blocks(own, x):
    return F.linear(x, torch.block_diag(own.w[:8, :4], own.w[8:, 4:]))


def by_sum(own, x):
    return (x[:, None, :] * (own.w * own.m)).sum(-1)


def not_an_identity(own, x):
    return F.linear(x, torch.kron(own.dense, own.w[:8, :4]))


def sum_of_two(own, x):
    return F.linear(x, own.w * own.m + own.w)


def rotated(own, x):
    """As in BOFT: block rotations between permutations multiply a frozen dense weight."""
    skew = own.r - own.r.transpose(1, 2)
    rotations = torch.linalg.solve(torch.eye(4) + skew, torch.eye(4) - skew, left=False)
    blocks = torch.block_diag(*torch.unbind(rotations)).unsqueeze(0)
    rotation = torch.bmm(own.p, torch.bmm(blocks, own.p.permute(0, 2, 1)))[0]
    return F.linear(x, torch.mm(rotation, own.frozen_t).t() * own.s)


class Refused(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call
        self.w = nn.Parameter(torch.randn(32, 16) / 3)
        self.r = nn.Parameter(torch.randn(4, 4, 4) / 3)
        self.s = nn.Parameter(torch.ones(32, 1))
        self.register_buffer("m", BLOCKS.clone())
        self.register_buffer("other", (torch.rand(32, 16) > 0.6).float())
        self.register_buffer("dense", torch.rand(4, 4) + 0.1)
        self.register_buffer("p", torch.eye(16)[torch.randperm(16)][None])
        self.register_buffer("frozen_t", torch.randn(16, 32))

    def forward(self, x):
        return self.call(self, x)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (off_pattern, "its weight is masked at node mul by l_self_buffers_other_, whose nonzero"),
        (computed_mask, "its weight is masked at node mul by what node gt computes at each call"),
        (unequal_blocks, "its weight is made at node block_diag of blocks of unequal sizes"),
        (sum_of_two, "its weight is computed at node add from a Kronecker-sparse matrix, mul"),
        (rotated, "its weight is computed at node bmm from a Kronecker-sparse matrix, blocks"),
        (by_sum, "its weight is zero but on a support, which a sum of products is not followed"),
        (not_an_identity, None),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_nearly_one_is_left_alone_with_the_reason(call, reason, compiled_by_eager):
    model, x = Refused(call), torch.randn(5, 16)
    compiled = torch.compile(model, backend="ksopt", fullgraph=True)
    torch.testing.assert_close(results(compiled, model, x), results(model, model, x))
    (report,) = compiled_by_eager.reports
    if reason is None:  # plainly dense
        assert report.sites == []
        return
    (site,) = report.sites
    assert site.verdict is Verdict.NOT_RECOGNISED
    assert reason in site.reason


def test_a_mask_of_blocks_that_are_read_as_blocks(compiled_by_eager):
    """The product is recognised by the blocks, whatever the mask's zeros are."""
    layer = Layer(masked, (32, 4), torch.block_diag(*torch.ones(4, 8, 1)))
    x = torch.randn(5, 16)

    def blocks(x):
        weight = (layer.w * layer.m).view(4, 8, 4)
        return torch.einsum("bgi,goi->bgo", x.view(-1, 4, 4), weight).flatten(1)

    compiled = torch.compile(blocks, backend="ksopt", fullgraph=True)
    torch.testing.assert_close(results(compiled, layer, x), results(blocks, layer, x))
    assert compiled_by_eager.reports[0].count(Verdict.LOWERED) == 1


def variable(size, left=None, right=None, summed=False):
    def atom(place):
        return None if place is None else Atom(place[0], size, place[1])

    return Variable(size, atom(left), atom(right), summed)


def test_digits_that_stand_twice_are_cut_alike():
    # out[k, i] = sum over i', l: x[i', l] w[i, k, l] where i = i', which columns read in two parts
    dims = [[variable(6, right=(0, 1))], [variable(5, right=(1, 1))]]
    summed = [
        variable(2, (0, 3), (0, 3), summed=True),
        variable(3, (0, 1), (0, 1), summed=True),
        variable(4, (1, 1), (2, 1), summed=True),
    ]
    new_dims, new_summed = merged(dims, summed)
    ((high, low), (k,)) = new_dims
    assert (high.size, high.left, high.right) == (2, Atom(0, 2, 3), Atom(0, 2, 3))
    assert (low.size, low.left, low.right) == (3, Atom(0, 3, 1), Atom(0, 3, 1))
    assert not high.summed
    assert not low.summed
    assert k.left is None
    assert [v.size for v in new_summed] == [4]


@pytest.mark.parametrize(
    ("dims", "summed"),
    [
        ([[variable(4, right=(0, 1))], [variable(4, right=(0, 1))]], []),
        ([], [variable(4, (0, 1), (0, 1), True), variable(4, (1, 1), (0, 1), True)]),
        ([[variable(4, (1, 1), (0, 1))]], [variable(4, (0, 1), (0, 1), True)]),
    ],
)
def test_diagonals_of_the_input_or_the_result_are_none(dims, summed):
    with pytest.raises(NotKroneckerSparseError, match="diagonal"):
        merged(dims, summed)
