"""Times ways to compute a factor's weight gradient, beside the gradient of the dense layer.

    python docs/experiments/weight_gradients.py [--device cuda] [--rows 25088] [--dtype bfloat16]

dK[i,k,l,j] is the sum over the rows n of dY[n,i,k,j] X[n,i,l,j]. With d > 1 neither dY nor X is a
batch of matrices: ``apart`` copies both into one, as ksopt does. ``joined`` multiplies all pairs of
j and takes the diagonal: d times the flops and no copy. ``split`` sums shares of the rows, in
float32. Each way is checked against float64 first, then all are timed in turns. "Memory alone" is
the time of an H200's memory, 4.25 TB/s. ``--chains``: both gradients of whole chains instead
(chain_weight_gradients.py). ``--show FILE`` measures nothing: it prints the efficiencies of the
sampled patterns in such an output, over memory of ``--memory`` TB/s.
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import chain_weight_gradients
from ksopt.bench import paper_patterns
from ksopt.jit import arch, nvrtc
from ksopt.kernels import weight_gradients
from ksopt.kernels.families.common import pytorch_cost, weight_grad
from ksopt.kernels.families.common.weight_grad import Launch, WeightGradient
from ksopt.kernels.problem import DeviceSpec
from ksopt.measure import timing
from ksopt.measure.accuracy import largest_error
from ksopt.measure.measurement import quantile
from ksopt.ops.weight_gradient import weight_grad_decomposed
from ksopt.patterns.chain import Chain, Pattern

LAYERS = (
    (384, 1536, "(1,768,64,2)*(2,64,192,1)"),
    (1536, 384, "(1,192,64,2)*(2,64,768,1)"),
    (384, 1152, "(1,576,64,2)*(2,64,192,1)"),
    (1024, 4096, "(1,2048,170,2)*(2,170,512,1)"),
    (1024, 1024, "(1,512,128,2)*(2,128,512,1)"),
    (1024, 1024, "(1,256,128,4)*(4,128,256,1)"),
    (1024, 1024, "(1,128,128,8)*(8,128,128,1)"),
    (2048, 2048, "(1,1024,256,2)*(2,256,1024,1)"),
)
SPLITS = (4, 16)
Way = Callable[[Tensor, Tensor, Pattern], Tensor]


def apart(grad: Tensor, x: Tensor, p: Pattern) -> Tensor:
    """One batched product of a*d matrices, after copies."""
    return weight_grad_decomposed(grad, x, p.a, p.d, False)


def _wide(a: Tensor, b: Tensor) -> Tensor:
    """A product with sums in float32."""
    if a.dtype is torch.float32 or not a.is_cuda:
        return torch.matmul(a, b)
    product = torch.mm if a.dim() == 2 else torch.bmm
    return product(a, b, out_dtype=torch.float32)


def _diagonal(blocks: Tensor, p: Pattern, dtype: torch.dtype) -> Tensor:
    """The values of equal j of [a, b*d, c*d]: [a, b, c, d]."""
    return blocks.view(p.a, p.b, p.d, p.c, p.d).diagonal(0, 2, 4).to(dtype).contiguous()


def joined(grad: Tensor, x: Tensor, p: Pattern) -> Tensor:
    """One batched product of a matrices [b*d, c*d]."""
    rows = grad.view(-1, p.a, p.b * p.d).permute(1, 2, 0)
    return _diagonal(_wide(rows, x.view(-1, p.a, p.c * p.d).transpose(0, 1)), p, x.dtype)


def joined_one_by_one(grad: Tensor, x: Tensor, p: Pattern) -> Tensor:
    """`joined` as a separate products, which a library may split over the rows."""
    rows, others = grad.view(-1, p.a, p.b * p.d), x.view(-1, p.a, p.c * p.d)
    blocks = [_wide(rows[:, i].T, others[:, i]) for i in range(p.a)]
    return _diagonal(torch.stack(blocks), p, x.dtype)


def joined_split(parts: int, grad: Tensor, x: Tensor, p: Pattern) -> Tensor:
    """The sum of a batched products of shares of the rows."""
    rows = grad.view(parts, -1, p.a, p.b * p.d)
    others = x.view(parts, -1, p.a, p.c * p.d)
    blocks = [_wide(rows[:, :, i].mT, others[:, :, i]).sum(0) for i in range(p.a)]
    return _diagonal(torch.stack(blocks), p, x.dtype)


def whole(grad: Tensor, x: Tensor, p: Pattern) -> Tensor:
    """One product of the whole matrix, from which the support is taken."""
    blocks = _wide(grad.T, x).view(p.a, p.b * p.d, p.a, p.c * p.d).diagonal(0, 0, 2)
    return _diagonal(blocks.permute(2, 0, 1).contiguous(), p, x.dtype)


MEMORY_TBS = 4.25
WAYS: dict[str, Way] = {
    "apart": apart,
    "joined": joined,
    "one by one": joined_one_by_one,
    "whole": whole,
    **{f"split {parts}": partial(joined_split, parts) for parts in SPLITS},
}


def main() -> None:
    """Check and time every way for the factors of each layer's chain, and for other patterns."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=25_088)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tiles", type=int, default=1, help="of the kernels, predicted")
    parser.add_argument("--drawn", type=int, default=0, help="tiles drawn at random, too")
    parser.add_argument("--no-layers", action="store_true", help="the sample alone")
    parser.add_argument("--sample", type=int, default=0, help="of the paper's patterns, too")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)
    parser.add_argument("--chains", action="store_true", help="both gradients in one launch")
    parser.add_argument("--show", type=Path, help="the efficiencies of an earlier output")
    parser.add_argument("--memory", type=float, default=MEMORY_TBS, help="TB/s, for --show")
    options = parser.parse_args()
    if options.show:
        print(efficiencies(options.show.read_text(encoding="utf-8"), options.memory))
        return
    if options.chains:
        chain_weight_gradients.main(options)
        return
    torch.manual_seed(0)
    for n, m, text in () if options.no_layers else LAYERS:
        for pattern in Chain.parse(text):
            _compare(options, pattern, (n, m))
    if options.sample:
        for pattern in paper_patterns.stratified_sample(options.sample, options.seed):
            _compare(options, pattern, None)


