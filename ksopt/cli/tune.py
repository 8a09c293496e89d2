"""The command ``ksopt tune``: its arguments and its output."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from ksopt import settings
from ksopt.errors import InvalidInputError
from ksopt.patterns.chain import Chain, Pattern
from ksopt.patterns.surroundings import ALONE, Surroundings
from ksopt.report import tables
from ksopt.search.layer_request import LayerRequest
from ksopt.search.options import DTYPES, LAYOUTS
from ksopt.search.space.named_families import families
from ksopt.system import option_fields
from ksopt.system.plurals import counted
from ksopt.system.suggest import nearest
from ksopt.system.user_code import import_plugins

if TYPE_CHECKING:  # the parser is built for every command: it must not load torch
    import torch

    from ksopt.compile.lowering.site_times import SiteRecord
    from ksopt.kernels.explain import ChoiceReport
    from ksopt.kernels.gradient_record import GradientRecord
    from ksopt.kernels.problem import Problem, ProblemKey
    from ksopt.tune import TuneRequest

SUMMARY = "Measure ahead of time how to multiply on this device, and keep the choices on disk."
EPILOG = """\
what is tuned:
  --pattern      single factors (a,b,c,d); --chain: chains and their factors
  --dims         the factors of the chains of the paper's families (Monarch, mirrored Monarch, low
                 rank) that a layer INxOUT and the budgets allow
  --epilogue, --siblings
                 layers: what is named above with a bias, an activation, a residual, or several on
                 one input, and their factors; with --dims, the chains. A KSLinear has a bias

Products of batches up to the next power of two share a choice. What is recorded is not measured
again unless --again is given, so a command that was stopped goes on where it was.

examples:
  ksopt tune --pattern "(4,64,64,16)" --batch 64 25088 --dtype float16 --device cuda
  ksopt tune --chain "(1,768,192,2)*(6,64,64,1)" --batch 8192 --dtype bfloat16 --backward
  ksopt tune --chain "(1,768,192,2)*(6,64,64,1)" --batch 8192 --dtype bfloat16 --epilogue bias gelu
  ksopt tune --dims 768x3072 --budget 25%
  ksopt tune --show

exit codes: 0 done, 1 failed, 2 an argument is not allowed, 130 stopped with Ctrl-C
"""


_SCHEMA = 2
"""The schema of --json. In 1, ``key`` was ``situation``, and ``repacked`` was ``fresh``."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments; the caller adds --json and --traceback."""
    what = command.add_argument_group("what is tuned").add_argument
    what("--pattern", nargs="+", default=[], metavar="PATTERN", help="factors such as (4,64,64,16)")
    what("--chain", nargs="+", default=[], metavar="CHAIN", help="chains such as (..)*(..)")
    for name in ("epilogue", "siblings"):
        option_fields.add_argument(what, Surroundings, name)
    what("--dims", metavar="INxOUT", help="size of a linear layer, such as 768x3072")
    what(
        "--budget",
        nargs="+",
        default=[],
        metavar="SIZE",
        help="with --dims: the most weights, such as 25%% or 600k (10%% 25%% 50%%)",
    )
    what(
        "--batch",
        nargs="+",
        type=int,
        metavar="ROWS",
        help="rows of the input; several are allowed (256, on a GPU 8192)",
    )
    what("--dtype", default="float32", help="float32 (default), float16 or bfloat16")
    what("--tf32", action="store_true", help="float32 at TF32's accuracy, as torch may be set to")
    what("--layout", default="batch_first", help="batch_first (default) or batch_last")
    what(
        "--device", default="auto", help="cpu, cuda, cuda:1; auto (default): a GPU if there is one"
    )
    what("--backward", action="store_true", help="the products of the backward pass too")
    how = command.add_argument_group("how").add_argument
    how(
        "--seconds",
        type=float,
        default=1.0,
        help="for timing one product; compilation comes on top (%(default)s)",
    )
    how(
        "--plugins",
        nargs="+",
        default=[],
        metavar="MODULE",
        help="modules to import first, which register devices or kernel families; this runs their "
        "code",
    )
    how("--again", action="store_true", help="measure what is recorded already")
    how("--show", action="store_true", help="print what is recorded and measure nothing")


@dataclass(frozen=True)
class Others:
    """What is recorded beside choices of products.

    Attributes:
        sites: that the compiler has timed.
        gradients: of trained layers.
    """

    sites: Sequence[SiteRecord] = ()
    gradients: Sequence[GradientRecord] = ()


