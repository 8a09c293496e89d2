"""One table of chains and their rivals: speed, operations, weights, error of fitting, accuracy.

A dense network learns one of the tasks of training_recipes.py. Then its large layers are replaced
by each structure at each budget: the structure's operator with the most weights is fitted to the
trained matrices, timed beside the dense layer as in a search, and the network is fine-tuned for an
equal number of steps. Each row uses its best learning rate of a sweep of half as long trainings.
The dense network is trained further, too. Strassen-Tile with all of Strassen's products, which is
exact and has more weights than the dense layer, is a row without a budget.

All products are timed first, and need the device for themselves; then all networks are trained.
What is done is stored at once: the same command continues where it stopped, on the same machine.
Operators that a device does not run are not timed, but trained by their reference.

    python docs/experiments/rival_table.py --task text --out docs/data/rivals-text-gpu.json
    python docs/experiments/rival_table.py --small --out docs/data/rivals-digits-cpu.json
    python docs/experiments/rival_table.py --show docs/data/rivals-digits-cpu.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ksopt.errors import InvalidInputError
from ksopt.measure import device as devices
from ksopt.operators import registry
from ksopt.operators.base import StructuredOperator
from ksopt.operators.structures.strassen_tile import StrassenTile
from ksopt.patterns.size import Dims
from recipes import tasks
from recipes.tasks import Task
from recipes.training import learn
from rivals.choosing import chosen
from rivals.measuring import Bench
from rivals.network import matrix_of, new_network, sizes_of
from rivals.rows import DENSE, Table, Timed, markdown

TASKS = {"digits": tasks.digits, "text": tasks.text}
BUDGETS = ("25%", "57%")  # 2:4 has 56.25 % in 16 bit
RATES = (1e-3, 4e-3, 1.6e-2)
_DENSE_RATE, _DENSE_SEED = 4e-3, 0
# The fields of the device's record that a speed depends on.
_MACHINE = ("name", "type", "capability", "driver", "cuda", "threads", "torch", "ksopt", "commit")
Operators = Mapping[Dims, StructuredOperator]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    args = _parser().parse_args(arguments)
    try:
        if args.show is not None:
            print(markdown(Table.read(args.show)), end="")
        else:
            print(markdown(_run(args)), end="")
    except InvalidInputError as error:
        print(f"rival_table.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--task", default="digits", choices=list(TASKS), help="what is learnt (%(default)s)")
    add("--structures", default=",".join(registry.names()), help="joined by commas (all)")
    add("--budgets", nargs="+", default=list(BUDGETS), help="as for ksopt search (25%% 57%%)")
    add("--device", default="auto", help="as for ksopt search")
    add("--small", action="store_true", help="small networks, few steps: minutes on a CPU")
    add("--steps", type=int, help="of a fine-tuning (half of the task's own number)")
    add("--rates", type=float, nargs="+", default=list(RATES), help="learning rates to choose from")
    add("--seeds", type=int, default=3, help="fine-tunings of each row (%(default)s)")
    where = parser.add_mutually_exclusive_group(required=True).add_argument
    where("--out", type=Path, metavar="FILE", help="rows as JSON; the trained network lies beside")
    where("--show", type=Path, metavar="FILE", help="print the table of such a file, measure none")
    return parser


def _run(args: argparse.Namespace) -> Table:
    device = devices.resolve(args.device)
    task = TASKS[args.task](device, args.small)
    names = args.structures.split(",")
    for name in names:
        if name != registry.KRONECKER:
            registry.structure_of(name)
    settings: dict[str, Any] = {
        "task": args.task,
        "small": args.small,
        "structures": names,
        "budgets": args.budgets,
        "steps": args.steps or max(3, task.steps // 2),
        "dense_steps": task.steps,
        "rates": args.rates,
        "seeds": args.seeds,
        "dtype": "bfloat16" if device.type == "cuda" else "float32",
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    record = devices.record(device)
    weights = args.out.with_suffix(".pt")
    dense = _trained(task, weights, device)
    sizes = sizes_of(task, dense)
    about = {"name": task.name, "data": task.data, "rows": sizes.rows}
    machine = {name: value for name, value in asdict(record).items() if name in _MACHINE}
    table = _begun(args.out, Table(machine, settings, about))
    bench = Bench(
        task,
        dense,
        sizes,
        device,
        settings["dtype"],
        settings["steps"],
        args.rates,
        args.seeds,
        record.commit,
        _report,
    )
    known = {(row.structure, row.budget) for row in table.rows}
    known |= {(row.structure, row.budget) for row in table.timed}
    for structure, budget, operators in _missing_rows(names, args.budgets, bench, known):
        timed: Timed = bench.timed(structure, budget, operators)
        table = replace(table, timed=(*table.timed, timed))
        table.write(args.out)
    _report("all products are timed")
    while table.timed:
        first, *others = table.timed
        table = replace(table, rows=(*table.rows, bench.row(first)), timed=tuple(others))
        table.write(args.out)
    weights.unlink(missing_ok=True)  # only an unfinished run needs it
    return table


def _begun(file: Path, new: Table) -> Table:
    """The table of a file, if its settings are equal; a new one if there is no file."""
    if not file.exists():
        return new
    old = Table.read(file)
    for what in ("settings", "task"):
        if getattr(old, what) != getattr(new, what):
            raise InvalidInputError(f"{file} is of other {what}: give another file")
    if old.machine["name"] != new.machine["name"]:
        raise InvalidInputError(
            f"{file} was measured on {old.machine['name']}, this is {new.machine['name']}: give "
            "another file"
        )
    return old


def _trained(task: Task, file: Path, device: torch.device) -> nn.Module:
    """The trained dense network, from the file of an earlier run if there is one."""
    torch.manual_seed(_DENSE_SEED)
    model = new_network(task).to(device)
    if file.exists():
        model.load_state_dict(torch.load(file, map_location=device, weights_only=True))
        return model
    run = learn(task, model, model.parameters(), _DENSE_SEED, task.steps, _DENSE_RATE, device)
    _report(f"dense network: accuracy {run.points[-1].accuracy:.3f}")
    torch.save(model.state_dict(), file)
    return model


def _missing_rows(
    names: Sequence[str], budgets: Sequence[str], bench: Bench, known: Collection[tuple[str, str]]
) -> Iterator[tuple[str, str, Operators | None]]:
    """The rows that are not known: structure, budget, operators by size; the dense network first.

    To choose an operator many are fitted, so that none is chosen for known rows.
    """
    if (DENSE, "") not in known:
        yield DENSE, "", None
    sizes = bench.sizes.names
    for budget, name in product(budgets, names):
        if (name, budget) in known:
            continue
        operators = {
            dims: chosen(name, budget, dims, matrix_of(bench.dense, layers[0]))
            for dims, layers in sizes.items()
        }
        whole = {dims: one for dims, one in operators.items() if one is not None}
        if len(whole) < len(sizes):
            _report(f"{name} {budget}: it has no operator of so few weights")
        else:
            yield name, budget, whole
    if "strassen-tile" in names and ("strassen-tile", "") not in known:
        exact = {dims: StrassenTile(dims.in_features, dims.out_features, 2, 7) for dims in sizes}
        yield "strassen-tile", "", exact


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
