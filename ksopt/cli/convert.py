"""The command ``ksopt convert``: its arguments and its output."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ksopt.conversion.plan import Plan
from ksopt.errors import InvalidInputError
from ksopt.report import tables
from ksopt.system.atomic_files import check_new_folder
from ksopt.system.plurals import counted
from ksopt.system.user_code import build_model, call_factory, import_plugins

if TYPE_CHECKING:  # the parser is built for every command: it must not load torch
    from torch import nn

    from ksopt.conversion.apply import Conversion

SUMMARY = "Replace the linear layers of a trained model by chains, and report their errors."
EPILOG = """\
the plan:
  written by `ksopt search`, or by hand: {"schema": "ksopt.plan/1", "layers": [
    {"match": "head", "chain": null},                                   stays dense
    {"match": "*", "in_features": 768, "out_features": 3072, "chain": "(1,1536,384,2)*(..)"}]}
  the first entry that matches a layer's name (* stands for any text) and size decides. An entry
  with "where": {"siblings": 3, "epilogue": ["bias"]} counts only for layers with these
  surroundings in the model: with --inputs the model runs once, which shows them.

--model and --inputs run code: MODULE is imported, from the current folder too, and FACTORY is
called without arguments; it returns the model, or its inputs. Files of weights are read as
tensors, never as code.

examples:
  ksopt convert --model mymodel:build --plan ksopt-report-.../plan.json --out converted
  ksopt convert --model mymodel:build --weights model.safetensors --plan plan.json --out converted
  ksopt convert --model mymodel:build --plan up/plan.json down/plan.json --out converted
  ksopt convert --model mymodel:build --inputs mymodel:inputs --plan plan.json --out converted
  ksopt convert --model mymodel:build --plan plan.json --dry-run      # what would be converted

then, in Python:
  model = ksopt.load_converted("converted", mymodel.build())

exit codes: 0 done, 1 failed, 2 an argument is not allowed, 130 stopped with Ctrl-C
"""

_COLUMNS = (
    "error: ||W - W'|| / ||W||, where W' is the chain's product. No weights of this chain have an "
    "error below the last column."
)
# Layers that stay dense for one reason, by name.
_SHOWN = 8


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments; the caller adds --json and --traceback."""
    what = command.add_argument_group("what is converted").add_argument
    what("--model", required=True, metavar="MODULE:FACTORY", help="what builds the model")
    what(
        "--plan",
        required=True,
        nargs="+",
        metavar="FILE",
        help="which layers become which chains (JSON); several files are read as one",
    )
    what(
        "--weights",
        metavar="FILE",
        help="load these into the model first (.safetensors or its index, or of torch.save); by "
        "default the factory's own",
    )
    what(
        "--inputs",
        metavar="MODULE:FACTORY",
        help="what returns inputs of the model (a tensor, a tuple or a mapping); needed for "
        "entries of a plan that count only where layers share an input, or something follows them",
    )
    what("--include", nargs="+", default=[], metavar="NAME", help="only these layers; * allowed")
    what("--exclude", nargs="+", default=[], metavar="NAME", help="not these layers; * allowed")

    what(
        "--plugins",
        nargs="+",
        default=[],
        metavar="MODULE",
        help="modules to import first, which register structures that the plan names; this runs "
        "their code",
    )

    how = command.add_argument_group("how").add_argument
    how(
        "--max-error",
        type=float,
        metavar="SHARE",
        help="layers whose relative error would be larger stay dense (no limit)",
    )
    how(
        "--refine",
        type=int,
        default=0,
        metavar="STEPS",
        help="steps of gradient refinement of chains of three factors or more (%(default)s)",
    )
    how(
        "--device", default="cpu", help="where to compute: cpu (default), cuda, cuda:1, ... or auto"
    )
    how("--out", metavar="FOLDER", help="a new folder for the result")
    how("--dry-run", action="store_true", help="list what would be converted, and stop")


