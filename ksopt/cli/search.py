"""``ksopt search``: its arguments, and what it prints."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ksopt.cli import constraint_arguments
from ksopt.errors import InvalidInputError
from ksopt.search.layer_request import LayerRequest
from ksopt.search.request import SearchRequest
from ksopt.system.user_code import import_plugins

if TYPE_CHECKING:
    from ksopt.search.results import SearchResult

SUMMARY = (
    "Measure chains of patterns for a linear layer, several, or those of a model, on this device, "
    "and recommend."
)
EPILOG = f"""\
units:
  dims     INxOUT as in nn.Linear(in, out): 768x3072 has 768 inputs and 3072 outputs
  budget   a share of the dense layer's IN*OUT weights (25%, 0.25) or a count (600k, 2.4M);
           the bias is not counted
  times    microseconds, the median of many repeats

{constraint_arguments.HELP}
examples:
  ksopt search --dims 768x3072
  ksopt search --dims 768x3072 --budget 25%
  ksopt search --dims 4096x4096 --budget 10% 25% 2M --dtype bfloat16 --batch 8192 --device cuda
  ksopt search --dims 4096x4096 --families monarch,low_rank --min-rank 64
  ksopt search --dims 768x3072 --chainable --aligned --block-sizes multiple:16
  ksopt search --dims 768x3072 --timeout 600 --out mlp      # the same again goes on from there
  ksopt search --dims 384x384 384x1536 1536x384 --budget 25%
  ksopt search --hf-config config.json --exclude lm_head --timeout 1800
  ksopt search --model mymodel:build --measure-model mymodel:inputs --budget 25% 50%
  ksopt convert --model mymodel:build --plan ksopt-report-.../plan.json --out converted

--model and --measure-model run code: MODULE is imported, from the current folder too, and FACTORY
is called without arguments. --hf-config reads JSON, and nothing else.

exit codes: 0 done, 1 failed (also where every trial did), 2 an argument is not allowed,
            130 stopped with Ctrl-C
