"""The last launch of a layer by a launch per factor, and graphs that have such layers."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ksopt.epilogue import After
from ksopt.kernels import dispatch, factor_epilogue, registry, weight_cache
from ksopt.kernels.autotuner import Choice
from ksopt.kernels.backends.cuda import CudaBackend
from ksopt.kernels.candidate import Candidate
from ksopt.kernels.families.base import family_of
from ksopt.kernels.gpus import GPUS
from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Pattern


@pytest.mark.parametrize("way", ["bmm", "einsum"])
def test_products_of_pytorchs_leave_the_epilogue_behind_them(way):
    """Also by a full matrix: with a bias cuBLAS may add partial sums in 16 bit."""
    problem = Problem.of_factor(Pattern(1, 12, 8, 1), "float32", False)
    (candidate,) = (one for one in registry.pytorch(problem, 8, 1) if one.name == way)
    choice = Choice(candidate, candidate.build(-1), "model")
    x, weight, bias = torch.randn(5, 8), torch.randn(1, 12, 8, 1), torch.randn(12)
    assert factor_epilogue.run(choice, x, weight, After(bias)) is None


def test_a_cpu_has_no_such_launches():
    x, weight = torch.randn(5, 8), torch.randn(1, 12, 8, 1)
    assert dispatch.run_within(x, weight, False, After(torch.randn(12), "relu")) is None


def test_a_capture_takes_only_kernels_that_were_compared_before(monkeypatch):
    """Where results are judged: a graph cannot be, and its launches then leave the epilogue."""
    built = []
    problem = Problem.of_factor(Pattern(1, 12, 8, 1), "float32", False)
    candidate = Candidate("wgmma_tf32x3", problem, 1.0, family_of("wgmma_tf32x3"))
    choice = SimpleNamespace(call=None, candidate=candidate, repacks=False)
    monkeypatch.setattr(factor_epilogue, "_built", lambda *key: built.append(key))
    monkeypatch.setattr(factor_epilogue, "_launchers", {})
    operands = torch.randn(5, 8), torch.randn(1, 12, 8, 1), After(torch.randn(12))
    for mode, is_capturing, count in (
        ("measure", True, 0),
        ("model", True, 1),
        ("measure", False, 1),
    ):
        monkeypatch.setenv("KSOPT_TUNE", mode)
        monkeypatch.setattr(weight_cache, "is_capturing", lambda _, is_it=is_capturing: is_it)
        factor_epilogue._launchers.clear()
        built.clear()
        assert factor_epilogue.run(choice, *operands) is None
        assert len(built) == count, mode


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
