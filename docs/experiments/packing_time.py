"""Times the launches that pack the weights of trained chains: apart, in the product's, and none.

    python docs/experiments/packing_time.py [CHAIN@ROWS...] [--siblings N]

In a CUDA graph of 20 layers, each with its own weights and behind a norm, as in a model.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace

import torch
from torch import Tensor

from ksopt.kernels import input_gradients, trained_chain
from ksopt.kernels.families.common.chain_tile import Epilogue, Shape
from ksopt.kernels.families.common.fused_chain_launcher import FusedChain
from ksopt.kernels.problem import Epilogue as After
from ksopt.kernels.problem import Problem
from ksopt.patterns.chain import Chain

LAYERS = 20
CASES = [
    ("(1,192,64,2)*(2,64,192,1)", 25_216, 3, "none"),
    ("(1,192,64,2)*(2,64,192,1)", 25_216, 1, "none"),
    ("(1,768,64,2)*(2,64,192,1)", 25_216, 1, "gelu"),
    ("(1,192,64,2)*(2,64,768,1)", 25_216, 1, "none"),
    ("(1,512,128,2)*(2,128,512,1)", 4_096, 3, "none"),
    ("(1,512,128,2)*(2,128,512,1)", 4_096, 1, "none"),
    ("(1,2048,128,2)*(2,128,512,1)", 4_096, 1, "none"),
    ("(1,192,64,2)*(2,64,192,1)", 1_024, 1, "none"),
]


def main() -> None:
    for text, rows, siblings, activation in CASES:
        try:
            one(Chain.parse(text), rows, siblings, activation)
        except Exception as error:
            print(text, rows, siblings, "failed:", repr(error), flush=True)


def one(chain: Chain, rows: int, siblings: int, activation: str) -> None:
    device = torch.device("cuda", 0)
    problem = Problem(chain, "bfloat16", False, True, After(True, activation), siblings)
    candidate = trained_chain.fastest_keeper(problem, rows, device)
    if candidate is None:
        print(chain, rows, siblings, "no kernel is predicted to be the fastest", flush=True)
        return
    family, tile = candidate.family, candidate.tile
    make = lambda *s: torch.randn(*s, device=device, dtype=torch.bfloat16) * 0.1
    sets = [
        [make(*one.weight_shape) for _ in range(siblings) for one in chain] for _ in range(LAYERS)
    ]
    xs = [make(rows, chain.in_features) for _ in range(4)]
    bias = make(siblings * chain.out_features)
    shape = input_gradients.shape_of(sets[0])
    of_grad = input_gradients.tile_of(shape, torch.bfloat16, rows, device)
    if of_grad is None:
        print(chain, rows, siblings, "no tile of the gradient", flush=True)
        return
    apart = family.storing_launcher(problem, tile, 0, of_grad)
    epilogue = replace(Epilogue.of(problem), keeps_z=True)
    fused = FusedChain(Shape.of(chain, siblings), tile, of_grad, epilogue, "bfloat16", 0)
    packed = [apart._pack(weights)[0] for weights in sets]
    z = torch.empty((siblings, rows, apart._between), device=device, dtype=torch.bfloat16)
    z = z if siblings > 1 else z[0]
    norm = torch.nn.LayerNorm(chain.in_features, device=device, dtype=torch.bfloat16)

    def by_apart(x: Tensor, at: int) -> object:
        return apart(x, sets[at], bias)

    def by_fused(x: Tensor, at: int) -> object:
        return fused(x, sets[at], bias)

    def without(x: Tensor, at: int) -> object:
        return apart._launch(x, packed[at], bias, z=z.view(-1, apart._between))

    def nothing(x: Tensor, at: int) -> object:
        return None

    for at in range(2):
        for a, b in zip(by_apart(xs[at], at), by_fused(xs[at], at), strict=True):
            assert torch.equal(a, b), "differs"
    ways = {"apart": by_apart, "fused": by_fused, "packed before": without, "norm alone": nothing}
    graphs = {}
    for name, way in ways.items():
        with torch.no_grad():
            way(xs[0], 0)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for at in range(LAYERS):
                    way(norm(xs[at % 4]), at)
            graphs[name] = graph
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(60):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3 / LAYERS)
    words = ", ".join(
        f"{name} {statistics.median(of):.2f} ({min(of):.2f})" for name, of in times.items()
    )
    print(
        f"{siblings} x {chain}, {rows} rows, {activation}, tile {tile}: us a layer: {words}",
        flush=True,
    )


if __name__ == "__main__":
    argparse.ArgumentParser().parse_args()
    main()
