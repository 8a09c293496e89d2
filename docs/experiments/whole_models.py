"""Whole models, uncompiled, under Inductor and under ksopt.

A ViT, a GPT-2 and a Llama of the library ``transformers``, with random weights, whose linear layers
three authors have replaced by Kronecker-sparse ones in plain PyTorch. Each is compiled, compared
with float64 (logits, loss, all gradients), and timed in turns.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from ksopt.errors import InvalidInputError, KsoptError
from ksopt.measure import device as devices
from ksopt.report import tables
from models import report
from models.build import SIZES, SMALL, build
from models.measuring import EAGER, INDUCTOR, Way, measure_model
from models.report import Case

_DTYPES = ("float32", "bfloat16", "float16")
_EPILOG = """\
examples:
  python docs/experiments/whole_models.py --small --models gpt2 --dtypes float32
  python docs/experiments/whole_models.py --layers 4 --out models  # on a GPU, 4 blocks a model

On a GPU most of the first run goes into measuring what is faster, which is kept on disk.

exit codes: 0 done, or the time was up; 1 a result is wrong, a site was missed, or a library is not
there; 2 an argument is not allowed
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the arguments, measure, print, write."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    given = _parser().parse_args(words)
    command = shlex.join(["python", "docs/experiments/whole_models.py", *words])
    try:
        cases = _measured(given, command)
    except KsoptError as error:
        print(f"python docs/experiments/whole_models.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, InvalidInputError) else 1
    for table in (report.times_table(cases), report.sites_table(cases), report.errors_table(cases)):
        tables.write(table)
        print()
    faults = [fault for case in cases for fault in case.faults]
    for sentence in (*report.sentences(cases), *faults):
        print(sentence)
    print(f"\nReport: {given.out / 'models.md'}; all numbers: {given.out / 'models.json'}")
    return 1 if faults else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python docs/experiments/whole_models.py",
        description="Check and time whole models with Kronecker-sparse layers under torch.compile.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    ask = parser.add_argument
    ask("--models", default=",".join(SIZES), help="some of %(default)s, with commas")
    ask("--dtypes", default="float32,bfloat16", help=f"some of {', '.join(_DTYPES)}, with commas")
    ask("--layers", type=int, metavar="N", help="blocks of each model, instead of all")
    ask("--small", action="store_true", help="small models, which a CPU compiles and runs too")
    ask("--dynamic", action="store_true", help="compile for any batch and length (dynamic=True)")
    ask("--device", default="auto", help="cpu, cuda, cuda:1; auto (default): a GPU if there is one")
    ask("--seconds", type=float, default=1.0, help="to time each forward and step (%(default)s)")
    ask("--timeout", type=float, metavar="SECONDS", help="begin no new model after so long")
    ask(
        "--tune",
        default="default",
        metavar="WAYS",
        help="how ksopt decides: some of default, measure, model, off, with commas (%(default)s: "
        "measure on a GPU, all is lowered on a CPU)",
    )
    out = Path("ksopt-report-models")
    ask("--out", type=Path, default=out, metavar="FOLDER", help="where it goes (%(default)s)")
    return parser


def _measured(given: argparse.Namespace, command: str) -> list[Case]:
    device = devices.resolve(given.device)
    models = _words("--models", given.models, tuple(SIZES))
    dtypes = _words("--dtypes", given.dtypes, _DTYPES)
    tunes = _words("--tune", given.tune, ("default", "measure", "model", "off"))
    if given.layers is not None and given.layers < 1:
        raise InvalidInputError(f"--layers {given.layers}: it must be at least 1")
    if not given.seconds > 0:
        raise InvalidInputError(f"--seconds {given.seconds:g}: it must be above 0")
    record = devices.record(device)
    began = time.monotonic()
    cases: list[Case] = []
    for model in models:
        for dtype in dtypes:
            spent = time.monotonic() - began
            if given.timeout is not None and spent >= given.timeout:
                _tell(f"the time is up: {model} {dtype} and what follows is left out")
                return cases
            cases.append(_case(model, dtype, device, tunes, given))
            gc.collect()  # the next model may need the memory
            if device.type == "cuda":
                torch.cuda.empty_cache()
            _tell(f"{model} {dtype}: {time.monotonic() - began - spent:.0f} s")
            report.write(given.out, cases, record, command)
    return cases


def _case(
    model: str, dtype: str, device: torch.device, tunes: Sequence[str], given: argparse.Namespace
) -> Case:
    size = (SMALL if given.small else SIZES)[model]
    depth = size.depth if given.layers is None else given.layers
    kind: torch.dtype = getattr(torch, dtype)
    built = build(model, kind, device, small=given.small, layers=depth)
    ways = [Way(EAGER), Way(INDUCTOR), *_ksopt_ways(tunes)]
    measure_model(
        built,
        ways,
        dynamic=given.dynamic,
        seconds=given.seconds,
        told=lambda what: _tell(f"{model} {dtype}: {what}"),
    )
    shape = tuple(built.inputs.shape)
    return Case(model, dtype, depth, built.layers, shape, given.dynamic, tuple(ways))


def _ksopt_ways(tunes: Sequence[str]) -> list[Way]:
    return [
        Way("ksopt", {}) if tune == "default" else Way(f"ksopt, tune={tune}", {"tune": tune})
        for tune in tunes
    ]


def _words(option: str, text: str, allowed: Sequence[str]) -> list[str]:
    found = list(dict.fromkeys(text.split(",")))
    unknown = [word for word in found if word not in allowed]
    if unknown:
        raise InvalidInputError(
            f"{option} {text}: {unknown[0]!r} is unknown, it must be of {', '.join(allowed)}"
        )
    return found


def _tell(text: str) -> None:
    print(f"{time.strftime('%X')}  {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
