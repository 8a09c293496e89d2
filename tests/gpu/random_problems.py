"""Random products against float64, with what is chosen for each and with one other way.

    python tests/gpu/random_problems.py --count 20000 --workers 16
    python tests/gpu/random_problems.py --seed 123 --count 1       # one again

Exits with 1 if a result was wrong.

A problem is a factor or a chain of `ksopt.bench.random_subjects`, in float32, TF32, float16 or
bfloat16, in either layout, some with a bias, an activation, a residual or siblings, and some with
rows that lie apart in memory or begin at odd addresses. Three seeds in a row have the same factors,
dtype, layout and epilogue, and rows and memory of their own: most of the time goes into compiling,
and most faults are in tails. The cost models choose (KSOPT_TUNE=model): nothing is timed.

Results are poisoned with NaN first, and the error is compared with that of PyTorch's own products
in the same dtype (`ksopt.measure.accuracy`).
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from ksopt import ops, precision
from ksopt.bench.random_subjects import draw
from ksopt.kernels import registry
from ksopt.kernels.backends.base import backend_of
from ksopt.kernels.candidate import Candidate
from ksopt.kernels.operands import Operands, random_operands
from ksopt.kernels.problem import DeviceSpec, Epilogue, Problem, rows_of
from ksopt.measure.accuracy import AccuracyCheck, Around

KINDS = ("float32", "tf32", "float16", "bfloat16")
_FEW_ROWS = 600
_MOST_SIBLINGS = 4
_TOGETHER = 3  # seeds of one problem


@dataclass(frozen=True)
class Case:
    """A product.

    Attributes:
        seed: that it was drawn by.
        problem: what is computed.
        rows: of x.
        lies: how x lies in memory: "together", "apart" (rows of a wider matrix), or "odd" (they
            begin two elements behind such an address).
    """

    seed: int
    problem: Problem
    rows: int
    lies: str

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.problem}, {self.rows} rows {self.lies}"


def case_of(seed: int) -> Case:
    """The product of a seed, the same anywhere."""
    rng, own = random.Random(seed // _TOGETHER), random.Random(seed)
    ((chain, most),) = draw(1, seed // _TOGETHER)
    kind = rng.choice(KINDS)
    rows = most if seed % _TOGETHER == 0 else own.randint(1, most)
    if own.random() < 0.7:  # most faults are in tails, and a large product takes long
        rows = min(rows, own.randint(1, _FEW_ROWS))
    last = rng.random() < 0.5
    siblings, epilogue = 1, Epilogue()
    if rng.random() < 0.4:
        activation = rng.choice(("none", "relu", "gelu", "gelu_tanh", "silu"))
        epilogue = Epilogue(rng.random() < 0.7, activation, rng.random() < 0.3)
        if rng.random() < 0.25:
            siblings = rng.randint(2, _MOST_SIBLINGS)
    dtype = "float32" if kind == "tf32" else kind
    problem = Problem(chain, dtype, last, kind != "tf32", epilogue, siblings)
    return Case(seed, problem, rows, own.choice(("together", "together", "apart", "odd")))


def operands_of(case: Case, device: torch.device) -> Operands:
    """Random operands of a case; what lies between x's rows is NaN."""
    torch.manual_seed(case.seed)
    drawn = random_operands(case.problem, case.rows, device)
    if case.lies == "together":
        return drawn
    x = drawn.x
    before = 2 if case.lies == "odd" else 0
    wide = torch.full((x.shape[0], x.shape[1] + 16), float("nan"), dtype=x.dtype, device=device)
    apart = wide[:, before : before + x.shape[1]]
    return Operands(apart.copy_(x), drawn.weights, drawn.bias, drawn.residual)


def faults(case: Case, device: torch.device) -> list[str]:
    """What is wrong with the way that is chosen for a case, and with one other."""
    problem = case.problem
    with precision.fp32_products("ieee" if problem.exact else "tf32"), torch.no_grad():
        operands = operands_of(case, device)
        check = check_of(problem, operands, problem.is_factor)
        if not check.is_conclusive:
            return []
        # What is chosen may be PyTorch's own, which adds many rows in another order than few.
        chosen = check_of(problem, operands, False)
        fault = chosen.fault_of(lambda x: by_operator(problem, operands, x))
        wrong = [] if fault is None else [f"as chosen: {fault}"]
        return wrong + another_fault(case, operands, check)


