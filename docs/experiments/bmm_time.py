"""The host's time of a product in Python and through the host library, without a GPU.

    python docs/experiments/bmm_time.py

Prints microseconds per call, the least of 7 rounds, of tiny products on the CPU with a simulated
driver: of batched products by the operators that compiled graphs call, by ks_mm, and past torch's
dispatcher; of a kernel that does nothing, with weights stored in its order or not; and of whole
layers by a kernel that does nothing. The clock is that of the thread, which leaves out other
processes on its core: ksopt.measure has none such.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ksopt import ops
from ksopt.kernels import dispatch, plan_autotuner, weight_cache, weight_groups
from ksopt.kernels.autotuner import Choice, Decision, _preparing
from ksopt.kernels.backends import cuda
from ksopt.kernels.candidate import Candidate
from ksopt.kernels.families.common.pytorch_ops import multiplier
from ksopt.kernels.launcher import HostLauncher, chain_entry
from ksopt.kernels.operands import key_of
from ksopt.kernels.problem import Epilogue, Geometry, Problem
from ksopt.patterns.chain import Chain, Pattern

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "csrc"))
import played_driver

ROUNDS, CALLS = 7, 430
PATTERNS = (Pattern(8, 4, 4, 1), Pattern(1, 4, 4, 8))


def least_us(call: Callable[[], object]) -> float:
    """Microseconds of a call in this thread's own time, as other processes may use the core."""
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.thread_time()
        for _ in range(CALLS):
            call()
        best = min(best, (time.thread_time() - began) / CALLS * 1e6)
    return best


def nothing_known(*_: object) -> None:
    """A stand-in for the library's lookup that never has an entry."""


def measure(pattern: Pattern, by_library: bool) -> None:
    """Print the times of the products of one pattern."""
    cuda.forget()
    weight_cache.refresh()
    x, weight = torch.randn(8, pattern.in_features), torch.randn(pattern.weight_shape)
    out = torch.empty(8, pattern.out_features)
    key = cuda.problem_key_of(x, weight, False)
    cached, repacked = (
        Choice(
            Candidate("bmm", key.problem, 1.0),
            _preparing(multiplier("bmm", key.problem), weight_is),
            "model",
        )
        for weight_is in ("cached", "repacked")
    )
    cuda.remember(key, x.get_device(), Decision(cached, repacked))
    torch.ops.ksopt_host.serve_products(by_library)
    dispatch.run_known = cuda.run_known if by_library else nothing_known
    dispatch.run_known_repacked = cuda.run_known_repacked if by_library else nothing_known
    calls = {
        "ks_mm_inner.out": lambda: ops.ks_mm_inner_out(x, weight, out=out),
        "ks_mm_repacked.out": lambda: ops.ks_mm_repacked_out(x, weight, out=out),
        "ks_mm": lambda: ops.ks_mm(x, weight),
        "past the dispatcher": lambda: ops.multiply(x, weight),
    }
    times = ", ".join(f"{name} {least_us(call):.1f}" for name, call in calls.items())
    print(f"{pattern} {'library' if by_library else 'Python'}: {times}", flush=True)


