"""Sites: places where a model multiplies by Kronecker-sparse weights, and their verdicts.

Everything here is plain data without any weight value, safe to print, store and send.
"""

from __future__ import annotations

import enum
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

import ksopt as package
from ksopt.patterns.chain import Chain

if TYPE_CHECKING:
    from ksopt.compile.lowering.site_times import Times

_LIBRARY_PATHS = (
    str(Path(torch.__file__).parent),
    str(Path(package.__file__).parent),
    f"{os.sep}einops{os.sep}",
)
"""Libraries that a line of the author's code calls to multiply."""
_ROOT = re.compile(r"^L\['\w+'\]")
_ITEM = re.compile(r"(?:\._modules)?\['?(\w+)'?\]")


class Verdict(enum.Enum):
    """Outcome of a site; the value is its printed form."""

    LOWERED = "lowered"
    NOT_LOWERED = "left to PyTorch"
    NOT_RECOGNISED = "not recognised"

    @property
    def key(self) -> str:
        """Its name as a key of counters and columns."""
        return self.name.lower()


@dataclass(frozen=True)
class Place:
    """A place in the author's code.

    Args:
        file: its path, as Python knows it; empty if unknown.
        line: its number, from 1.
        code: the line's text; where the file is unknown, the module's path in the model.
    """

    file: str = ""
    line: int = 0
    code: str = ""

    def __str__(self) -> str:
        if self.file:
            return f"{Path(self.file).name}:{self.line}"
        return self.code or "(unknown)"


@dataclass(frozen=True)
class Decision:
    """Whether a site is lowered, and why.

    Args:
        lower: whether it is.
        reason: a sentence.
        predicted: by the cost models; None where there are none, as on a CPU.
        measured: on the device; None if it was not.
    """

    lower: bool
    reason: str
    predicted: Times | None = None
    measured: Times | None = None


@dataclass(frozen=True)
class LaunchTimes:
    """Microseconds of a launch, with all that it computes beside the products.

    Args:
        predicted_us: by the cost models; None where there is no prediction.
        measured_us: by the race of the plans on the device; None if it was not measured.
    """

    predicted_us: float | None = None
    measured_us: float | None = None


@dataclass(frozen=True)
class Site:
    """One chain of factors in a model.

    Args:
        node: name of the graph's node that computes its result.
        place: its place in the author's code.
        spelling: the functions that the author called.
        verdict: its outcome.
        reason: why, a sentence.
        chain: its factors, left to right; None if they are unknown.
        batch: rows that it multiplies, of the current batch where that is dynamic.
        dtype: of its tensors, torch's name.
        epilogue: the steps behind it that a launch could compute with it, bias, an activation,
            residual; none where the graph must write in place.
        flops: of its product.
        fused: sides on which Inductor would fuse its copies with other work: "before", "behind".
        training: whether its weights are trained, so that it is judged with its gradients.
        to_input: whether its weights are frozen and gradients go through it to its input, so that
            it is judged with that one.
        computed: whether its weights, not trained, are computed at each call, so that it is judged
            with preparing them; stored ones are prepared once.
        predicted, measured: see `Decision`. They are of the products alone.
        one_launch: the epilogue of the launch that computes the chain: "bias", an activation,
            "residual"; None where there are several launches.
        launch_times: of that launch: of the chain, the epilogue, and the layers that it computes
            beside it; where the weights are trained, of the forward pass.
    """

    node: str
    place: Place
    spelling: str
    verdict: Verdict
    reason: str
    chain: Chain | None = None
    batch: int | None = None
    dtype: str = ""
    epilogue: tuple[str, ...] = ()
    flops: int = 0
    fused: tuple[str, ...] = ()
    training: bool = False
    to_input: bool = False
    computed: bool = False
    predicted: Times | None = None
    measured: Times | None = None
    one_launch: tuple[str, ...] | None = None
    launch_times: LaunchTimes | None = None

    def decided(self, decision: Decision) -> Site:
        """This site with a decision."""
        return replace(
            self,
            verdict=Verdict.LOWERED if decision.lower else Verdict.NOT_LOWERED,
            reason=decision.reason,
            predicted=decision.predicted,
            measured=decision.measured,
        )

    def to_json(self) -> dict[str, Any]:
        """The site as JSON values."""
        return {
            **asdict(self),
            "place": asdict(self.place),
            "verdict": self.verdict.value,
            "chain": None if self.chain is None else str(self.chain),
            "epilogue": list(self.epilogue),
            "fused": list(self.fused),
            "one_launch": None if self.one_launch is None else list(self.one_launch),
        }