def run(args: argparse.Namespace) -> int:
    """Tune, or show recorded choices, as the arguments specify; return the exit code.

    Raises:
        InvalidInputError: an argument is not allowed.
        UnavailableError: the machine lacks a required library or device.
    """
    import_plugins(args.plugins, sys.stderr)
    around = Surroundings.checked(args.epilogue, args.siblings, "tune")
    chains = _chains(args, around)  # reject invalid arguments before importing torch
    dtype, batch_last = _kind(args)
    if not chains and not args.show:
        raise InvalidInputError("tune: give --pattern, --chain or --dims, or --show")
    from ksopt.measure import device as devices

    device = devices.resolve(args.device)
    others = None
    if args.show:
        reports, others = _recorded(args, chains, around, device)
    else:
        from ksopt.kernels.problem import Epilogue, Problem
        from ksopt.tune import TuneRequest

        behind = Epilogue.of_names(around.epilogue)
        batches = args.batch or [256 if device.type == "cpu" else 8192]
        request = TuneRequest(
            tuple(
                Problem(chain, dtype, batch_last, not args.tf32, behind, around.siblings)
                for chain in chains
            ),
            tuple(batches),
            device,
            args.backward,
            args.seconds,
            args.again,
        )
        reports = _tuned(request, sys.stderr, quiet=args.json or args.quiet)
    if args.json:
        _print_json(device, reports, others)
    else:
        _print(device, reports, others or Others(), sys.stdout)
    return 0


def _chains(args: argparse.Namespace, around: Surroundings) -> list[Chain]:
    """The chains that the arguments name; --pattern and --dims name factors, chains of one.

    With surroundings --dims names chains: a layer's epilogue is not that of its factors.
    """
    factors = [Chain((Pattern.parse(text),)) for text in args.pattern]
    chains = [Chain.parse(text) for text in args.chain]
    named: list[Chain] = []
    if args.dims is not None:
        # With any rank: both low rank and Monarch are worth recording.
        request = LayerRequest(args.dims, budgets=tuple(args.budget), min_rank=1)
        named = [chain for _, chain in families(request)]
        if not named:
            most = request.steps[-1]
            raise InvalidInputError(
                f"tune: no chain of the named families has so few weights for dims {request.size}: "
                f"the largest budget is {most.text} ({counted(most.parameters, 'weight')})"
            )
    elif args.budget:
        raise InvalidInputError("tune: --budget needs --dims, the layer that it is a share of")
    if around == ALONE:
        named = [Chain((pattern,)) for chain in named for pattern in chain]
    return list(dict.fromkeys([*factors, *chains, *named]))


def _kind(args: argparse.Namespace) -> tuple[str, bool]:
    if args.dtype not in DTYPES:
        raise InvalidInputError(
            f"dtype {args.dtype!r} is unknown: it can be float32, float16 or bfloat16"
            f"{nearest(args.dtype, DTYPES)}"
        )
    if args.layout not in LAYOUTS:
        raise InvalidInputError(
            f"layout {args.layout!r} is unknown: it must be 'batch_first' or 'batch_last'"
            f"{nearest(args.layout, LAYOUTS)}"
        )
    return DTYPES[args.dtype], args.layout == "batch_last"


def _recorded(
    args: argparse.Namespace, chains: Sequence[Chain], around: Surroundings, device: torch.device
) -> tuple[list[ChoiceReport], Others]:
    """What is on disk, restricted to the named factors, layers and batches."""
    from ksopt.compile.lowering.site_times import SiteRecord
    from ksopt.kernels.explain import from_record
    from ksopt.kernels.gradient_record import GradientRecord
    from ksopt.kernels.problem import bits_of
    from ksopt.kernels.tuning_cache import Record
    from ksopt.tune import all_recorded

    patterns = {*itertools.chain(*chains)}
    bits = {bits_of(batch) for batch in args.batch or []}

    def are_named(its: Iterable[Pattern], its_bits: int) -> bool:
        return (not patterns or {*its} <= patterns) and (not bits or its_bits in bits)

    def is_named(key: ProblemKey) -> bool:
        is_layer = around in (ALONE, _around(key.problem))
        return is_layer and are_named(itertools.chain(*key.problem.chains), key.bits)

    choices = [one for one in all_recorded(device, Record) if is_named(one.key)]
    sites = [one for one in all_recorded(device, SiteRecord) if is_named(one.key.product)]
    gradients = [
        one
        for one in all_recorded(device, GradientRecord)
        if around == ALONE and are_named(one.key.problem.factors, one.key.bits)
    ]
    return [from_record(one, "recorded") for one in choices], Others(sites, gradients)


def _around(problem: Problem) -> Surroundings:
    return Surroundings(problem.epilogue.names, problem.siblings)


def _tuned(request: TuneRequest, stream: TextIO, quiet: bool) -> list[ChoiceReport]:
    """Tune, and show progress."""
    from ksopt.tune import tune

    if settings.tuning() != "measure":
        print(
            f"ksopt: KSOPT_TUNE is {settings.tuning()}, so products will not use what is measured "
            "here: unset it, or set it to measure",
            file=stream,
        )
    reports = []
    total = len(request.products()) + len(request.wholes())
    with _progress(stream, total, quiet) as tell:
        for report in tune(request):
            reports.append(report)
            tell(f"{report.key}: {report.name}")
    return reports


