"""Trains small networks from scratch: dense, Kronecker-sparse, and Kronecker-sparse with recipes.

An MLP-Mixer learns scikit-learn's digits, a GPT the bytes of Python's standard library. The dense
network is narrower, so that both have equally many parameters. Each way to train uses its best
learning rate of a sweep of half as long trainings. Each is then trained with each seed for an equal
number of steps, and the dense network once more for the steps that fit into the chains' time.
Kernels are chosen before timing.

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


def _learn(name: str, args: argparse.Namespace, device: torch.device) -> Learned:
    task = TASKS[name](device, args.small)
    if args.steps is not None:
        task = replace(task, steps=args.steps)
    rates = args.rates or (SMALL_RATES if args.small else RATES)
    seeds = args.seeds if args.seeds is not None else 2 if args.small else 3

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    trials = sweep(task, rates, device, report)
    done = compare(task, trials, seeds, device, report)
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
    """Train, store and show the results."""
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
    args = parser.parse_args(arguments)

    args.out.mkdir(parents=True, exist_ok=True)
    if args.show is not None:
        machine, learned = results.read(args.show)
        _show(machine, learned, args.out)
        return 0
    device = torch.device(args.device)
    machine, learned = asdict(record(device)), []
    for name in args.tasks:  # stored after each task, in case the next is interrupted
        learned.append(_learn(name, args, device))
        results.write(args.out / FILE, machine, learned)
    _show(machine, learned, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
