"""The input gradient of trained chains in one launch, checked and timed.

    python docs/experiments/input_gradients.py [--tiles 5] [--dtype bfloat16] [--layers NAME ...]

The best predicted tiles of each layer, with several ways to share the work, are checked first:
against float64, with outputs poisoned with NaN, odd numbers of rows, and the error beside that of
PyTorch's two einsum products. Then they are timed beside the two launches that they replace, beside
the dense layer's gradient and, of siblings, beside a launch for each and a sum, behind an
activation beside the plain kernel, the product that is activated and a kernel of Inductor's: in
CUDA graphs of eight calls, the cache emptied before each replay. "pack" is the kernel that packs
the weights alone; a tile's time includes it. Kernels of the two launches are chosen by their cost
models, so that nothing is tuned here: set KSOPT_TUNE=measure for the choices of a training run.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ksopt.epilogue import Activation, activation_gradient
from ksopt.kernels import input_gradients
from ksopt.kernels.families import input_grad_wgmma16 as kernels
from ksopt.kernels.families.common import input_grad_tile as tiles
from ksopt.kernels.families.common.input_grad_tile import Config, Shape
from ksopt.kernels.problem import DeviceSpec
from ksopt.measure import cuda_graphs, timing
from ksopt.measure.accuracy import fault_against
from ksopt.ops import implementation
from ksopt.patterns.chain import Chain, Pattern
from tiles import compile_ahead

VIT, GPT, FEW = 25_216, 4_096, 64
CHECKED_ROWS = (1, 63, 200, 1000, 8_200)
_WORSE = 1.05  # times PyTorch's own error: the same roundings, in another order
_BY_LUCK = 0.0  # of hundreds of results not all are exact: PyTorch's error is the measure alone
_CALLS = 8  # of a graph


@dataclass(frozen=True)
class Layer:
    """Chains on one input in place of dense layers, and its rows in training."""

    name: str
    chain: str
    rows: int
    siblings: int = 1
    activation: Activation = "none"
    below: str | None = None

    @property
    def shape(self) -> Shape:
        left, right = Chain.parse(self.chain)
        below = None if self.below is None else Pattern.parse(self.below)
        return Shape(left, right, self.siblings, self.activation, below)


LAYERS = (
    Layer("vit-384-1536", "(1,768,64,2)*(2,64,192,1)", VIT),
    Layer("vit-1536-384", "(1,192,64,2)*(2,64,768,1)", VIT),
    Layer("vit-384-384", "(1,192,64,2)*(2,64,192,1)", VIT),
    Layer("gpt-1024-1024", "(1,512,128,2)*(2,128,512,1)", GPT),
    Layer("gpt-1024-4096", "(1,2048,128,2)*(2,128,512,1)", GPT),
    Layer("gpt-4096-1024", "(1,512,128,2)*(2,128,2048,1)", GPT),
    Layer("vit-qkv", "(1,192,64,2)*(2,64,192,1)", VIT, 3),
    Layer("gpt-qkv", "(1,512,128,2)*(2,128,512,1)", GPT, 3),
    Layer("few-qkv", "(1,384,128,2)*(2,128,384,1)", FEW, 3),
    Layer("vit-gelu-1536-384", "(1,192,64,2)*(2,64,768,1)", VIT, 1, "gelu", "(1,768,64,2)"),
    Layer(
        "gpt-gelu-4096-1024", "(1,512,128,2)*(2,128,2048,1)", GPT, 1, "gelu_tanh", "(1,2048,128,2)"
    ),
    Layer(
        "few-gelu-3072-768", "(1,384,128,2)*(2,128,1536,1)", FEW, 1, "gelu_tanh", "(1,1536,128,2)"
    ),
    Layer("few-768-768", "(1,384,128,2)*(2,128,384,1)", FEW),
    Layer("few-768-2304", "(1,1152,128,2)*(2,128,384,1)", FEW),
    Layer("few-768-3072", "(1,1536,128,2)*(2,128,384,1)", FEW),
    Layer("few-3072-768", "(1,384,128,2)*(2,128,1536,1)", FEW),
)


@dataclass(frozen=True)
class Operands:
    """The gradients of siblings' results, whose rows are not contiguous, and all factors.

    With an activation also the weight of the factor below, what that read, and the bias.
    """

    grads: list[Tensor]
    weights: list[Tensor]
    behind: tuple[Tensor, ...] = ()
    activation: Activation = "none"

    @classmethod
    def random(cls, s: Shape, rows: int, dtype: torch.dtype) -> Operands:
        def draw(*size: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*size, device="cuda") * scale).to(dtype)

        features, count = s.left.out_features + 16, s.siblings
        grads = [one[:, 8:-8] for one in draw(rows, count * features).chunk(count, 1)]
        weights = [draw(*p.weight_shape, scale=p.b**-0.5) for p in (s.left, s.right) * count]
        if s.below is None:
            return cls(grads, weights)
        weights.append(draw(*s.below.weight_shape, scale=s.below.c**-0.5))
        behind = draw(rows, s.features_below), draw(s.right.in_features)
        return cls(grads, weights, behind, s.activation)

    def by_einsum(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """All gradients by einsum, with each product rounded to ``dtype``."""
        rows, sums, planes = len(self.grads[0]), [], []
        for at, grad in enumerate(self.grads):
            left, right = (one.to(dtype) for one in self.weights[2 * at : 2 * at + 2])
            _, b, _, d = left.shape
            between = torch.einsum("nbd,bcd->ncd", grad.to(dtype).reshape(rows, b, d), left[0])
            planes.append(between.reshape(rows, -1))
            a, b, _, _ = right.shape
            to = torch.einsum("nab,abc->nac", planes[-1].view(rows, a, b), right[..., 0])
            sums.append(to.reshape(rows, -1))
        to, between = sum(sums[1:], sums[0]), torch.stack(planes).squeeze(0)
        if not self.behind:
            return to, between
        below, bias = (one.to(dtype) for one in self.behind)
        _, _, c, d = self.weights[2].shape
        h = torch.einsum("ncd,bcd->nbd", below.view(rows, c, d), self.weights[2][0].to(dtype))
        return activation_gradient(to, h.reshape(rows, -1) + bias, self.activation), between


def tiles_of(s: Shape, rows: int, spec: DeviceSpec, count: int) -> list[Config]:
    """The best predicted tile of each way to share the work, the best ways first."""
    of_way: dict[tuple[int, ...], Config] = {}
    ranked = tiles.best(s, rows, spec)
    for tile in ranked:
        of_way.setdefault((tile.groups, tile.blocks, tile.splits, tile.parts), tile)
    chosen = list(of_way.values())[:count]
    best = chosen[0]
    # The nearest variants of the best one: other slots, other chunks.
    near = [tile for tile in ranked if astuple(tile)[:4] == astuple(best)[:4]]
    return chosen + [tile for tile in near if (tile.kf == best.kf) != (tile.nc == best.nc)][:2]


def fault_of(kernel: kernels.InputGradient, o: Operands) -> str | None:
    """The fault of a kernel's results; None if they are correct."""
    packed = kernel.pack(o.weights)
    rows, s = len(o.grads[0]), kernel.shape
    apart = [
        o.grads[0].new_full((count + 2, features), float("nan"))
        for count, features in ((rows, s.right.in_features), (s.siblings * rows, s.middle))
    ]
    to, between = (one[1:-1] for one in apart)
    if s.siblings > 1:
        between = between.view(s.siblings, rows, -1)
    kernel.launch(o.grads, packed, between, to, *o.behind)
    if not all(one[end].isnan().all() for one in apart for end in (0, -1)):
        return "it writes beside its results"
    truths, theirs = o.by_einsum(torch.float64), o.by_einsum(o.grads[0].dtype)
    for name, result, truth, their in zip(
        ("x", "between"), (to, between), truths, theirs, strict=True
    ):
        fault = fault_against(result, their, truth, _BY_LUCK, _WORSE)
        if fault is not None:
            return f"{rows} rows, {name}: {fault}"
    first = to.clone(), between.clone()
    kernel.launch(o.grads, packed, between, to, *o.behind)
    is_same = torch.equal(to, first[0]) and torch.equal(between, first[1])
    return None if is_same else f"{rows} rows: it gives another result the second time"


