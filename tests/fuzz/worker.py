"""One of the processes of `tests.fuzz.capture`: makes modules, compares, makes failing ones small.

Modules are compared in copies of this process (`tests.fuzz.isolation`), ten at a time; one that
differs is compared again alone.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

from .comparison import Outcome, compare
from .isolation import DiedError, apart
from .modules import program
from .program import Program, build
from .records import Tolerance
from .shrinking import shrink

_ROUGH = ("bfloat16", "float16", "autocast=True", '"cpu", torch')
_WITH_ZEROS = ("chain_to_dense(", "block_diag(", "kron(", "diag_embed(", "torch.zeros(")
_SECONDS = 120.0
"""For one comparison: no module takes a tenth of it, unless it hangs."""

_TOGETHER = 10
"""Modules that one process compares, where all goes well."""

_FIRST = """
import torch
from torch import nn
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 6, 8))
    def forward(self, x):
        y = torch.einsum("bgi,goi->bgo", x.view(-1, 4, 8), self.w)
        return torch.vmap(torch.nn.functional.linear, (1, 0), 1)(y, self.w.mT).flatten(1)
def inputs(B):
    return [torch.randn(B, 32)]
LEAVES, CALLS = [True], [dict(batch=5, mode="grad", autocast=False, before=[])] * 2
DYNAMIC, TRAINING = True, True
"""


def be_quiet() -> None:
    """Suppress torch's warnings: they are part of the comparison, or irrelevant."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)


def compared(source: str, name: str) -> Outcome:
    """The outcome of a program's source."""
    namespace = build(source, name).namespace
    try:
        return compare(
            lambda function: apart(function, _SECONDS),
            namespace,
            _tolerance(source),
        )
    except DiedError as error:
        return Outcome([f"call 0: died: {error}"])


def _tolerance(source: str) -> Tolerance:
    return Tolerance(
        rough=any(word in source for word in _ROUGH),
        skips_zeros=any(word in source for word in _WITH_ZEROS),
    )


def _outcome(generated: Program) -> Outcome:
    try:
        return compared(generated.source(), f"<module of seed {generated.seed}>")
    except SyntaxError:  # it was cut too short
        return Outcome()


def _batch(seeds: list[int], handover: str, end: float) -> list[tuple[int, Program, Outcome]]:
    """Compare modules in order, up to the first that differs; each starts from the last's state."""
    done: list[tuple[int, Program, Outcome]] = []
    for seed in seeds:
        if done and time.monotonic() > end:
            break
        generated = program(seed, handover)
        source = generated.source()
        namespace = build(source, f"<module of seed {seed}>").namespace
        outcome = compare(lambda function: function(), namespace, _tolerance(source))
        done.append((seed, generated, outcome))
        if outcome.differences:
            break
    return done


def results(
    seeds: list[int], handover: str, end: float, shrink_seconds: float
) -> Iterator[dict[str, Any]]:
    """What became of the programs of some seeds, as JSON takes it, until it is too late."""
    while seeds and time.monotonic() < end:
        now = seeds[:_TOGETHER]
        try:
            done = apart(lambda now=now: _batch(now, handover, end), _SECONDS)
        except DiedError:
            now = now[:1]
            generated = program(now[0], handover)
            done = [(now[0], generated, _outcome(generated))]
        for seed, generated, outcome in done:
            result = _counted(generated, outcome)
            if outcome.differences:
                differing, outcome = outcome.differences, _outcome(generated)  # alone
                if outcome.differences:
                    left = max(5.0, end + 20 - time.monotonic())
                    result["failure"] = _described(generated, outcome, min(shrink_seconds, left))
                elif not _differs_by_itself(seed, handover):
                    result["failure"] = (
                        f"\n# Seed {seed}, after those from {now[0]} in one process:\n#   "
                        + "\n#   ".join(differing)
                    )
            yield result
            seeds = seeds[1:]


def _differs_by_itself(seed: int, handover: str) -> bool:
    """Whether a module differs that comes first in its process.

    If it does not where each of its runs has a process, torch.compile left something behind: it
    may compile no more what it has failed to compile once.
    """
    try:
        ((_, _, outcome),) = apart(lambda: _batch([seed], handover, math.inf), _SECONDS)
    except DiedError:
        return False
    return bool(outcome.differences)


def _counted(generated: Program, outcome: Outcome) -> dict[str, Any]:
    names = generated.spellings()
    return {
        "modules": 1,
        "lowered": bool(outcome.lowered),
        "torchs": bool(outcome.torchs),
        "quick": outcome.quick,
        "errors": outcome.failed,
        "spellings": Counter(names.get(line, "elsewhere") for line in outcome.lowered),
        "notes": Counter(note.partition(": ")[2][:120] for note in outcome.notes),
        "missed": outcome.missed,
    }


def _described(generated: Program, outcome: Outcome, shrink_seconds: float) -> str:
    """A failing program, minimized, and its difference."""
    kind = _kinds(outcome.differences)[0]
    small = shrink(generated, lambda p: kind in _kinds(_outcome(p).differences), shrink_seconds)
    outcome = _outcome(small)
    lines = [f"\n# Seed {generated.seed}:"]
    lines += [f"#   {text}".replace("\n", "\n#   ") for text in outcome.differences[:8]]
    lines += [f"#   torch.compile itself: {text}" for text in outcome.torchs[:4]]
    return "\n".join([*lines, small.source()])


def _kinds(differences: list[str]) -> list[str]:
    """What differs, without numbers: "call 0: value out1: off by ..." is "value"."""
    return [text.split(": ")[1].split(" ")[0] for text in differences]


def main() -> int:
    """Go through the modules that the command wants, and write a line of JSON about each."""
    settings = json.loads(sys.argv[1])
    be_quiet()
    program(0)
    for handover in ("eager", "aot_eager"):  # loaded once here, not by each copy
        first = build(f"{_FIRST}\nHANDOVER = {handover!r}", "<first>")
        compare(lambda function: function(), first.namespace, Tolerance())
    gc.collect()
    gc.freeze()
    seeds = list(range(settings["first"], settings["last"], settings["workers"]))
    for result in results(seeds, settings["handover"], settings["end"], settings["shrink_seconds"]):
        print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