def run(args: argparse.Namespace) -> int:
    """Convert a model as the arguments specify; return the exit code."""
    if args.refine < 0:
        raise InvalidInputError(f"--refine {args.refine}: give the steps, 0 or more")
    if args.max_error is not None and not args.max_error >= 0:
        raise InvalidInputError(f"--max-error {args.max_error:g}: give a relative error, 0 or more")
    if args.out is None and not args.dry_run:
        raise InvalidInputError("--out: name a new folder for the result, or give --dry-run")
    import_plugins(args.plugins, sys.stderr)
    plan = Plan(tuple(rule for path in args.plan for rule in Plan.read(path).rules))
    if args.out is not None:
        check_new_folder(Path(args.out))
    model = build_model(args.model, sys.stderr)
    inputs = None if args.inputs is None else call_factory("--inputs", args.inputs, sys.stderr)
    if args.inputs is not None and inputs is None:
        raise InvalidInputError(f"--inputs {args.inputs}: the function returned None, no inputs")
    does = _dry_run if args.dry_run else _convert
    return does(model, plan, inputs, args)


def _dry_run(model: nn.Module, plan: Plan, inputs: object, args: argparse.Namespace) -> int:
    from ksopt.conversion.model_call import ModelCall
    from ksopt.conversion.resolve import resolve

    call = ModelCall.of_model(model, inputs, "--inputs")
    choices, dense = resolve(model, plan, args.include, args.exclude, call)
    rows = [
        [
            choice.place.name,
            f"{choice.place.in_features}x{choice.place.out_features}",
            " | ".join(map(str, choice.chains)),
            f"{choice.place.in_features * choice.place.out_features:,}",
            f"{sum(chain.nnz for chain in choice.chains):,}",
        ]
        for choice in choices
    ]
    if args.json:
        layers = [{"name": name, "chain": chain} for name, _, chain, _, _ in rows]
        print(json.dumps({"layers": layers, "dense": dense}, indent=2))
        return 0
    if rows:
        heads = ("layer", "INxOUT", "chain", ">dense", ">weights")
        tables.write(tables.of(heads, rows), sys.stdout)
    _print_dense(dense, sys.stdout)
    print(f"{counted(len(rows), 'layer')} would be converted.")
    return 0


def _convert(model: nn.Module, plan: Plan, inputs: object, args: argparse.Namespace) -> int:
    from ksopt.conversion.apply import convert
    from ksopt.conversion.folder import CONFIG, save_converted
    from ksopt.measure import device as devices

    empty = next((name for name, one in model.named_parameters() if one.is_meta), None)
    if empty is not None:
        raise InvalidInputError(
            f"--model {args.model}: its parameter {empty} is on the device meta, which holds no "
            "values to convert: the factory must build the model on the CPU (--dry-run takes it)"
        )
    done = convert(
        model.to(devices.resolve(args.device)),
        plan,
        include=args.include,
        exclude=args.exclude,
        weights=args.weights,
        refine=args.refine,
        max_error=args.max_error,
        example_inputs=inputs,
        progress=None if args.quiet else _say,
    )
    folder = save_converted(done, args.out, source=args.model)
    if args.json:
        sys.stdout.write((folder / CONFIG).read_text(encoding="utf-8"))
    else:
        _print(done, folder, args, sys.stdout)
    return 0


def _say(text: str) -> None:
    print(f"projecting {text}", file=sys.stderr)


def _print(done: Conversion, folder: Path, args: argparse.Namespace, stream: TextIO) -> None:
    if done.layers:
        tables.write(done.table(), stream)
        print(_COLUMNS, file=stream)
    _print_dense(dict(done.dense), stream)
    print(done.sentence, file=stream)
    print(f"\nwritten: {folder.resolve()}", file=stream)
    if done.layers:
        module, _, factory = args.model.partition(":")
        model = f"{module}.{factory}()"
        print(f"next:    model = ksopt.load_converted({args.out!r}, {model})", file=stream)
        print(f"         ksopt.distil(model, {model}, batches)  # docs/convert.md", file=stream)


def _print_dense(dense: dict[str, str], stream: TextIO) -> None:
    """Print the layers of each reason in one line."""
    names: dict[str, list[str]] = {}
    for name, reason in dense.items():
        names.setdefault(reason, []).append(name)
    for reason, alike in names.items():
        more = [f"... and {len(alike) - _SHOWN} more"] if len(alike) > _SHOWN else []
        which = ", ".join([*alike[:_SHOWN], *more])
        print(f"{counted(len(alike), 'layer')} left dense ({reason}): {which}", file=stream)
