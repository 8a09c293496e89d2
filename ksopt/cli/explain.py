"""The command ``ksopt explain``: its arguments and its output."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ksopt.errors import InvalidInputError, KsoptError
from ksopt.system.atomic_files import write_whole
from ksopt.system.suggest import nearest
from ksopt.system.untrusted import is_folder, reason

if TYPE_CHECKING:  # the parser is built for every command: it must not load torch
    import torch

    from ksopt.compile.explain import Explanation

SUMMARY = "Say how much faster a model is with backend='ksopt', what is lowered, and why not more."
EPILOG = """\
inputs:
  --input SHAPE or SHAPE:DTYPE for each argument of the model, such as 128x197x384 or 8x1024:int64,
  in their order, behind one --input or several; floating point is random, integers are zeros. Take
  as many rows as the model will see: what is faster depends on them.

MODULE is imported, from the current folder too, and FACTORY is called without arguments; it returns
the model, which runs once, uncompiled. Where something would be lowered, it is then compiled by
Inductor alone and by ksopt, and a call of each is timed (--no-time leaves that out).

the columns:
  rows          that the chain multiplies
  predicted us  of the products, by the cost models, microseconds: by ksopt's operator / as batched
                products under Inductor; - on a CPU, which has none
  measured us   the same, timed on the device; - if it was not (--tune measure times it)
  decision      lowered, left to PyTorch (ksopt is slower), or not recognised

below the table, for each row: how it is written, then what follows and could be computed with it
(bias, activation, residual), and the reason for the decision; where one launch computes all of it,
its time with all that: "All of it, us"

examples:
  ksopt explain mymodel:build --input 128x197x384 --dtype bfloat16 --device cuda
  ksopt explain mymodel:build --input 8x1024:int64 --out explained.md
  ksopt explain mymodel:build --input 128x197x384 --tune measure --no-time

exit codes: 0 done, 1 failed, 2 an argument is not allowed, 130 stopped with Ctrl-C
"""
_TUNES = ("model", "measure", "off")
_DTYPES = ("float32", "float16", "bfloat16", "int64", "int32", "bool")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments; the caller adds --json and --traceback."""
    command.add_argument("model", metavar="MODULE:FACTORY", help="what builds the model")
    how = command.add_argument_group("how it is called").add_argument
    how(
        "--input",
        required=True,
        nargs="+",
        action="extend",
        metavar="SHAPE[:DTYPE]",
        help="see below; may be repeated",
    )
    how("--dtype", default="float32", help="of the model: float32 (default), float16 or bfloat16")
    how("--device", default="cpu", help="cpu (default), cuda, cuda:1, ... or auto")
    how("--train", action="store_true", help="in training mode, with gradients")
    how("--dynamic", action="store_true", help="as torch.compile(dynamic=True)")
    ask = command.add_argument_group("what is decided and timed").add_argument
    ask("--tune", help="how it is decided what is faster: model, measure or off")
    ask(
        "--time",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compile the model both ways, and time a call of each (default)",
    )
    ask("--out", metavar="FILE", help="write it to a .md or .json file, too")


def run(args: argparse.Namespace) -> int:
    """Explain a model, print the explanation, and write it to --out; return the exit code."""
    import torch

    from ksopt.compile.explain import explain
    from ksopt.measure import device as devices
    from ksopt.system.user_code import build_model

    if args.tune is not None and args.tune not in _TUNES:
        raise InvalidInputError(
            f"--tune {args.tune!r}: it must be {', '.join(_TUNES[:-1])} or {_TUNES[-1]}"
            f"{nearest(args.tune, _TUNES)}"
        )
    if args.dtype not in ("float32", "float16", "bfloat16"):
        raise InvalidInputError(f"--dtype {args.dtype!r}: it must be float32, float16 or bfloat16")
    out = _checked_out(args.out)
    device = devices.resolve(args.device)
    inputs = [_tensor(text, args.dtype, device) for text in args.input]
    model = build_model(args.model, sys.stderr, "explain")
    model = model.to(device=device, dtype=getattr(torch, args.dtype)).train(args.train)
    with torch.set_grad_enabled(args.train), _errors_as_sentences(args):
        explanation = explain(
            model,
            *inputs,
            tune=args.tune,
            dynamic=True if args.dynamic else None,
            timed=args.time,
        )
    if out is not None:
        try:
            write_whole(out, _text(explanation, out))
        except (OSError, ValueError) as error:
            raise InvalidInputError(f"--out {out} cannot be written: {reason(error)}") from None
    if args.json:
        print(json.dumps(explanation.to_json(), indent=2))
    else:
        explanation.print()
    return 0


@contextlib.contextmanager
def _errors_as_sentences(args: argparse.Namespace) -> Iterator[None]:
    """Turn an exception of the model on these inputs into one sentence."""
    fake = logging.getLogger("torch._subclasses.fake_tensor")  # it logs its own tracebacks
    before, fake.disabled = fake.disabled, not args.traceback
    try:
        yield
    except KsoptError:
        raise
    except Exception as error:
        own = _without_dynamo(error)
        message = (str(own).strip().splitlines() or ["nothing more"])[-1].strip()
        raise InvalidInputError(
            f"{args.model}: the model, called with {', '.join(args.input)}, raised "
            f"{type(own).__name__}: {message} (--traceback shows where)"
        ) from error
    finally:
        fake.disabled = before


def _without_dynamo(error: BaseException) -> BaseException:
    """The exception of the model, which Dynamo wraps into pages of advice."""
    from torch._dynamo.exc import TorchDynamoException

    while isinstance(error, TorchDynamoException):
        inner = error.__cause__ or error.__context__
        if inner is None:
            break
        error = inner
    return error


def _tensor(text: str, dtype: str, device: torch.device) -> Any:
    """The input tensor that SHAPE or SHAPE:DTYPE specifies."""
    import torch

    from ksopt.system import limits

    shape, colon, name = text.partition(":")
    name = name if colon else dtype
    sizes = shape.split("x")
    if not all(re.fullmatch("[0-9]{1,18}", size) for size in sizes) or name not in _DTYPES:
        raise InvalidInputError(
            f"--input {text!r}: write sizes with x between them, such as 128x197x384, and a dtype "
            f"of {', '.join(_DTYPES)} behind a colon if it is not the model's"
        )
    kind, numbers = getattr(torch, name), [int(size) for size in sizes]
    # Floating-point numbers are drawn in float32 first.
    each = kind.itemsize if kind.itemsize == 4 or not kind.is_floating_point else kind.itemsize + 4
    limits.check_bytes(each * math.prod(numbers), device, f"--input {text}", "give a smaller one")
    try:
        if kind.is_floating_point:
            return torch.randn(numbers, device=device).to(kind)
        return torch.zeros(numbers, dtype=kind, device=device)
    except RuntimeError as error:  # sizes too large even for an empty tensor
        raise InvalidInputError(f"--input {text}: {reason(error).splitlines()[0]}") from None


def _checked_out(text: str | None) -> Path | None:
    if text is None:
        return None
    path = Path(text)
    if path.suffix not in (".md", ".json"):
        raise InvalidInputError(f"--out {text}: the file's name must end in .md or .json")
    if not is_folder(path.parent):
        raise InvalidInputError(f"--out {text}: there is no folder {path.parent}")
    if is_folder(path):
        raise InvalidInputError(f"--out {text}: there is a folder of that name")
    return path


def _text(explanation: Explanation, path: Path) -> str:
    if path.suffix == ".json":
        return json.dumps(explanation.to_json(), indent=2) + "\n"
    return f"# What ksopt lowers\n\n{explanation.markdown()}"
