"""Trainings, and what is kept of them."""

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
    """A network and how it is trained.

    Args:
        name: In tables.
        is_dense: Whether its layers are dense.
        has_groups: Whether its factors have learning rates of their own (`ksopt.param_groups`).
        is_guided: Whether a dense matrix fades beside each chain in the first half.
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
    """A network in the middle of its training, judged by what is held out.

    Args:
        step: Steps so far.
        seconds: That they took; to judge is not counted.
        loss: Cross-entropy, in nats.
        accuracy: Share of the labels that are the likeliest.
    """

    step: int
    seconds: float
    loss: float
    accuracy: float


@dataclass(frozen=True)
class Run:
    """A training.

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
        way: Its name.
        parameters: Of the network when it is trained.
        lr: The learning rate that was the best for it in the sweep.
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
    """Train a new network in a way."""
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
        task: What it learns.
        model: The network, on the device; its parameters change.
        groups: Those of them that learn, or groups with rates of their own.
        seed: Of the batches.
        steps: How many.
        lr: The highest rate.
        device: Where.
        guide: What fades beside its chains.
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
    """The steps after which a network is judged, each with the one before."""
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
    task: Task, rates: Sequence[float], device: torch.device, told: Callable[[str], None]
) -> tuple[Trial, ...]:
    """Half as long trainings, of another seed, that choose a learning rate for each of three ways.

    The first steps of each are done before, so that the choice of kernels is in nobody's time.
    """
    trials = []
    for way in WAYS:
        train(task, way, seed=0, steps=3, lr=rates[0], device=device)
    for way in (DENSE, PLAIN, GROUPS):
        for lr in rates:
            run = train(task, way, 1000, max(3, task.steps // 2), lr, device)
            trials.append(Trial(way.name, lr, run.points[-1].loss))
            told(f"{task.name}: {way.name}, lr {lr:g}: {run.points[-1].loss:.4f}")
    return tuple(trials)


def best_rate(trials: Sequence[Trial], way: Way) -> float:
    """The rate whose short training ended with the least loss; guided ways take the unguided's."""
    name = (DENSE if way.is_dense else GROUPS if way.has_groups else PLAIN).name
    return min((one for one in trials if one.way == name), key=lambda one: one.loss).lr


def compare(
    task: Task,
    trials: Sequence[Trial],
    seeds: int,
    device: torch.device,
    told: Callable[[str], None],
) -> tuple[Result, ...]:
    """Each way with each seed for as many steps, and the dense one for as long as KS took."""
    runs: dict[Way, list[Run]] = {way: [] for way in (*WAYS, DENSE_LONGER)}

    def run(way: Way, seed: int, steps: int) -> None:
        done = train(task, way, seed, steps, best_rate(trials, way), device)
        runs[way].append(done)
        last = done.points[-1]
        told(f"{task.name}: {way.name}, seed {seed}: {last.loss:.4f} in {last.seconds:.1f} s")

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