def by_factors(o: Operands, grads: Sequence[Tensor]) -> Tensor:
    """The launches that the kernel replaces: two for each sibling, and the sums."""
    sums = []
    for at, grad in enumerate(grads):
        left, right = o.weights[2 * at : 2 * at + 2]
        between = implementation.repacked(grad, left.transpose(1, 2))
        sums.append(implementation.repacked(between, right.transpose(1, 2)))
    return sum(sums[1:], sums[0])


def by_kernel(kernel: kernels.InputGradient, o: Operands, rows: Tensor) -> tuple[Tensor, ...]:
    """One launch; the gradients of siblings are side by side in ``rows``."""
    return kernel(rows.chunk(kernel.shape.siblings, 1), o.weights, *o.behind)


def by_siblings(kernel: kernels.InputGradient, o: Operands, grads: Sequence[Tensor]) -> Tensor:
    """A launch for each sibling, and the sums."""
    sums = []
    for at, grad in enumerate(grads):
        sums.append(kernel([grad], o.weights[2 * at : 2 * at + 2])[0])
    return sum(sums[1:], sums[0])


def behind(to: Tensor, product: Tensor, bias: Tensor, activation: Activation) -> Tensor:
    """What a kernel of Inductor's computes."""
    return activation_gradient(to, product + bias, activation)


def compile_all(todo: Sequence[tuple[Shape, Config]], dtype: str) -> None:
    """Compile the kernels of all tiles concurrently."""
    sources = [kernels.source(s, tile, dtype) for s, tile in todo]
    sources += {kernels.pack_source(s, tile) for s, tile in todo}
    began = time.perf_counter()
    compile_ahead(sources)
    print(f"# compiled {len(sources)} kernels in {time.perf_counter() - began:.1f} s", flush=True)


