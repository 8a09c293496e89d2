"""Train small networks from scratch: dense, Kronecker-sparse, and the latter with recipes.

An MLP-Mixer learns scikit-learn's digits, a GPT the bytes of Python's standard library. The dense
network is narrower, so that both have as many parameters. Each way to train takes the learning rate
that was the best for it in a sweep of half as long trainings; then each is trained with each seed
for as many steps, and the dense network once more for as many steps as fit into the time that the
chains took. Kernels are chosen before the clock runs.

It writes training-recipes.json and a picture for each task, and prints tables. On a GPU it computes
under autocast in bfloat16.

    python docs/experiments/training_recipes.py --out docs/data
    python docs/experiments/training_recipes.py --small --out recipes    # a minute on a CPU
    python docs/experiments/training_recipes.py --show docs/data/training-recipes.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ksopt.measure.device import record
from recipes import results, tasks
from recipes.results import Learned
from recipes.training import compare, sweep

TASKS = {"digits": tasks.digits, "text": tasks.text}
FILE = "training-recipes.json"
RATES, SMALL_RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2), (4e-3, 8e-3)


def _learn(name: str, given: argparse.Namespace, device: torch.device) -> Learned:
    task = TASKS[name](device, given.small)
    if given.steps is not None:
        task = replace(task, steps=given.steps)
    rates = given.rates or (SMALL_RATES if given.small else RATES)
    seeds = given.seeds if given.seeds is not None else 2 if given.small else 3

    def told(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    trials = sweep(task, rates, device, told)
    done = compare(task, trials, seeds, device, told)
    sizes = {kind: asdict(size) for kind, size in task.sizes.items()}
    settings = {**task.settings, "sizes": sizes}
    return Learned(task.name, task.data, task.steps, settings, trials, done)


def _show(machine: dict[str, Any], learned: Sequence[Learned], out: Path) -> None:
    print(", ".join(f"{key} {machine[key]}" for key in ("name", "threads", "torch", "commit")))
    for task in learned:
        print(f"\n{task.name}: {task.data}\n\n{results.table(task)}\n\n{results.sweep_table(task)}")
        file = out / f"training-{task.name}.svg"
        file.write_text(results.picture(task), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, keep and show."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seeds", type=int, help="trainings of each way (3; small: 2)")
    parser.add_argument("--steps", type=int, help="of a training (the task's own number)")
    parser.add_argument("--rates", type=float, nargs="+", help="learning rates to choose from")
    parser.add_argument("--small", action="store_true", help="small networks, two rates, few steps")
    parser.add_argument(
        "--out", type=Path, default=Path(), help="a folder for the files (this one)"
    )
    parser.add_argument("--show", type=Path, help="draw and print an earlier run, without training")
    given = parser.parse_args(arguments)

    given.out.mkdir(parents=True, exist_ok=True)
    if given.show is not None:
        machine, learned = results.read(given.show)
        _show(machine, learned, given.out)
        return 0
    device = torch.device(given.device)
    machine, learned = asdict(record(device)), []
    for name in given.tasks:  # what is done is kept, should the next be interrupted
        learned.append(_learn(name, given, device))
        results.write(given.out / FILE, machine, learned)
    _show(machine, learned, given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
