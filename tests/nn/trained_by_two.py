"""A process of two that train models together: ``python trained_by_two.py '{"rank": 0, ...}'``.

It trains a model of chains for three steps, on its half of the rows, again for each case of the
task, and the first process writes the trained weights of all to a file. Compiled graphs are
rewritten by ksopt and then run by AOTAutograd, without Inductor, which is none of ksopt's and slow.

The task: ``rank``, ``store`` (a file by which the two meet), ``out`` (the file that is written),
``seconds`` (at most), ``device`` ("cpu", or "cuda": a GPU each), and ``cases`` by name. A case:
``by`` ("ddp" or "fsdp"), and what may be added: ``compiled``, ``accumulated`` (each step is two
halves of the rows), ``checkpointed``, ``bfloat16`` (FSDP2's policy for what is computed).
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ksopt import KSLinear
from ksopt.compile import backend

STEPS, ROWS, RATE = 3, 16, 1e-2


class Blocks(nn.Module):
    """A block-diagonal layer in plain PyTorch, which the backend recognises."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 8) / 8**0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("ngi,goi->ngo", x.unflatten(-1, (4, 8)), self.weight)
        return y.flatten(-2)


class Model(nn.Module):
    """A chain, a block-diagonal layer of an author's own, and a head."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.chain = KSLinear(32, 32, "(1,16,8,2)*(2,8,16,1)")
        self.blocks = Blocks()
        self.head = nn.Linear(32, 8)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.chain(x))
        x = checkpoint(self.blocks, x, use_reentrant=False) if self.checkpointed else self.blocks(x)
        return self.head(torch.relu(x))


def rows() -> tuple[Tensor, Tensor]:
    """All rows, and what they should become."""
    generator = torch.Generator().manual_seed(1)
    draw = [torch.randn(ROWS, size, generator=generator) for size in (32, 8)]
    return draw[0], draw[1]


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """SGD: of a gradient that is off in any factor, the step is off too."""
    return torch.optim.SGD(parameters, RATE, momentum=0.9)


def train(
    model: Callable[[Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    parts: Sequence[tuple[Tensor, Tensor]],
    waiting: Callable[[bool], contextlib.AbstractContextManager[object]],
) -> None:
    """Three steps; each sums the gradients of all parts.

    Args:
        model, optimizer: of this process.
        parts: rows and what they should become.
        waiting: of a part that is not a step's last, where gradients are not exchanged yet.
    """
    for _ in range(STEPS):
        for place, (x, expected) in enumerate(parts):
            with waiting(place + 1 < len(parts)):
                loss = (model(x) - expected).square().mean() / len(parts)
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def train_case(case: dict[str, Any], rank: int, device: str) -> dict[str, Any]:
    """The weights of a model that is trained as a case says, and the sites of its graphs."""
    torch._dynamo.reset()
    sites = []
    rewrite = backend.rewrite_graph
    plain = Model(case.get("checkpointed", False)).to(device)
    x, expected = (part.chunk(2)[rank].to(device) for part in rows())
    count = 2 if case.get("accumulated") else 1
    parts = list(zip(x.chunk(count), expected.chunk(count), strict=True))
    if case["by"] == "ddp":
        model: Any = DistributedDataParallel(plain)

        def waits(wait: bool) -> Any:
            return model.no_sync() if wait else contextlib.nullcontext()

    else:
        policy = MixedPrecisionPolicy(torch.bfloat16) if case.get("bfloat16") else None
        options = {} if policy is None else {"mp_policy": policy}
        mesh = dist.device_mesh.init_device_mesh(device, (2,))
        for layer in (plain.chain, plain.blocks, plain):
            fully_shard(layer, mesh=mesh, **options)
        model = plain

        @contextlib.contextmanager
        def waits(wait: bool) -> Any:
            assert isinstance(plain, FSDPModule)
            plain.set_requires_gradient_sync(not wait)
            yield

    run = torch.compile(model, backend="ksopt") if case.get("compiled") else model
    backend.rewrite_graph = lambda *a, **k: sites.append(rewrite(*a, **k)) or sites[-1]
    try:
        train(run, optimizer_of(plain.parameters()), parts, waits)
    finally:
        backend.rewrite_graph = rewrite
    weights = {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).cpu()
        for name, value in plain.state_dict().items()
    }
    return {"weights": weights, "sites": sum(len(one.sites) for one in sites)}


def main(task: dict[str, Any]) -> None:
    """Train, and write the weights; where it hangs it says where, and ends."""
    faulthandler.dump_traceback_later(task["seconds"], exit=True)
    device, rank = task["device"], task["rank"]
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend.compile_by_inductor = lambda gm, inputs, config: aot_eager(gm, inputs)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{task['store']}",
        rank=rank,
        world_size=2,
    )
    trained = {}
    for name, case in task["cases"].items():
        print(name, flush=True)
        trained[name] = train_case(case, rank, device)
    if rank == 0:
        torch.save(trained, task["out"])
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads end with the process: waiting for them failed once in 100 runs


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
