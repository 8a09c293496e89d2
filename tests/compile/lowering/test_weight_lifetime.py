"""Compiled graphs prepare a weight once a version, in whatever layout it is stored.

Inductor runs here, for it is what gives the operator a new tensor for each view at each call. On a
CPU no way to multiply keeps a prepared weight, so the kernels are a stand-in that does.
"""

from types import SimpleNamespace

import pytest
import torch
from seen_products import without_library
from torch import nn
from torch._dynamo.utils import counters

import ksopt
from ksopt.kernels import dispatch, weight_cache
from ksopt.reference import ks_reference


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Kernels that want a weight as [a, d, b, c], and count."""
    seen = SimpleNamespace(calls=0, prepared=0)

    def pack(weight):
        seen.prepared += 1
        return weight.permute(0, 3, 1, 2).clone(memory_format=torch.contiguous_format)

    def run(x, weight, batch_last, out):
        seen.calls += 1
        stored = weight_cache.prepared(weight, "adbc", pack)
        layout = "batch_last" if batch_last else "batch_first"
        y = ks_reference(x, stored.permute(0, 2, 3, 1), layout)
        return y if out is None else out.copy_(y)

    without_library(monkeypatch)
    monkeypatch.setattr(dispatch, "run", run)
    weight_cache.refresh()
    yield seen
    weight_cache.refresh()


class Layer(nn.Module):
    """y[n, i, k, j] = sum_l x[n, i, l, j] w[...], the weight stored in an order of its own."""

    def __init__(self, stored="iklj"):
        super().__init__()
        self.stored = stored
        sizes = {"i": 2, "k": 3, "l": 4, "j": 5}
        self.weight = nn.Parameter(torch.randn(*(sizes[index] for index in stored)))

    def forward(self, x):
        y = torch.einsum(f"nilj,{self.stored}->nikj", x.view(-1, 2, 4, 5), self.weight)
        return y.flatten(1)


class Blocks(nn.Module):
    """Block-diagonal, its weight stored as that of a linear layer is: [out, in of a block]."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 8))

    def forward(self, x):
        weight = self.weight.view(3, 4, 8)
        return torch.bmm(x.view(-1, 3, 8).transpose(0, 1), weight.mT).transpose(0, 1).flatten(1)


class Experts(nn.Module):
    """One parameter for two layers."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3, 8, 8))

    def forward(self, x):
        for weight in self.weight.unbind():
            x = torch.einsum("ngi,gio->ngo", x.view(-1, 3, 8), weight).flatten(1)
        return x


class Chunks(nn.Module):
    """Query, key and value in one parameter, taken apart at each call."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(36, 8))

    def forward(self, x):
        x = x.view(-1, 3, 8)
        parts = [weight.view(3, 4, 8) for weight in self.weight.chunk(3)]
        return torch.cat([torch.einsum("ngi,goi->ngo", x, part).flatten(1) for part in parts], 1)


