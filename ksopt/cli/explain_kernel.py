"""The command ``ksopt explain-kernel``: its arguments and its output."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ksopt.errors import InvalidInputError
from ksopt.patterns.chain import Chain
from ksopt.patterns.surroundings import ACTIVATIONS, GATES
from ksopt.search.options import DTYPES, LAYOUTS
from ksopt.system.plurals import counted
from ksopt.system.suggest import nearest

if TYPE_CHECKING:  # the parser is built for every command: it must not load torch
    from ksopt.kernels.forecast import Compiled, Forecast
    from ksopt.kernels.problem import Problem

SUMMARY = "Say which kernels a product would take on a GPU, which need not be here."
EPILOG = """\
Nothing is measured. Times are predictions by the cost models, whose rates are those of an H200: on
another GPU the order of the ways says more than their microseconds.

examples:
  ksopt explain-kernel "(4,64,64,16)" --dtype float16
  ksopt explain-kernel "(1,512,128,2)*(2,128,512,1)" --dtype bfloat16 --bias --gpu A100 --compile
  ksopt explain-kernel "(4,64,64,16)" --gpu 9.0,114,228

exit codes: 0 done, 1 failed, 2 an argument is not allowed, 130 stopped with Ctrl-C
"""
_SCHEMA = 1
_MOST_ROWS = 2**40


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments; the caller adds those of every command."""
    command.add_argument("chain", metavar="CHAIN", help="a factor or a chain, such as (4,64,64,16)")
    command.add_argument(
        "--gpu",
        nargs="+",
        metavar="GPU",
        help="A100, H200, RTX4090 and others, or compute capability, multiprocessors and KiB of "
        "shared memory, such as 9.0,114,228; all that have a name by default",
    )
    command.add_argument(
        "--batch", type=int, default=8192, metavar="ROWS", help="rows of the input (%(default)s)"
    )
    command.add_argument(
        "--dtype", default="float32", help="float32 (default), float16 or bfloat16"
    )
    command.add_argument("--tf32", action="store_true", help="float32 at TF32's accuracy")
    command.add_argument(
        "--layout", default="batch_first", help="batch_first (default) or batch_last"
    )
    command.add_argument("--bias", action="store_true", help="a bias is added")
    command.add_argument(
        "--activation",
        default="none",
        help=f"none (default), {', '.join(ACTIVATIONS)}; of two siblings {', '.join(GATES)}, too",
    )
    command.add_argument("--residual", action="store_true", help="a tensor of y's shape is added")
    command.add_argument(
        "--in-float32", action="store_true", help="y is float32, of 16-bit operands (no residual)"
    )
    command.add_argument(
        "--siblings", type=int, default=1, help="chains of this form that read one x (%(default)s)"
    )
    command.add_argument(
        "--compile",
        action="store_true",
        help="compile the chosen kernels too, and say what they take by the compiler's report",
    )


def run(args: argparse.Namespace) -> int:
    """Print the chosen kernels; return the exit code.

    Raises:
        InvalidInputError: an argument is not allowed.
        UnavailableError: --compile, and there is no NVRTC.
    """
    Chain.parse(args.chain)  # reject invalid arguments before importing torch
    for option, word, known in (("dtype", args.dtype, DTYPES), ("layout", args.layout, LAYOUTS)):
        if word not in known:
            raise InvalidInputError(
                f"--{option} {word!r} is not one of {', '.join(known)}{nearest(word, known)}"
            )
    if not 1 <= args.batch <= _MOST_ROWS:
        raise InvalidInputError(f"--batch {args.batch}: it must be from 1 to {_MOST_ROWS}")
    if args.tf32 and args.dtype != "float32":
        raise InvalidInputError(f"--tf32 is for float32, and --dtype is {args.dtype}")

    from ksopt.kernels import forecast, gpus

    specs = {name: gpus.spec_of(name) for name in args.gpu or gpus.GPUS}
    problem = _problem(args)
    forecasts = {name: forecast.forecast(problem, args.batch, spec) for name, spec in specs.items()}
    built = {
        name: [forecast.compiled(one, specs[name]) if args.compile else None for one in launches]
        for name, launches in ((name, one.plan.launches) for name, one in forecasts.items())
    }
    if args.json:
        print(json.dumps(_document(problem, args.batch, forecasts, built), indent=2))
    else:
        _print(problem, args.batch, forecasts, built, is_compiled=args.compile)
    return 0