"""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments; --json and --traceback are the caller's."""
    what = command.add_argument_group("what is searched: one of these").add_argument
    what(
        "--dims",
        nargs="+",
        action="extend",
        metavar="INxOUT",
        help="size of a layer, such as 768x3072; of several, each has its chain in one report",
    )
    what(
        "--model",
        metavar="MODULE:FACTORY",
        help="the linear layers of the model that FACTORY() returns; runs its code",
    )
    what(
        "--hf-config",
        metavar="FILE",
        help="the linear layers that a transformers config.json describes; runs no code",
    )
    what(
        "--include",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="of a model's layers only these; * allowed",
    )
    what(
        "--exclude",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="of a model's layers not these; * allowed",
    )
    what(
        "--measure-model",
        nargs="?",
        const="",
        metavar="MODULE:FACTORY",
        help="at the end, time the whole --model dense and with the plan, on the inputs that "
        "FACTORY() returns (by default a transformers model's own dummy_inputs)",
    )

    layer = command.add_argument_group("the layer").add_argument
    layer("--batch", type=_integer, metavar="ROWS", help="rows of its input (256, on a GPU 8192)")
    layer("--dtype", default=SearchRequest.dtype, help="float32 (default), float16 or bfloat16")
    layer(
        "--layout",
        default=SearchRequest.layout,
        help="batch_first (default): input (rows, features); batch_last: (features, rows)",
    )
    layer(
        "--device",
        default=SearchRequest.device,
        help="cpu, cuda, cuda:1, ...; auto (default) is the first GPU, or the CPU without one",
    )

    chains = command.add_argument_group("the chains").add_argument
    chains(
        "--budget",
        nargs="*",
        metavar="SIZE",
        help="the most weights, such as 25%% or 600k; several are steps of a ladder, and none "
        "given means 10%% 25%% 50%%",
    )
    chains(
        "--min-use",
        type=_number,
        default=SearchRequest.min_use,
        metavar="SHARE",
        help="least share of a step's budget that its chain must use, 0 to 1 (%(default)s)",
    )
    chains(
        "--min-rank",
        type=_integer,
        metavar="RANK",
        help="least rank that the product can have (full: the smaller of IN and OUT)",
    )
    chains(
        "--factors",
        type=_integer,
        default=SearchRequest.max_factors,
        metavar="MOST",
        help="most factors, 1 to 3 (%(default)s)",
    )
    constraint_arguments.add_arguments(chains)
    chains(
        "--structures",
        default=SearchRequest.structures,
        metavar="NAME[,NAME...]",
        help="what to choose from: ks (default), which is chains, and others beside it or alone, "
        "which --plugins register",
    )

    trained = command.add_argument_group("a trained layer").add_argument
    trained(
        "--weights",
        metavar="FILE[:NAME]",
        help="its weight (.safetensors): how near each chain comes to it is reported; NAME may be "
        "several, joined by commas, or a pattern with *; for a model give the file of its weights "
        "alone: its layers are found by their names",
    )
    trained(
        "--max-error",
        type=_number,
        metavar="SHARE",
        help="most relative error to it that a recommended chain may have (no limit)",
    )

    wanted = command.add_argument_group("what is wanted").add_argument
    wanted(
        "--objective",
        default=SearchRequest.objective,
        help="pareto (default): low latency and few weights; pareto-error: low latency and a low "
        "error to --weights; latency: low latency alone; --energy and --score add theirs to any",
    )
    wanted(
        "--train",
        action="store_true",
        help="time a step of training (forward, gradients of input and weights), not the product",
    )
    wanted(
        "--score",
        metavar="MODULE:FUNCTION",
        help="your own objective: gets what is known of a chain (ksopt.search.user_score.Scored), "
        "returns a number, low where it is good; this runs its code",
    )
    wanted(
        "--energy",
        action="store_true",
        help="measure each chain's energy of a call too, as one more objective (NVIDIA GPUs; needs "
        "nvidia-ml-py)",
    )
    wanted("--max-params", metavar="SIZE", help="the most weights of any step, such as 600k")
    wanted(
        "--min-speedup",
        type=_number,
        metavar="TIMES",
        help="how many times as fast as dense a recommended chain must be, such as 1.2",
    )

    effort = command.add_argument_group("the search").add_argument
    effort(
        "--trials",
        type=_integer,
        metavar="COUNT",
        help="chains to measure in all, those of an earlier run counted; sizes share them "
        f"({LayerRequest.trials} for each size)",
    )
    effort(
        "--timeout",
        type=_number,
        metavar="SECONDS",
        help="start no new measurement after so long (no limit)",
    )
    effort(
        "--seed",
        type=_integer,
        default=SearchRequest.seed,
        help="of the sampler, the inputs and the weights, 0 to 4294967295 (%(default)s)",
    )
    effort(
        "--storage",
        metavar="URL",
        help="Optuna storage, such as sqlite:///study.db, postgresql://user@host/name or "
        "journal:FILE; searches that are given the same share its study, also from several "
        "machines (a SQLite file in the output folder)",
    )
    effort(
        "--replay",
        metavar="FOLDER",
        help="write the report of a search again, from its folder or storage, and measure nothing",
    )
    effort(
        "--study",
        default=SearchRequest.study,
        metavar="NAME",
        help="name of the study in the storage (%(default)s)",
    )
    effort(
        "--workers",
        type=_integer,
        default=SearchRequest.workers,
        metavar="COUNT",
        help="processes that measure, one for each GPU (%(default)s)",
    )
    effort(
        "--plugins",
        nargs="+",
        action="extend",
        default=[],
        metavar="MODULE",
        help="modules to import first, which register structures, metrics or sections of the "
        "report; this runs their code",
    )
    effort(
        "--out",
        metavar="FOLDER",
        help="where the report goes; a search in the same folder goes on where it stopped "
        "(ksopt-report-...)",
    )