def right_kernels(
    layer: Layer, chosen: Sequence[Config], dtype: torch.dtype
) -> Iterator[kernels.InputGradient]:
    """The kernels whose results are correct; prints the faults of the others."""
    name = str(dtype).removeprefix("torch.")
    for tile in chosen:
        kernel = kernels.InputGradient(layer.shape, tile, name, 0)
        faults = (fault_of(kernel, Operands.random(layer.shape, n, dtype)) for n in CHECKED_ROWS)
        fault = next((one for one in faults if one is not None), None)
        if fault is None:
            yield kernel
        else:
            print(f"WRONG {layer.name} {astuple(tile)}: {fault}", flush=True)


def time_layer(layer: Layer, ready: Sequence[kernels.InputGradient], dtype: torch.dtype) -> None:
    """Print the time of each way."""
    s, spec = layer.shape, DeviceSpec.of_device(0)
    name = str(dtype).removeprefix("torch.")
    o = Operands.random(s, layer.rows, dtype)
    count = s.siblings
    grad = torch.cat(o.grads, 1)
    dense = torch.randn(grad.shape[1], s.right.in_features, device="cuda").to(dtype)
    ways: dict[str, Callable[[Tensor], object]] = {
        "dense": lambda rows: rows @ dense,
        "two launches": lambda rows: by_factors(o, rows.chunk(count, 1)),
    }
    one_chain = Shape(s.left, s.right)
    plain = replace(s, activation="none", below=None)
    us = input_gradients.factors_us(one_chain, name, layer.rows, spec)
    predicted = {"two launches": count * us}
    if ready:
        ways["pack"] = lambda _: ready[0].pack(o.weights)
    if count > 1:
        best = tiles.best(one_chain, layer.rows, spec)[0]
        alone = kernels.InputGradient(one_chain, best, name, 0)
        ways["a launch each"] = lambda rows: by_siblings(alone, o, rows.chunk(count, 1))
        predicted["a launch each"] = count * tiles.predicted_us(one_chain, best, layer.rows, spec)
    if o.behind:
        (below, bias), best = o.behind, tiles.best(plain, layer.rows, spec)[0]
        before = kernels.InputGradient(plain, best, name, 0)
        compiled = torch.compile(partial(behind, activation=layer.activation))
        ways["three kernels"] = lambda rows: compiled(
            before([rows], o.weights[:2])[0], implementation.repacked(below, o.weights[2]), bias
        )
        predicted["three kernels"] = input_gradients.apart_us(s, name, layer.rows, spec)
    for kernel in ready:
        label = " ".join(map(str, astuple(kernel.tile)))
        ways[label] = partial(by_kernel, kernel, o)
        predicted[label] = tiles.predicted_us(s, kernel.tile, layer.rows, spec)
    graphs = {}
    for label, way in ways.items():
        for _ in range(2):
            way(grad)
        graphs[label] = cuda_graphs.Replay([way] * _CALLS, grad)
    results = timing.measure(graphs, "cuda", max_seconds=0.2 * len(graphs), precision=0.02)
    features = count * (s.left.out_features + s.middle) + s.right.in_features
    moved = 2 * layer.rows * features
    print(f"{layer.name}, {layer.rows} rows, {s}: floor {moved / 4.25e6:.1f} us", flush=True)
    dense_us = results["dense"].median_us
    for label, one in sorted(results.items(), key=lambda item: item[1].median_us):
        us = one.median_us / _CALLS
        guess = f", predicted {predicted[label]:.1f}" if label in predicted else ""
        print(f"    {us:7.1f} us  {us * _CALLS / dense_us:.2f} of dense  {label}{guess}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Check and time the layers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--tiles", type=int, default=4, help="ways to share the work, of each layer"
    )
    parser.add_argument("--dtype", default="bfloat16")
    names = [layer.name for layer in LAYERS]
    parser.add_argument("--layers", nargs="*", default=names, choices=names)
    parser.add_argument("--check", action="store_true", help="time nothing")
    args = parser.parse_args(arguments)
    os.environ.setdefault("KSOPT_TUNE", "model")
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    spec, dtype = DeviceSpec.of_device(0), getattr(torch, args.dtype)
    layers = [layer for layer in LAYERS if layer.name in args.layers]
    chosen = {one: tiles_of(one.shape, one.rows, spec, args.tiles) for one in layers}
    todo = [(layer.shape, tile) for layer, mine in chosen.items() for tile in mine]
    compile_all(todo, args.dtype)
    for layer, mine in chosen.items():
        ready = list(right_kernels(layer, mine, dtype))
        print(f"# {layer.name}: {len(ready)} of {len(mine)} tiles are right", flush=True)
        if not args.check:
            time_layer(layer, ready, dtype)


if __name__ == "__main__":
    main()