def _problem(args: argparse.Namespace) -> Problem:
    from ksopt.kernels.problem import Epilogue, Problem

    return Problem(
        Chain.parse(args.chain),
        args.dtype,
        args.layout == "batch_last",
        not args.tf32,
        Epilogue(args.bias, args.activation, args.residual, args.in_float32),
        args.siblings,
    )


def _print(
    problem: Problem,
    batch: int,
    forecasts: dict[str, Forecast],
    built: dict[str, list[Compiled | None]],
    is_compiled: bool,
) -> None:
    from ksopt.report import tables

    print(f"{problem}, {counted(batch, 'row')}\n")
    heads = ("gpu", "launch", "by", "tile", ">predicted us", ">PyTorch's us")
    more = (">registers", ">spilled", ">shared KiB", ">blocks", "fits") if is_compiled else ()
    rows = [
        (*row, *(_resources(one) if is_compiled else ()))
        for name, one_gpu in forecasts.items()
        for row, one in zip(_rows(name, one_gpu), [*built[name], None], strict=False)
    ]
    tables.write(tables.of((*heads, *more), rows), sys.stdout)
    if len(forecasts) == 1:
        print("\nAll candidates, best predicted first:\n")
        (only,) = forecasts.values()
        tables.write(tables.of((">", "launch", "by", ">predicted us"), _rivals(only)), sys.stdout)
    print(
        "\nNothing was measured. The predictions have the rates of an H200's multiprocessors: on "
        "another GPU trust their order more than their microseconds."
    )


def _rows(name: str, forecast: Forecast) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    plan = forecast.plan
    for place, launch in enumerate(plan.launches):
        config = launch.choice.config or {}
        first, last = place == 0, place == len(plan.launches) - 1
        within = f" with {', '.join(plan.within.names)}" if last and plan.within.names else ""
        rows.append(
            (
                name if first else "",
                str(launch.problem.chain),
                launch.choice.way + within,
                " ".join(f"{key}={value}" for key, value in config.items() if _is_plain(value)),
                "" if launch.us is None else f"{launch.us:,.1f}",
                f"{forecast.pytorch_us:,.1f}" if first else "",
            )
        )
    behind = ", ".join(plan.behind.names)
    if behind:
        us = f"{forecast.behind_us:,.1f}"
        rows.append(("", behind, "PyTorch's operations", "", us, ""))
    return rows


def _is_plain(value: Any) -> bool:
    return isinstance(value, (int, str, bool))


def _resources(built: Compiled | None) -> tuple[str, ...]:
    if built is None:
        return ("", "", "", "", "")
    static = max(one.shared_bytes for one in built.resources)
    return (
        str(max(one.registers for one in built.resources)),
        str(max(one.spilled_bytes for one in built.resources)),
        f"{(built.dynamic_shared_bytes + static) / 1024:.1f}",
        str(built.blocks),
        "yes" if built.fits else "no",
    )


def _rivals(forecast: Forecast) -> list[tuple[str, ...]]:
    return [
        (str(place), str(one.problem.chain), one.label, f"{one.predicted_us:,.1f}")
        for rivals in forecast.rivals
        for place, one in enumerate(rivals, start=1)
    ]


def _document(
    problem: Problem,
    batch: int,
    forecasts: dict[str, Forecast],
    built: dict[str, list[Compiled | None]],
) -> dict[str, Any]:
    return {
        "schema": _SCHEMA,
        "problem": str(problem),
        "batch": batch,
        "gpus": {
            name: {
                "spec": asdict(one.device),
                "pytorch_us": one.pytorch_us,
                "within": list(one.plan.within.names),
                "behind": list(one.plan.behind.names),
                "behind_us": one.behind_us,
                "launches": [
                    {
                        "chain": str(launch.problem.chain),
                        **launch.choice.to_json(),
                        "compiled": None if compiled is None else asdict(compiled),
                        "rivals": [
                            {"way": rival.name, "config": rival.config, "us": rival.predicted_us}
                            for rival in rivals
                        ],
                    }
                    for launch, compiled, rivals in zip(
                        one.plan.launches, built[name], one.rivals, strict=True
                    )
                ],
            }
            for name, one in forecasts.items()
        },
    }