def run(args: argparse.Namespace) -> int:
    """Search, or report again, as the arguments say; the exit code."""
    with options_named():
        return _run(args)


# What a request calls what the command line has an option for, where the two differ.
_OPTIONS = {
    name: "--" + name.replace("_", "-")
    for name in ("min_rank", "min_use", "max_error", "max_params", "min_speedup", "block_sizes")
} | {
    "families": "--families",
    "chainable=True": "--chainable",
    "aligned=True": "--aligned",
    "max_factors": "--factors",
    "timeout_s": "--timeout",
}


def in_options(sentence: str) -> str:
    """A sentence that names the options as they are typed.

    Example:
        >>> in_options("min_rank 9: a 8x12 layer has rank at most 8")
        '--min-rank 9: a 8x12 layer has rank at most 8'
    """
    return re.sub(rf"\b({'|'.join(_OPTIONS)})\b", lambda one: _OPTIONS[one[0]], sentence)


@contextlib.contextmanager
def options_named() -> Iterator[None]:
    """A refusal inside it names the options as they are typed."""
    try:
        yield
    except InvalidInputError as error:
        text = in_options(str(error))
        if text == str(error):
            raise
        raise InvalidInputError(text) from error.__cause__


def _run(args: argparse.Namespace) -> int:
    import_plugins(args.plugins, sys.stderr)
    if args.replay is not None:
        return _replay(args)
    from ksopt.cli.search_layers import Subject

    subject = Subject.of(args)
    request = SearchRequest(
        subject.dims, trials=args.trials, asked_by=subject.asked_by, **_options(args)
    )
    from ksopt.search import for_terminal, run_search

    # Progress goes to stderr, so that stdout holds the answer alone; a program wants none of it.
    progress = for_terminal(sys.stderr, quiet=args.json)
    if request.model is not None:
        progress.note(request.model.sentence)
    result = run_search(request, progress, subject.to_measure)
    _show(result, args.json)
    return _exit_code(result)


def _show(result: SearchResult, as_json: bool) -> None:
    from ksopt.search import print_result, to_json

    if as_json:
        sys.stdout.write(to_json(result))
    else:
        print_result(result, sys.stdout)


def _exit_code(result: SearchResult) -> int:
    """Of a search that has reported: 1 where every trial failed, so that there is no answer."""
    if result.stopped == "interrupted":
        return 130
    trials = [trial for layer in result.layers for trial in layer.trials]
    if trials and not any(trial.state in ("complete", "pruned") for trial in trials):
        print("ksopt: no chain could be measured: every trial failed", file=sys.stderr)
        return 1
    return 0


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """What a request takes, besides what is searched and how many trials there are."""
    return {
        "budgets": tuple(args.budget or ()),
        "batch": args.batch,
        "dtype": args.dtype,
        "layout": args.layout,
        "device": args.device,
        "max_factors": args.factors,
        "timeout_s": args.timeout,
        "seed": args.seed,
        "storage": args.storage,
        "study": args.study,
        "workers": args.workers,
        "out": args.out,
        "min_rank": args.min_rank,
        "min_use": args.min_use,
        "weights": args.weights,
        "max_error": args.max_error,
        "max_params": args.max_params,
        "min_speedup": args.min_speedup,
        "objective": args.objective,
        "train": args.train,
        "score": args.score,
        "energy": args.energy,
        "structures": args.structures,
        "plugins": args.plugins,
        **constraint_arguments.options(args),
    }


def _replay(args: argparse.Namespace) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    unset = vars(parser.parse_args([]))
    free = ("replay", "out", "study", "plugins")
    others = [name for name in unset if name not in free and getattr(args, name) != unset[name]]
    if others:
        named = ", ".join("--" + name.replace("_", "-") for name in others)
        raise InvalidInputError(
            f"search --replay measures nothing, so {named} cannot be given with it: only --out, "
            "--study, --plugins and --json can"
        )
    from ksopt.search.saved_study import replay

    _show(replay(args.replay, args.study, args.out), args.json)
    return 0


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
