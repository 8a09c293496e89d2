"""The last launch of a layer by a launch per factor, and graphs that have such layers."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ksopt.epilogue import with_epilogue
from ksopt.kernels import dispatch, factor_epilogue, registry
from ksopt.kernels.autotuner import Choice
from ksopt.kernels.backends.cuda import CudaBackend
from ksopt.kernels.gpus import GPUS
from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Pattern
from ksopt.reference import ks_reference


def choice_of(pattern, way):
    problem = Problem.of_factor(pattern, "float32", False)
    (candidate,) = (one for one in registry.pytorch(problem, 8, 1) if one.name == way)
    return Choice(candidate, candidate.build(-1), "model")


@pytest.mark.parametrize("activation", ["none", "gelu"])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("way", ["bmm", "einsum"])
def test_pytorchs_product_by_a_full_matrix_adds_the_bias(way, has_residual, activation):
    choice = choice_of(Pattern(1, 12, 8, 1), way)
    x, weight, bias = torch.randn(3, 5, 8), torch.randn(1, 12, 8, 1), torch.randn(12)
    residual = torch.randn(3, 5, 12) if has_residual else None
    truth = with_epilogue(ks_reference(x, weight), bias, activation, residual)
    for out in (None, torch.full((3, 5, 12), torch.nan)):
        y = factor_epilogue.run(choice, x, weight, bias, residual, activation, out)
        torch.testing.assert_close(y, truth)
        assert out is None or y.data_ptr() == out.data_ptr()


def test_other_products_leave_the_epilogue_behind_them():
    x, bias = torch.randn(5, 16), torch.randn(12)
    choice = choice_of(Pattern(2, 6, 8, 1), "bmm")
    weight = torch.randn(2, 6, 8, 1)
    assert factor_epilogue.run(choice, x, weight, bias, None, "none", None) is None
    choice = choice_of(Pattern(1, 12, 16, 1), "bmm")
    weight, residual = torch.randn(1, 12, 16, 1), torch.randn(5, 12)
    assert factor_epilogue.run(choice, x, weight, None, residual, "relu", None) is None


def test_a_cpu_has_no_such_launches():
    x, weight = torch.randn(5, 8), torch.randn(1, 12, 8, 1)
    assert dispatch.run_within(x, weight, False, torch.randn(12), "relu", None) is None


class Seen(TorchDispatchMode):
    """The names of ksopt's operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "ksopt":
            self.names.append(op._opname)
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("shapes", "rows", "batch_last", "expected"),
    [
        (((1, 512, 128, 2), (2, 128, 512, 1)), 16, False, ["ks_chain_inner"]),
        (((1, 512, 128, 2), (2, 128, 512, 1)), 1, False, ["ks_chain_inner"]),
        (((4, 64, 64, 16), (16, 64, 64, 4)), 8192, True, ["ks_mm_inner", "ks_mm_inner"]),
    ],
)
def test_a_graph_has_one_operator_where_nothing_is_behind_the_launches(
    monkeypatch, tmp_path, shapes, rows, batch_last, expected
):
    monkeypatch.setenv("KSOPT_TUNE", "model")
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(CudaBackend, "spec", lambda *_: GPUS["H200"])
    with FakeTensorMode(), torch.no_grad():

        def empty(*sizes):
            return torch.empty(sizes, device="cuda", dtype=torch.bfloat16)

        weights = [empty(*shape) for shape in shapes]
        features = shapes[1][0] * shapes[1][2] * shapes[1][3]
        x = empty(features, rows) if batch_last else empty(rows, features)
        bias = empty(shapes[0][0] * shapes[0][1] * shapes[0][3])
        with Seen() as seen:
            torch.ops.ksopt.ks_chain(x, weights, bias, None, "gelu", batch_last)
    assert seen.names == expected