def measure_order(pattern: Pattern, stored_in_order: bool) -> None:
    """Print the times of an empty kernel, with a weight stored as [a, b, c, d] or not."""
    cuda.forget()
    weight_cache.refresh()
    dispatch.run_known, dispatch.run_known_repacked = cuda.run_known, cuda.run_known_repacked
    x, out = torch.randn(1, pattern.in_features), torch.empty(1, pattern.out_features)
    owner = torch.randn(pattern.weight_shape)
    if not stored_in_order:
        owner = owner.permute(0, 3, 1, 2).contiguous()
    weight = owner if stored_in_order else owner.permute(0, 2, 3, 1)
    key = cuda.problem_key_of(x, weight, False)
    launcher = HostLauncher(key.problem, Geometry(32, 0, 16, 1, 100), 1, nothing_known)
    choice = Choice(Candidate("kernel", key.problem, 1.0), launcher, "model")
    cuda.remember(key, x.get_device(), Decision(choice, choice))
    view = torch._C._dynamo.guards._reinterpret_tensor  # Inductor calls it
    place = (owner, weight.shape, weight.stride(), 0)
    calls = {
        "ks_mm_inner.out": lambda: ops.ks_mm_inner_out(x, view(*place), owner, out=out),
        "ks_mm_repacked.out": lambda: ops.ks_mm_repacked_out(x, view(*place), owner, out=out),
    }
    times = ", ".join(f"{name} {least_us(call):.1f}" for name, call in calls.items())
    print(f"{pattern} weight {'' if stored_in_order else 'not '}in order: {times}", flush=True)


class Launched:
    """A layer computed by one kernel that does nothing."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def __call__(self, x, weights, bias=None, residual=None, out=None, /):
        weight_groups.prepared_together(weights, "nothing", lambda _: torch.empty(1))
        return x.new_empty(len(x), self._problem.out_features) if out is None else out

    def entry(self):
        p = self._problem
        shapes = [one.weight_shape for _ in range(p.siblings) for one in p.chain]
        return chain_entry(
            kernel=1, out_features=p.out_features, threads=128, shared_bytes=0, rows_per_unit=64,
            most_blocks=132, cluster=1, form=weight_groups.number_of("nothing", shapes, p.dtype),
            pack=1, pack_blocks=1, pack_threads=32, packed_elements=1,
        )  # fmt: skip


def measure_layer(siblings: int) -> None:
    """Print the times of a layer of two factors with bias, GELU and residual, in one launch."""
    plan_autotuner.forget()
    weight_cache.refresh()
    chain = Chain.parse("(1,8,8,8)*(8,8,8,1)")
    epilogue = Epilogue(bias=True, activation="gelu", residual=True)
    problem = Problem(chain, "float32", False, epilogue=epilogue, siblings=siblings)
    x, residual = torch.randn(8, chain.in_features), torch.randn(8, problem.out_features)
    weights = [torch.randn(p.weight_shape) for _ in range(siblings) for p in chain]
    around = (torch.randn(problem.out_features), residual, "gelu", False, siblings)
    choice = Choice(Candidate("kernel", problem, 1.0), Launched(problem), "model")
    plan_autotuner._has_spec[x.device] = True
    plan_autotuner._decisions[key_of(problem, x), x.device] = Decision(choice, choice)
    view = torch._C._dynamo.guards._reinterpret_tensor  # Inductor calls it
    places = [(one, one.shape, one.stride(), 0) for one in weights]
    out = torch.empty(8, problem.out_features)

    def viewed() -> list[torch.Tensor]:
        return [view(*place) for place in places]

    calls = {
        "the views alone": viewed,
        "ks_chain_inner": lambda: ops.ks_chain_inner(x, viewed(), *around, weights),
        "ks_chain.out": lambda: ops.ks_chain_out(x, viewed(), *around, weights, out=out),
        "past the dispatcher": lambda: ops.chain(x, weights, *around),
    }
    times = ", ".join(f"{name} {least_us(call):.1f}" for name, call in calls.items())
    print(f"{siblings} x {chain}: {times}", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    # A cache of its own: what the library is compiled from may change.
    os.environ["KSOPT_CACHE_DIR"] = tempfile.mkdtemp()
    library = played_driver.library(optimize=True)
    for module, name, value in played_driver.stand_ins(library):
        setattr(module, name, value)
    with torch.no_grad():
        for pattern in PATTERNS:
            for by_library in (False, True):
                measure(pattern, by_library)
        for stored_in_order in (True, False):
            measure_order(PATTERNS[1], stored_in_order)
        for siblings in (1, 3):
            measure_layer(siblings)


if __name__ == "__main__":
    main()