def efficiencies(output: str, memory_tbs: float = MEMORY_TBS) -> str:
    """Memory's time over the time of the faster of ``apart`` and the kernels, of the sample.

    "predicted" is that of the one with the least predicted time.

    Example:
        >>> print(efficiencies("(4,8,8,4): memory alone 2.0 us; apart 8.0; kernel 1x1/1 4.0"))
        all: 1 patterns, median 0.500 (apart 0.250, predicted 0.500), 10th percentile 0.500, \
at least 0.55: 0; speedup 2.00, at most 2.00; the kernel is faster on 1
        d = 4: 1 patterns, median 0.500 (apart 0.250, predicted 0.500), 10th percentile 0.500, \
at least 0.55: 0; speedup 2.00, at most 2.00; the kernel is faster on 1
    """
    groups: dict[str, list[tuple[float, float, float]]] = {}
    for line in output.splitlines():
        if "memory alone" not in line or "dense" in line:  # of a layer's factors
            continue
        memory = float(re.findall(r"memory alone ([\d.]+)", line)[0]) * MEMORY_TBS / memory_tbs
        times = [float(us) for us in re.findall(r"(?:apart|kernel \S+) ([\d.]+)", line)]
        guesses = re.findall(r"(?:apart|kernel \S+) ([\d.]+) \([^)]*predicted ([\d.]+)", line)
        chosen = min(guesses, key=lambda it: float(it[1]), default=(min(times), 0.0))[0]
        is_matrix = re.match(r"\(1,\d+,\d+,1\)", line)  # whose gradient no kernel computes
        times, chosen = (times[:1], times[0]) if is_matrix else (times, chosen)
        d = re.findall(r"(\d+)\): memory", line)[0]
        for group in ("all", "a = d = 1" if is_matrix else f"d = {d}"):
            groups.setdefault(group, []).append(
                (memory / min(times), memory / times[0], memory / float(chosen))
            )
    lines = []
    for group, values in groups.items():
        best, apart, predicted = (sorted(one) for one in zip(*values, strict=True))
        speedups = sorted(mine / theirs for mine, theirs, _ in values)
        lines.append(
            f"{group}: {len(values)} patterns, median {quantile(best, 0.5):.3f} "
            f"(apart {quantile(apart, 0.5):.3f}, predicted "
            f"{quantile(predicted, 0.5):.3f}), 10th percentile {quantile(best, 0.1):.3f}, "
            f"at least 0.55: {sum(one >= 0.55 for one in best)}; "
            f"speedup {quantile(speedups, 0.5):.2f}, at most {speedups[-1]:.2f}; "
            f"the kernel is faster on {sum(one > 1 for one in speedups)}"
        )
    return "\n".join(lines)