@contextlib.contextmanager
def _progress(stream: TextIO, total: int, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A progress bar on a terminal, a line per product elsewhere, nothing if quiet."""
    if quiet:
        yield lambda text: None
    elif not stream.isatty():
        yield lambda text: print(text, file=stream, flush=True)
    else:
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(file=stream), transient=True) as bar:
            task = bar.add_task("tuning", total=total)
            yield lambda text: bar.update(task, advance=1, description=text)


def _print_json(
    device: torch.device, reports: Sequence[ChoiceReport], others: Others | None
) -> None:
    from ksopt.kernels import tuning_cache
    from ksopt.kernels.backends.base import backend_of

    machine = backend_of(device.type).fingerprint(device)
    document: dict[str, Any] = {
        "schema": _SCHEMA,
        "device": str(device),
        "machine": machine,
        "folder": str(tuning_cache.folder_of(machine)),
        "choices": [report.to_json() for report in reports],
    }
    if others is not None:
        document["sites"] = [site.to_json() for site in others.sites]
        document["gradients"] = [gradient.to_json() for gradient in others.gradients]
    print(json.dumps(document, indent=2))


def _print(
    device: torch.device,
    reports: Sequence[ChoiceReport],
    others: Others,
    stream: TextIO,
) -> None:
    from ksopt.kernels import tuning_cache
    from ksopt.kernels.backends.base import backend_of
    from ksopt.tune import summary

    if reports:
        tables.write(table(reports), stream)
        print(file=stream)
        for report in reports:
            print(f"{report.key}: {report.reason}.", file=stream)
        print(file=stream)
    if others.gradients:
        tables.write(gradients_table(others.gradients), stream)
        print(file=stream)
    if others.sites:
        tables.write(sites_table(others.sites), stream)
        print(file=stream)
    print(summary(reports), file=stream)
    print(
        f"They are in {tuning_cache.folder_of(backend_of(device.type).fingerprint(device))}",
        file=stream,
    )


def table(reports: Sequence[ChoiceReport]) -> tables.Table:
    """The choices beside all measured candidates; times in microseconds."""
    rows = []
    for report in reports:
        rivals = [f"{way} {us:,.1f}" for way, us in report.rivals.items() if way != report.way]
        best = report.best_pytorch_us
        rows.append(
            [
                _layer_words(report),
                _kind_words(report.key),
                str(report.batch),
                report.name,
                "" if report.predicted_us is None else f"{report.predicted_us:,.1f}",
                "" if report.measured_us is None else f"{report.measured_us:,.1f}",
                ""
                if best is None or not report.measured_us
                else f"{best / report.measured_us:.2f}",
                ", ".join(rivals),
            ]
        )
    columns = [
        *("pattern", "product", ">batch", "way", ">predicted us", ">measured us"),
        *(">PyTorch / it", "rivals, us"),
    ]
    return tables.of(columns, rows)


def _layer_words(report: ChoiceReport) -> str:
    """The chain, of one pattern for a product, with its epilogue, siblings and second layer."""
    problem = report.key.problem
    siblings = [f"{problem.siblings} times"] if problem.siblings > 1 else []
    words = [str(problem.chain), *problem.epilogue.names, *siblings]
    if problem.second is not None:
        words += ["then", str(problem.second.chain), *problem.second.epilogue.names]
    return " ".join(words)


def _kind_words(key: ProblemKey) -> str:
    problem = key.problem
    words = [problem.dtype if problem.exact else "tf32", problem.layout]
    return " ".join([*words, *([] if key.rows == "aligned" else ["unaligned"])])


def gradients_table(gradients: Sequence[GradientRecord]) -> tables.Table:
    """The gradients of trained layers beside all measured candidates; times in microseconds."""
    rows = []
    for one in gradients:
        problem, chosen = one.key.problem, one.choice
        kinds = [problem.gradient.replace("_", " "), *(["bias"] if problem.with_bias else [])]
        rivals = [f"{rival.way} {rival.median_us:,.1f}" for rival in one.timed if rival != chosen]
        rows.append(
            [
                problem.product,
                f"{' and '.join(kinds)}, {problem.dtype}",
                str(one.batch),
                chosen.way,
                "" if chosen.predicted_us is None else f"{chosen.predicted_us:,.1f}",
                f"{chosen.median_us:,.1f}",
                ", ".join(rivals),
            ]
        )
    columns = (
        "pattern",
        "gradient",
        ">batch",
        "way",
        ">predicted us",
        ">measured us",
        "rivals, us",
    )
    return tables.of(list(columns), rows)


def sites_table(sites: Sequence[SiteRecord]) -> tables.Table:
    """The sites that the compiler has timed, and its choices; times in microseconds."""
    rows = [
        [
            str(site.key.product.problem.chain),
            _kind_words(site.key.product),
            " ".join(site.key.conditions),
            str(site.batch),
            f"{site.times.ksopt_us:,.1f}",
            f"{site.times.unfused_us:,.1f}",
            "lowered" if site.times.lower else "left to PyTorch",
        ]
        for site in sites
    ]
    columns = ("site", "product", "conditions", ">batch", ">ksopt us", ">Inductor us", "choice")
    return tables.of(list(columns), rows)
