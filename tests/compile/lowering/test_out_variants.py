"""Compiled inference writes products into memory that Inductor has planned, and stays right."""

import copy

import pytest
import torch
from torch import nn
from written_code import result_and_code

import ksopt
from ksopt import ops
from ksopt.compile.lowering import out_variants
from ksopt.compile.lowering.out_variants import plan_results
from ksopt.nn import KSLinear

TWINS = ("ks_mm_inner", "ks_mm_repacked")
WRITTEN = "torch.ops.ksopt.ks_mm_inner.out("


def compiled(model, x, backend="ksopt", **how):
    """The compiled model, its result for x, and its code."""
    run = torch.compile(model, backend=backend, fullgraph=True, **how)
    y, code = result_and_code(lambda: run(x))
    return run, y, code


class Blocks(nn.Module):
    """Products by a parameter, by a permuted part of one, and by a computed weight."""

    def __init__(self):
        super().__init__()
        self.layer = KSLinear(64, 64, "(1,8,8,8)", bias=False)
        self.blocks = nn.Parameter(torch.randn(2, 4, 16, 16) / 4)

    def forward(self, x):
        y = self.layer(torch.relu(x)).relu()
        y = torch.einsum("nac,abc->nab", y.view(-1, 4, 16), self.blocks[1])
        y = torch.einsum("nac,acb->nab", y, torch.tanh(self.blocks[0]))
        return x + y.reshape(-1, 64)


@pytest.fixture(params=["no_grad", "inference_mode"])
def no_gradients(request):
    with getattr(torch, request.param)():
        yield


@pytest.mark.slow
def test_the_code_calls_the_variants_and_nothing_else(no_gradients):
    model, x = Blocks(), torch.randn(30, 64)
    run, y, code = compiled(model, x)
    assert code.count(WRITTEN) == 2
    assert code.count("torch.ops.ksopt.ks_mm_repacked.out(") == 1
    assert code.count("torch.ops.ksopt.") == 3
    torch.testing.assert_close(y, model(x), rtol=1e-4, atol=1e-5)
    for _ in range(3):  # results in memory that earlier calls have used
        x = torch.randn(30, 64)
        torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        model.blocks.mul_(2)
    torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_chain_takes_two_buffers_in_turns():
    model = nn.Sequential(*(KSLinear(64, 64, "(1,8,8,8)", bias=False) for _ in range(6)))
    x = torch.randn(30, 64)
    with torch.no_grad():
        _, y, code = compiled(model, x)
        torch.testing.assert_close(y, model(x), rtol=1e-4, atol=1e-5)
    assert code.count(WRITTEN) == 6
    body = code[code.index("def call(") :]
    assert body.count("empty_strided_cpu(") == 2
    assert body.count("# reuse") == 4


@pytest.mark.slow
def test_memory_from_one_pool():
    model, x = Blocks(), torch.randn(30, 64)
    with torch.no_grad():
        run, y, code = compiled(model, x, options={"memory_planning": True})
        torch.testing.assert_close(y, model(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(run(-x), model(-x), rtol=1e-4, atol=1e-5)
    assert code.count(WRITTEN) == 2
    assert "alloc_from_pool(" in code


@pytest.mark.slow
@pytest.mark.parametrize("last", [False, True])
def test_both_layouts_and_a_dynamic_batch(last):
    weight = torch.randn(2, 3, 4, 5)

    def product(x):
        return ops.ks_mm(x.sin(), weight, last).cos()

    def rows(batch):
        return torch.randn(40, batch, 2) if last else torch.randn(batch, 2, 40)

    with torch.no_grad():
        run, _, code = compiled(product, rows(7), dynamic=True)
        assert code.count(WRITTEN) == 1
        for batch in (7, 11, 2):
            x = rows(batch)
            torch.testing.assert_close(run(x), product(x), rtol=1e-4, atol=1e-5)


def test_a_result_that_is_returned_is_new_each_time():
    layer = KSLinear(64, 64, "(1,8,8,8)", bias=False)
    with torch.no_grad():
        run, first, _ = compiled(layer, torch.ones(3, 64))
        stored = first.clone()
        second = run(torch.zeros(3, 64))
    assert torch.equal(first, stored)
    assert not second.any()


@pytest.mark.slow
def test_an_input_is_not_written_over():
    model, x = Blocks(), torch.randn(30, 64)
    before = x.clone()
    with torch.no_grad():
        compiled(model, x)
    assert torch.equal(x, before)


@pytest.mark.slow
def test_training_has_equal_gradients():
    model, x = Blocks(), torch.randn(30, 64)
    twin = copy.deepcopy(model)
    _, y, _ = compiled(model, x)
    y.square().sum().backward()
    twin(x).square().sum().backward()
    for actual, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_inductors_own_backend_takes_them_too_once_registered():
    plan_results()
    model, x = Blocks(), torch.randn(30, 64)
    with torch.no_grad():
        _, y, code = compiled(model, x, backend="inductor")
        torch.testing.assert_close(y, model(x), rtol=1e-4, atol=1e-5)
    assert code.count(WRITTEN) == 1


@pytest.mark.slow
def test_code_in_cpp_calls_the_operators_that_return(tmp_path):
    plan_results()
    model, x = Blocks(), torch.randn(30, 64)
    with torch.no_grad():
        _, y, code = compiled(model, x, options={"cpp_wrapper": True})
        torch.testing.assert_close(y, model(x), rtol=1e-4, atol=1e-5)
        assert "ks_mm_inner" in code
        assert not any(f"{name}{dot}out" in code for name in TWINS for dot in "._")
        exported = ksopt.export_pass(torch.export.export(model, (x,)))
        path = torch._inductor.aoti_compile_and_package(
            exported, package_path=str(tmp_path / "m.pt2")
        )
        torch.testing.assert_close(
            torch._inductor.aoti_load_package(path)(x), model(x), rtol=1e-4, atol=1e-5
        )


@pytest.mark.slow
def test_an_inductor_that_is_not_known_gets_the_operator_as_it_is(monkeypatch, caplog):
    def changed(*_):
        raise TypeError("process_kernel() takes other arguments now")

    out_variants._warn_once.cache_clear()
    monkeypatch.setattr(out_variants, "_writing", changed)
    model, x = Blocks(), torch.randn(30, 64)
    torch._dynamo.reset()
    with torch.no_grad(), caplog.at_level("INFO", "ksopt.compile"):
        _, y, code = compiled(model, x, "ksopt")
        expected = model(x)
    assert "torch.ops.ksopt.ks_mm_inner.default(" in code
    assert WRITTEN not in code
    assert "takes other arguments now" in caplog.text
    torch.testing.assert_close(y, expected)