def _compare(options: argparse.Namespace, p: Pattern, dense: tuple[int, int] | None) -> None:
    dtype: torch.dtype = getattr(torch, options.dtype)

    def draw(features: int) -> Tensor:
        return torch.randn(options.rows, features, device=options.device).to(dtype)

    x, grad = draw(p.in_features), draw(p.out_features)
    ways: dict[str, Callable[[], object]] = {}
    if dense is not None:
        dense_x, dense_grad = map(draw, dense)
        ways["dense"] = lambda: dense_grad.T @ dense_x
    truth = weight_grad_decomposed(grad.double(), x.double(), p.a, p.d, False)
    errors, predicted = {}, {}
    for name in options.ways:
        way = WAYS[name]
        ways[name] = partial(way, grad, x, p)
        errors[name] = largest_error(way(grad, x, p), truth)
    spec = DeviceSpec.of_device(0) if options.device == "cuda" else None
    if spec is not None:
        for launch in _launches(p, options, spec):
            name = f"kernel {launch.tile}/{launch.shares}"
            kernel = WeightGradient(p, options.dtype, launch, 0)
            ways[name] = partial(kernel, grad, x)
            errors[name] = largest_error(kernel(grad, x)[0], truth)
            predicted[name] = launch.predicted_us(p, options.rows, spec)
    predicted["apart"] = pytorch_cost.weight_gradient_us(p, options.rows, options.dtype)
    times = timing.measure(ways, options.device, max_seconds=0.25, precision=0.02)
    floor = 2 * options.rows * (p.in_features + p.out_features) / (MEMORY_TBS * 1e6)
    words = [f"{p}: memory alone {floor:.1f} us"]
    for name, one in times.items():
        guess = f", predicted {predicted[name]:.1f}" if name in predicted else ""
        error = f" ({errors[name]:.0e}{guess})" if name in errors else ""
        words.append(f"{name} {one.median_us:.1f}{error}")
    print("; ".join(words), flush=True)


def _launches(p: Pattern, options: argparse.Namespace, spec: DeviceSpec) -> list[Launch]:
    """The launches to time, their kernels compiled."""
    launches = weight_gradients.launches(p, options.dtype, options.rows, spec)
    launches.sort(key=lambda one: one.predicted_us(p, options.rows, spec))
    best, others = launches[: options.tiles], launches[options.tiles :]
    random.Random(options.seed).shuffle(others)
    chosen = best + others[: options.drawn]
    target = arch.of_device(0)

    def compiled(one: Launch) -> object:
        return nvrtc.cubin(weight_grad.source(p, one.tile, options.dtype), target)

    with ThreadPoolExecutor() as pool:
        list(pool.map(compiled, chosen))
    return chosen


if __name__ == "__main__":
    main()
