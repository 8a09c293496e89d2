"""Trainings and their results."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import ParamsT

import ksopt
from ksopt.nn import SelfGuided
from recipes.models import parameters
from recipes.tasks import Task


@dataclass(frozen=True)
class Way:
    """A network and its training method.

    Args:
        name: In tables.
        is_dense: Whether its layers are dense.
        has_groups: Whether its factors have separate learning rates (`ksopt.param_groups`).
        is_guided: Whether a dense matrix beside each chain fades out in the first half.
    """

    name: str
    is_dense: bool = False
    has_groups: bool = False
    is_guided: bool = False


DENSE, PLAIN, GROUPS = Way("dense", is_dense=True), Way("KS"), Way("KS, groups", has_groups=True)
WAYS = (
    DENSE,
    PLAIN,
    GROUPS,
    Way("KS, guided", is_guided=True),
    Way("KS, groups, guided", has_groups=True, is_guided=True),
)
DENSE_LONGER = Way("dense, KS's time", is_dense=True)


@dataclass(frozen=True)
class Point:
    """An evaluation of a network during its training, on held-out data.

    Args:
        step: Steps so far.
        seconds: Time of the steps, without evaluations.
        loss: Cross-entropy, in nats.
        accuracy: Share of labels that have the largest logit.
    """

    step: int
    seconds: float
    loss: float
    accuracy: float


@dataclass(frozen=True)
class Run:
    """The evaluations of a training.

    Args:
        seed: Of the parameters and the batches.
        points: From step 0 to the last.
    """

    seed: int
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Result:
    """The trainings of a network.

    Args:
        way: Name of the way.
        parameters: Of the trained network.
        lr: The best learning rate in the sweep.
        runs: One for each seed.
    """

    way: str
    parameters: int
    lr: float
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Trial:
    """A short training of the sweep of learning rates."""

    way: str
    lr: float
    loss: float


def train(task: Task, way: Way, seed: int, steps: int, lr: float, device: torch.device) -> Run:
    """Train a new network by a way."""
    torch.manual_seed(seed)
    model = task.network(way.is_dense).to(device)
    guide = SelfGuided(model, max(1, steps // 2)) if way.is_guided else None
    groups = ksopt.param_groups(model, lr) if way.has_groups else model.parameters()
    return learn(task, model, groups, seed, steps, lr, device, guide)


def learn(
    task: Task,
    model: nn.Module,
    groups: ParamsT,
    seed: int,
    steps: int,
    lr: float,
    device: torch.device,
    guide: SelfGuided | None = None,
) -> Run:
    """Train a network with AdamW, a warm-up of a tenth of the steps, and a cosine to 0.

    Args:
        task: The task.
        model: The network, on the device; its parameters change.
        groups: The parameters to train, or groups with separate rates.
        seed: Of the batches.
        steps: Number of steps.
        lr: The peak rate.
        device: Of the model.
        guide: The dense matrices that fade out beside its chains.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(
        groups, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=device.type == "cuda"
    )
    warm = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * step / steps))),
    )
    seconds, points = 0.0, [_point(task, model, 0, 0.0, device)]
    for step, first in _stretches(steps, task.points):
        began = _now(device)
        for _ in range(first, step):
            x, y = task.draw(generator)
            loss = _loss(model, x, y, device)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if guide is not None:
                guide.step(optimizer)
        seconds += _now(device) - began
        points.append(_point(task, model, step, seconds, device))
    return Run(seed, tuple(points))


def _stretches(steps: int, points: int) -> Iterator[tuple[int, int]]:
    """The steps after which a network is evaluated, each with the previous one."""
    marks = sorted({max(1, round(steps * part / points)) for part in range(1, points + 1)})
    yield from zip(marks, [0, *marks], strict=False)


def _loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor, device: torch.device) -> torch.Tensor:
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        logits = model(x)
    return F.cross_entropy(logits.float().flatten(0, -2), y.flatten())


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.no_grad()
def _point(task: Task, model: nn.Module, step: int, seconds: float, device: torch.device) -> Point:
    loss = hits = count = 0.0
    for x, y in task.held_out:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(x)
        logits = logits.float().flatten(0, -2)
        loss += F.cross_entropy(logits, y.flatten(), reduction="sum").item()
        hits += (logits.argmax(-1) == y.flatten()).sum().item()
        count += y.numel()
    return Point(step, seconds, loss / count, hits / count)


def sweep(
    task: Task, rates: Sequence[float], device: torch.device, report: Callable[[str], None]
) -> tuple[Trial, ...]:
    """Half as long trainings, of another seed, that select a learning rate for each of three ways.

    Each way runs a few steps beforehand, so that no time includes the choice of kernels.
    """
    trials = []
    for way in WAYS:
        train(task, way, seed=0, steps=3, lr=rates[0], device=device)
    for way in (DENSE, PLAIN, GROUPS):
        for lr in rates:
            run = train(task, way, 1000, max(3, task.steps // 2), lr, device)
            trials.append(Trial(way.name, lr, run.points[-1].loss))
            report(f"{task.name}: {way.name}, lr {lr:g}: {run.points[-1].loss:.4f}")
    return tuple(trials)


def best_rate(trials: Sequence[Trial], way: Way) -> float:
    """The rate whose short training has the least final loss; guided ways use the unguided's."""
    name = (DENSE if way.is_dense else GROUPS if way.has_groups else PLAIN).name
    return min((one for one in trials if one.way == name), key=lambda one: one.loss).lr


def compare(
    task: Task,
    trials: Sequence[Trial],
    seeds: int,
    device: torch.device,
    report: Callable[[str], None],
) -> tuple[Result, ...]:
    """Train each way with each seed for equal steps, and the dense one for the time of KS, too."""
    runs: dict[Way, list[Run]] = {way: [] for way in (*WAYS, DENSE_LONGER)}

    def run(way: Way, seed: int, steps: int) -> None:
        done = train(task, way, seed, steps, best_rate(trials, way), device)
        runs[way].append(done)
        last = done.points[-1]
        report(f"{task.name}: {way.name}, seed {seed}: {last.loss:.4f} in {last.seconds:.1f} s")

    for seed in range(seeds):  # in turns, so that a busy machine slows all of them
        for way in WAYS:
            run(way, seed, task.steps)
    took = {
        way: statistics.median(one.points[-1].seconds for one in runs[way])
        for way in (DENSE, PLAIN)
    }
    steps = max(3, round(task.steps * took[PLAIN] / took[DENSE]))
    for seed in range(seeds):
        run(DENSE_LONGER, seed, steps)
    return tuple(
        Result(
            way.name,
            parameters(task.network(way.is_dense)),
            best_rate(trials, way),
            tuple(done),
        )
        for way, done in runs.items()
    )