def check_of(problem: Problem, operands: Operands, rounded_once: bool) -> AccuracyCheck:
    """What the result should be, and how far off it may be; see `AccuracyCheck`."""
    around = Around(operands.bias, problem.epilogue.activation, operands.residual, problem.siblings)
    return AccuracyCheck(
        operands.x,
        operands.weights,
        problem.layout,
        rounded_once=rounded_once,
        around=around,
    )


def by_operator(problem: Problem, operands: Operands, x: Tensor) -> Tensor:
    """The product by the operator of a layer."""
    return ops.chain(
        x,
        operands.weights,
        operands.bias,
        operands.residual,
        problem.epilogue.activation,
        problem.batch_last,
        problem.siblings,
    )


def another_fault(case: Case, operands: Operands, check: AccuracyCheck) -> list[str]:
    """What is wrong with a kernel of a case that is drawn from all that could be timed."""
    x, problem = operands.x, case.problem
    spec = backend_of(x.device.type).spec(x.device)
    if spec is None:
        return []
    candidate = another_kernel(case, spec)
    if candidate is None:
        return []
    if candidate.family is not None and candidate.family.is_judged_first:
        # Whoever races it compares its sums with PyTorch's, and may leave it out.
        check = check_of(problem, operands, False)
    call = candidate.build(x.get_device(), rows_of(x, problem.batch_last, case.rows))
    rest = operands.arguments(problem)[1:]
    check.poison()
    fault = check.judge(call(x, *rest))
    return [] if fault is None else [f"{candidate.label}: {fault}"]


def another_kernel(case: Case, spec: DeviceSpec) -> Candidate | None:
    """A kernel of a case: that of the first case of its problem, if it could be timed here, too."""
    first = case_of(case.seed - case.seed % _TOGETHER)
    drawn = _kernel_of(first.problem, first.rows, first.seed, spec)
    could_be = registry.candidates(case.problem, case.rows, spec)
    if drawn is not None and any(one.label == drawn.label for one in could_be):
        return drawn
    return _kernel_of(case.problem, case.rows, case.seed, spec)


def _kernel_of(problem: Problem, rows: int, seed: int, spec: DeviceSpec) -> Candidate | None:
    candidates = registry.candidates(problem, rows, spec)
    kernels = [one for one in candidates if one.family is not None]
    return random.Random(seed).choice(kernels) if kernels else None


def run(seeds: range, device: torch.device, seconds: float) -> tuple[int, int]:
    """Check the cases of some seeds while there is time, and print what is wrong; how many."""
    end, done, wrong = time.monotonic() + seconds, 0, 0
    for seed in seeds:
        if time.monotonic() > end:
            break
        case = case_of(seed)
        try:
            lines = faults(case, device)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            continue
        for line in lines:
            print(f"{case}: {line}", flush=True)
        done, wrong = done + 1, wrong + bool(lines)
    return done, wrong


def main() -> int:
    """Read the arguments and check; 1 where something is wrong."""
    parser = argparse.ArgumentParser(description="Random products against float64.")
    parser.add_argument("--count", type=int, default=1000, help="problems (%(default)s)")
    parser.add_argument("--seed", type=int, help="of the first; by the clock otherwise")
    parser.add_argument("--seconds", type=float, default=540.0, help="at most (%(default)s)")
    parser.add_argument("--workers", type=int, default=1, help="processes (%(default)s)")
    parser.add_argument("--device", default="cuda", help="(%(default)s)")
    arguments = parser.parse_args()
    seed = time.time_ns() // 1000 % 2**31 if arguments.seed is None else arguments.seed
    os.environ["KSOPT_TUNE"] = "model"
    if arguments.workers == 1:
        done, wrong = run(
            range(seed, seed + arguments.count), torch.device(arguments.device), arguments.seconds
        )
        print(f"{done} problems from seed {seed} on, {wrong} wrong")
        return int(wrong > 0)
    share = -(-arguments.count // (arguments.workers * _TOGETHER)) * _TOGETHER
    seed -= seed % _TOGETHER
    devices = [arguments.device]
    if arguments.device == "cuda":
        devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, __file__, "--device", devices[place % len(devices)]),
                *("--seed", str(seed + place * share), "--count", str(share)),
                *("--seconds", str(arguments.seconds)),
            ]
        )
        for place in range(arguments.workers)
    ]
    codes = [process.wait() for process in processes]
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
