"""The tensors that a compiled training step saves for its backward pass, by operator.

    python docs/experiments/saved_tensors.py vit --chain "(1,out/2,mid/6,2)*(2,mid/6,in/2,1)"

Prints it for the dense model under Inductor and for that of `KSLinear` under ksopt, without the
parameters, as AOTAutograd divides the step into two passes. Nothing is run: it needs no GPU, but
where there is none, chains are computed by PyTorch.
"""

from __future__ import annotations

import argparse
import operator
import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from ksopt.bench.models.build import build, size_of

_WAYS = {"dense": "inductor", "linear": "ksopt"}


class Divided(Exception):
    """The step is divided: it need not be compiled."""


class Partitioner(CustomPartitionerFn):
    """Inductor's own, which keeps the two passes and ends there."""

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
        self.passes = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        raise Divided

    def uuid(self) -> None:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--chain", default="half")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--ways", nargs="+", default=list(_WAYS), choices=_WAYS)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = size_of(options.model, layers=options.layers, batch=options.batch)
    built = build(size, getattr(torch, options.dtype), device, rule=options.chain)
    for way in options.ways:
        torch._dynamo.reset()
        partitioner = Partitioner()
        run = torch.compile(
            built.twin(way).train(),
            backend=_WAYS[way],
            options={"custom_partitioner_fn": partitioner},
        )
        try:
            run(built.inputs)
        except Exception as error:  # what is saved is known once the graph is divided
            if not hasattr(partitioner, "passes"):
                raise
            print(f"{way}: the step did not run: {type(error).__name__}: {error}", file=sys.stderr)
        report(way, *partitioner.passes)


def report(way: str, forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """Print the largest of what the backward pass reads of the forward pass, and the sum."""
    producers = {node.name: node for node in forward.graph.nodes}
    saved: Counter[tuple[str, tuple[int, ...]]] = Counter()
    count: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for node in backward.graph.nodes:
        producer = producers.get(node.name)
        value = node.meta.get("val")
        if node.op != "placeholder" or producer is None or producer.op == "placeholder":
            continue
        if isinstance(value, Tensor):
            row = (name_of(producer), tuple(map(int, value.shape)))
            saved[row] += value.numel() * value.element_size()
            count[row] += 1
    print(f"\n{way}: {sum(saved.values()) / 1e6:.1f} MB")
    for row, size in saved.most_common(12):
        print(f"{size / 1e6:9.1f} MB  {count[row]:3d} x {row[1]} of {row[0]}")


def name_of(node: fx.Node) -> str:
    """The operator that computes a node, and which of its results the node is."""
    if node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, fx.Node)
        return f"{source.target}[{index}]"
    return str(node.target)


if __name__ == "__main__":
    main()