class Loop(nn.Module):
    """One block after the other."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8, 4))

    def forward(self, x):
        pieces = [x[:, 8 * i : 8 * i + 8] @ self.weight[i] for i in range(3)]
        return torch.cat(pieces, 1)


class Convolution(nn.Conv1d):
    def __init__(self):
        super().__init__(24, 12, 1, groups=3, bias=False)

    def forward(self, x):
        return super().forward(x[:, :, None])[:, :, 0]


class Frozen(nn.Linear):
    """Dense to look at, block-diagonal by its values."""

    def __init__(self):
        super().__init__(24, 24, bias=False)
        self.requires_grad_(False)
        self.weight.copy_(torch.block_diag(*torch.randn(3, 8, 8)))


LAYERS = {
    "canonical": (lambda: Layer("iklj"), 40, 1),
    "inputs before outputs": (lambda: Layer("ilkj"), 40, 1),
    "[d, a, b, c]": (lambda: Layer("jikl"), 40, 1),
    "backwards": (lambda: Layer("jlki"), 40, 1),
    "as a linear layer's": (Blocks, 24, 1),
    "three chunks": (Chunks, 24, 3),
    "a loop": (Loop, 24, 1),
    "a convolution's": (Convolution, 24, 1),
    "two in one": (Experts, 24, 2),
    "two layers": (lambda: nn.Sequential(Blocks(), nn.Linear(12, 24), nn.ReLU(), Blocks()), 24, 2),
    "values of a frozen one": (Frozen, 24, 1),
    "KSLinear": (lambda: ksopt.KSLinear(24, 24, "(2,3,3,4)*(2,3,3,4)"), 24, 2),
}


def compiled_by_ksopt(model, **how):
    return torch.compile(model, backend="ksopt", fullgraph=True, **how)


def check(compiled, model, x):
    # Float32 sums in another order.
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.sweep
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", LAYERS)
def test_a_weight_is_prepared_once(name, mode, kernels, graph_caches):
    build, features, weights = LAYERS[name]
    model = build()
    compiled = compiled_by_ksopt(model)
    with mode():
        xs = [torch.randn(6, features) for _ in range(5)]
        for x in xs:
            compiled(x)
        assert (kernels.calls, kernels.prepared) == (5 * weights, weights)
        check(compiled, model, xs[0])
    assert counters["ksopt"]["lowered"] >= 1
    assert not counters["aot_autograd"]["autograd_cache_bypass"]


def refreshed_after(model):
    model.weight.data.mul_(3)
    ksopt.refresh()


CHANGES = {
    "in place": lambda model: model.weight.mul_(2),
    "an element": lambda model: model.weight.view(-1).__setitem__(3, 7.0),
    "loaded": lambda model: model.load_state_dict({"weight": torch.randn_like(model.weight)}),
    "other data": lambda model: setattr(model.weight, "data", torch.randn_like(model.weight)),
    "written through .data": refreshed_after,
    "replaced": lambda model: setattr(
        model, "weight", nn.Parameter(torch.randn_like(model.weight))
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("build", [lambda: Layer("jikl"), Blocks], ids=["permuted", "viewed"])
def test_every_change_is_noticed_at_once(build, mode, kernels):
    model = build()
    compiled = compiled_by_ksopt(model)
    features = 40 if isinstance(model, Layer) else 24
    for count, change in enumerate((lambda _: None, *CHANGES.values()), start=1):
        with torch.no_grad():
            change(model)
        for _ in range(3):
            with mode():
                check(compiled, model, torch.randn(6, features))
        assert kernels.prepared == count


@pytest.mark.parametrize(
    "how",
    [
        {"dynamic": True},
        {"mode": "reduce-overhead"},
        {"options": {"mode": "max-autotune", "tune": "off"}},
    ],
    ids=str,
)
def test_however_it_is_compiled(how, kernels):
    model = Layer("jikl")
    compiled = compiled_by_ksopt(model, **how)
    with torch.no_grad():
        for batch in (4, 7, 9):
            check(compiled, model, torch.randn(batch, 40))
            model.weight.add_(1)
            check(compiled, model, torch.randn(batch, 40))
            check(compiled, model, torch.randn(batch, 40))
    assert kernels.prepared == 4  # it changed three times


def test_constants_of_inductors_freezing_stay_unchanged(kernels):
    model = Layer("jikl").requires_grad_(False)
    compiled = compiled_by_ksopt(model, options={"freezing": True})
    with torch.no_grad():
        for _ in range(4):
            check(compiled, model, torch.randn(6, 40))
    assert kernels.prepared == 1


@pytest.mark.slow
def test_a_cast_by_the_author_is_cached_too(kernels):
    layer = Layer("jikl")

    def model(x):
        weight = layer.weight.to(torch.bfloat16)
        y = torch.einsum("nilj,jikl->nikj", x.bfloat16().view(-1, 2, 4, 5), weight)
        return y.flatten(1)

    compiled = compiled_by_ksopt(model)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(6, 40)
            # bfloat16 sums in another order
            torch.testing.assert_close(compiled(x), model(x), rtol=5e-2, atol=2e-1)
    assert kernels.prepared == 1
    assert weight_cache.cached_bytes(torch.device("cpu")) == 4 * layer.weight.numel()
    actual, expected = (
        torch.autograd.grad(function(x).float().sum(), layer.weight)[0]
        for function in (compiled, model)
    )
    torch.testing.assert_close(actual, expected, rtol=5e-2, atol=2e-1)
    assert not weight_cache._by_weight  # it is trained


@pytest.mark.slow
def test_in_a_package_of_aotinductor(kernels, tmp_path):
    model, x = Layer("jikl"), torch.randn(6, 40)
    with torch.no_grad():
        program = ksopt.export_pass(torch.export.export(model, (x,)))
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "model.pt2")
        )
        package = torch._inductor.aoti_load_package(path)
        before = kernels.prepared
        for _ in range(4):
            check(package, model, torch.randn(6, 40))
    assert kernels.prepared == before + 1


def test_in_another_backend(kernels):
    def backend(gm, example_inputs):
        ksopt.compile.rewrite(gm, example_inputs)
        return torch._inductor.compile(gm, example_inputs)

    model = Layer("jikl")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        for _ in range(4):
            check(compiled, model, torch.randn(6, 40))
    assert kernels.prepared == 1


def test_a_computed_weight_is_prepared_at_each_call_and_never_cached(kernels, graph_caches):
    model = Layer("jikl")

    def masked(x):
        return torch.func.functional_call(model, {"weight": model.weight * 2}, (x,))

    compiled = compiled_by_ksopt(masked)
    with torch.no_grad():
        for _ in range(3):
            check(compiled, masked, torch.randn(6, 40))
    assert kernels.prepared == 3
    assert not weight_cache._by_weight
    assert not counters["aot_autograd"]["autograd_cache_bypass"]


@pytest.mark.parametrize(
    ("build", "counts"),
    # The weight, and the transposed one that gradients meet. An einsum saves a copy for these.
    [(Blocks, (2, 4)), pytest.param(lambda: Layer("iklj"), (4, 8), marks=pytest.mark.slow)],
    ids=["viewed", "canonical"],
)
def test_a_frozen_weight_that_gradients_pass_through_is_cached(build, counts, kernels):
    model = build().requires_grad_(False)
    features = 40 if isinstance(model, Layer) else 24
    before = nn.Parameter(torch.randn(features))

    def run(x):
        return model(x * before)

    compiled = compiled_by_ksopt(run)
    optimizer = torch.optim.SGD([before], lr=0.0)
    for count in counts:
        for _ in range(3):
            x = torch.randn(6, features)
            actual, expected = (
                torch.autograd.grad(function(x).square().sum(), before)[0]
                for function in (compiled, run)
            )
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-3)
            before.grad = actual
            optimizer.step()
        assert kernels.prepared == count
        model.weight.mul_(2)
    (site,) = ksopt.explain(run, torch.randn(6, features)).sites
    assert (site.training, site.to_input, site.computed) == (False, True, False)


@pytest.mark.slow
def test_an_evaluation_after_training_steps_prepares_again_whatever_the_steps_did(kernels):
    model = Layer("jikl")
    compiled, x = compiled_by_ksopt(model), torch.randn(6, 40)
    for _ in range(2):
        with torch.no_grad():
            check(compiled, model, x)
        compiled(x).sum().backward()
        model.weight.data.sub_(0.1 * model.weight.grad)  # which torch does not count
    with torch.no_grad():
        check(compiled, model, x)
        before = kernels.prepared
        check(compiled, model, x)
    assert kernels.prepared == before


@pytest.mark.sweep
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["canonical", "[d, a, b, c]", "as a linear layer's", "KSLinear"])
def test_autocast_casts_and_prepares_a_weight_once(name, mode, kernels):
    build, features, weights = LAYERS[name]
    model = build()
    compiled = compiled_by_ksopt(model)
    with mode(), torch.autocast("cpu", torch.bfloat16):
        xs = [torch.randn(6, features) for _ in range(4)]
        for x in xs:
            compiled(x)
        assert (kernels.calls, kernels.prepared) == (4 * weights, weights)
        # Two bytes an element for the cast, and two for what is prepared of it.
        elements = sum(p.numel() for p in model.parameters() if p.dim() > 1)
        assert weight_cache.cached_bytes(torch.device("cpu")) == 4 * elements
        actual, expected = compiled(xs[0]), model(xs[0])
        torch.testing.assert_close(actual, expected, rtol=5e-2, atol=2e-1)  # bfloat16 rounds both
        assert actual.dtype is torch.bfloat16
        kernels.prepared = 0
        for parameter in model.parameters():
            with torch.inference_mode(False), torch.no_grad():
                parameter.mul_(2)
        for x in xs:
            torch.testing.assert_close(compiled(x), model(x), rtol=5e-2, atol=4e-1)
        assert kernels.prepared == weights