@dataclass
class Report:
    """Report of the pass on one or more graphs.

    Args:
        sites: in the order of the graphs.
        graphs: number of processed graphs.
        linear_flops: of all products by weights, dense ones included.
        pass_s: duration of the pass in seconds, without decisions.
        deciding_s: time that it took to decide whether sites are faster; measurements are stored on
            disk, so most of it is spent once on a machine.
        notes: sentences about graphs that could not be followed.
        passes: counters of each part of the pass; docs/backend.md lists the names.
    """

    sites: list[Site] = field(default_factory=list)
    graphs: int = 0
    linear_flops: int = 0
    pass_s: float = 0.0
    deciding_s: float = 0.0
    notes: list[str] = field(default_factory=list)
    passes: Counter[str] = field(default_factory=Counter)

    def add(self, other: Report) -> None:
        """Add the report on other graphs."""
        self.sites += other.sites
        self.graphs += other.graphs
        self.linear_flops += other.linear_flops
        self.pass_s += other.pass_s
        self.deciding_s += other.deciding_s
        self.notes += other.notes
        self.passes.update(other.passes)

    def count(self, verdict: Verdict) -> int:
        """Number of sites with a verdict."""
        return sum(site.verdict is verdict for site in self.sites)

    @property
    def covered(self) -> float:
        """Share of the linear flops that are in lowered sites, from 0 to 1."""
        lowered = sum(site.flops for site in self.sites if site.verdict is Verdict.LOWERED)
        return lowered / self.linear_flops if self.linear_flops else 0.0


def is_author_code(file: str) -> bool:
    """Whether a file belongs to the model's author, and not to a library."""
    return not any(library in file for library in _LIBRARY_PATHS)


def place_of(node: fx.Node) -> Place:
    """The innermost line of the author's code, torch's own files skipped."""
    lines = (node.meta.get("stack_trace") or "").splitlines()
    place = Place()
    for at, line in enumerate(lines):
        text = line.strip()
        if not text.startswith('File "'):
            continue
        file, _, rest = text.removeprefix('File "').partition('", line ')
        number = rest.partition(",")[0]
        if not is_author_code(file) or not number.isdigit():
            continue
        code = lines[at + 1].strip() if at + 1 < len(lines) else ""
        place = Place(file, int(number), code)
    return place if place.file else Place(code=_module_of(node))


def _module_of(node: fx.Node) -> str:
    """The module that a node belongs to, for code of torch's own that no line of theirs calls.

    Dynamo names it by a Python expression, such as ``L['self']._modules['blocks'][0].mlp``.
    """
    stack = node.meta.get("nn_module_stack") or {}
    path = [str(entry[0]) for entry in stack.values()][-1:]
    names = _ITEM.sub(r".\1", _ROOT.sub("", path[0])) if path else ""
    return names.lstrip(".")


def spelling_of(nodes: Iterable[fx.Node]) -> str:
    """The functions that nodes call, each once, joined."""
    names: dict[str, None] = {}
    for node in nodes:
        name = node.target if isinstance(node.target, str) else _function_name(node.target)
        names[name] = None
    return " + ".join(names)


def _function_name(target: Any) -> str:
    name = getattr(target, "_name", None) or getattr(target, "__name__", str(target))
    return str(name).split("::")[-1].split(".")[0]
