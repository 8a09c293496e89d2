"""What was lowered in a model, what was not, and why: as a table, Markdown and JSON.

Nothing in it is a weight's value, so it can be attached to a bug report.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

import torch
from torch import Tensor, fx, nn

from ksopt import settings
from ksopt.compile.graph_breaks import GraphBreak, graph_breaks
from ksopt.compile.lowering.benchmark import Times
from ksopt.compile.sites import Report, Site, Verdict
from ksopt.errors import KsoptError
from ksopt.report import document, tables
from ksopt.report.document import Fact, Section
from ksopt.report.tables import Table


class RequirementError(KsoptError, RuntimeError):
    """``options["require"]`` asks for more than was lowered; the message is the table."""


@dataclass(frozen=True)
class EndToEnd:
    """What one call of the model takes, microseconds.

    Args:
        inductor_us: compiled by Inductor alone.
        ksopt_us: compiled by the backend "ksopt".
    """

    inductor_us: float
    ksopt_us: float


@dataclass(frozen=True)
class Explanation:
    """What the backend does to a model.

    Args:
        report: its sites.
        end_to_end: times of the whole model, if they were asked for.
        graph_breaks: lines of the model that Dynamo could not follow.
    """

    report: Report
    end_to_end: EndToEnd | None = None
    graph_breaks: tuple[GraphBreak, ...] = ()

    @property
    def sites(self) -> tuple[Site, ...]:
        """All sites, in the order in which the model runs them."""
        return tuple(self.report.sites)

    def table(self) -> Table:
        """One row for each site, with all that is known of it."""
        return table_of(self.report)

    def overview(self) -> Table:
        """One numbered row for each site; `details` says the rest. It fits on a terminal."""
        rows = [
            (str(at), str(site.place), *_product(site), *_both_times(site), site.verdict.value)
            for at, site in enumerate(self.report.sites, 1)
        ]
        columns = (">", "where", "chain", ">rows", "dtype", ">predicted us", ">measured us",
                   "decision")  # fmt: skip
        return tables.of(columns, rows, "us: ksopt / Inductor")

    def details(self) -> str:
        """A numbered line for each site: how it is written, what follows it, and the reason."""
        digits = len(str(len(self.report.sites)))
        return "\n".join(
            f"{at:{digits}}  {', then '.join([site.spelling, *site.epilogue])}: {site.reason}"
            for at, site in enumerate(self.report.sites, 1)
        )

    def summary(self) -> str:
        """A few sentences."""
        return _summary(self)

    def markdown(self) -> str:
        """A section of a Markdown document."""
        return f"{self.summary()}\n\n{self.table().markdown()}\n"

    def _repr_html_(self) -> str:
        """Its numbers and its table in a notebook."""
        report, times = self.report, self.end_to_end
        lowered = f"{report.count(Verdict.LOWERED)} of {len(report.sites)}"
        facts = [
            Fact(lowered, "products lowered"),
            Fact(f"{100 * report.covered:.0f}%", "of the linear flops are in them"),
        ]
        if times is not None:
            both = f"{times.ksopt_us:.1f} us against {times.inductor_us:.1f} us"
            speed = f"{times.inductor_us / times.ksopt_us:.2f}x"
            facts.insert(0, Fact(speed, "as fast as Inductor alone", both))
        answer = Section("Explanation", tuple(self.summary().split("\n")), facts=tuple(facts))
        sites = Section("Sites", table=self.table(), is_folded=True)
        return document.fragment([answer, *([sites] if report.sites else [])])

    def to_json(self) -> dict[str, Any]:
        """The same as plain values."""
        report, times = self.report, self.end_to_end
        return {
            "sites": [site.to_json() for site in report.sites],
            "graphs": report.graphs,
            "linear_flops": report.linear_flops,
            "covered": report.covered,
            "pass_s": report.pass_s,
            "deciding_s": report.deciding_s,
            "notes": list(report.notes),
            "graph_breaks": [one.to_json() for one in self.graph_breaks],
            "passes": dict(report.passes),
            "end_to_end": None if times is None else vars(times),
        }

    def print(self, stream: TextIO | None = None) -> None:
        """Write the table and the summary, with colours and lines on a terminal."""
        if self.report.sites:
            tables.write(self.overview(), stream)
            print(self.details(), file=stream)
        print(self.summary(), file=stream)

    def __str__(self) -> str:
        rows = [self.overview().plain(), self.details()] if self.report.sites else []
        return "\n".join([*rows, self.summary()])


def explain(
    model: Callable[..., Any],
    *inputs: Any,
    tune: Any = None,
    dynamic: bool | None = None,
    timed: bool = False,
    **named: Any,
) -> Explanation:
    """Say what ``torch.compile(model, backend="ksopt")`` would lower, and why not the rest.

    The model runs once, uncompiled, on the inputs; its buffers and the random state are restored.

    Args:
        model: a module or function.
        *inputs: what to call it with; as many rows as it will see, because times depend on them.
        tune: as ``options["tune"]``.
        dynamic: as in torch.compile.
        timed: whether to compile the model both ways and time a call of each.
        **named: keyword arguments of the model.

    Returns:
        An `Explanation`: print it, or take ``.markdown()`` or ``.to_json()``.

    Raises:
        InvalidInputError: ``tune`` or ``KSOPT_TUNE`` is none of its values.

    Example:
        >>> from ksopt.nn import KSLinear
        >>> found = explain(KSLinear(8, 8, "(2,4,4,1)"), torch.ones(3, 8))
        >>> [(str(site.chain), site.verdict.value) for site in found.sites]
        [('(2,4,4,1)', 'lowered')]
    """
    from ksopt.compile.backend import judge
    from ksopt.compile.capture.frozen_weight import FrozenValues
    from ksopt.compile.lowering.decide import checked_tune
    from ksopt.compile.lowering.whole_layer import is_whole
    from ksopt.compile.passes import rewrite_graph

    total = Report()
    mode = checked_tune(tune)
    settings.tuning()  # refused here: inside the backend Dynamo would wrap the error

    def collect(gm: fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        values = FrozenValues(example_inputs)
        original = gm.forward
        decides, wholes = judge(example_inputs, mode), functools.partial(is_whole, tune=mode)
        total.add(rewrite_graph(gm, example_inputs, decides, values, is_whole=wholes))
        return original if values.found else gm.forward

    with _undone(model), graph_breaks() as breaks:
        torch.compile(model, backend=collect, dynamic=dynamic)(*inputs, **named)
    times = _end_to_end(model, inputs, named, mode, dynamic) if timed else None
    return Explanation(total, times, tuple(breaks))


def table_of(report: Report) -> Table:
    """One row for each site of a report."""
    columns = ("where", "written as", "chain", ">rows", "dtype", f">predicted us{_BOTH}",
               f">measured us{_BOTH}", "then", "decision", "reason")  # fmt: skip
    return tables.of(columns, [_row(site) for site in report.sites])


def check_requirement(report: Report, require: str | None) -> None:
    """Refuse a graph in which too little was lowered.

    Args:
        report: of one graph. A graph without any product by a weight is never refused.
        require: "all", "any" or None.

    Raises:
        RequirementError: not every site (all) or none (any) was lowered.
    """
    lowered = report.count(Verdict.LOWERED)
    if require == "all" and lowered < len(report.sites):
        missing = len(report.sites) - lowered
        problem = f"{missing} of {len(report.sites)} sites are not lowered"
    elif require and report.notes:
        problem = "a graph could not be followed"
    elif require == "any" and not lowered and report.linear_flops:
        problem = "nothing is lowered"
    else:
        return
    raise RequirementError(f"options['require'] is {require!r}, but {problem}:\n"
                           f"{Explanation(report)}")  # fmt: skip


_BOTH = " (ksopt / Inductor)"


def _row(site: Site) -> tuple[str, ...]:
    return (
        str(site.place),
        site.spelling,
        *_product(site),
        *_both_times(site),
        ", ".join(site.epilogue),
        site.verdict.value,
        site.reason,
    )


def _product(site: Site) -> tuple[str, str, str]:
    chain, batch = site.chain, site.batch
    return "" if chain is None else str(chain), "" if batch is None else str(batch), site.dtype


def _both_times(site: Site) -> tuple[str, str]:
    return _us(site.predicted), _us(site.measured)


def _us(times: Times | None) -> str:
    return "-" if times is None else f"{times.ksopt_us:.1f} / {times.unfused_us:.1f}"


def _summary(explanation: Explanation) -> str:
    report, times = explanation.report, explanation.end_to_end
    counts = ", ".join(f"{report.count(verdict)} {verdict.value}" for verdict in Verdict)
    graphs = "1 graph" if report.graphs == 1 else f"{report.graphs} graphs"
    lines = [
        f"{len(report.sites)} sites in {graphs}: {counts}. Lowered sites do "
        f"{100 * report.covered:.0f} % of the linear flops. "
        f"The pass took {1e3 * report.pass_s:.0f} ms{_deciding(report)}."
    ]
    lines += [f"Note: {note}." for note in report.notes]
    lines += [f"Note: {one}." for one in explanation.graph_breaks]
    if times is not None:
        lines.append(
            f"One call takes {times.inductor_us:.1f} us under Inductor alone and "
            f"{times.ksopt_us:.1f} us under ksopt."
        )
    return "\n".join(lines)


def _deciding(report: Report) -> str:
    spent = report.deciding_s
    return f", and deciding what is faster {spent:.1f} s" if spent >= 0.05 else ""


@contextmanager
def _undone(model: Callable[..., Any]) -> Iterator[None]:
    """Restore buffers and random state afterwards."""
    buffers: dict[str, Tensor] = {}
    if isinstance(model, nn.Module):
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        with torch.random.fork_rng():
            yield
    finally:
        if isinstance(model, nn.Module):
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    if not torch.equal(buffer, buffers[name]):
                        buffer.copy_(buffers[name])


def _end_to_end(
    model: Callable[..., Any],
    inputs: tuple[Any, ...],
    named: dict[str, Any],
    tune: Any,
    dynamic: bool | None,
) -> EndToEnd:
    from ksopt.compile.lowering.benchmark import medians_us

    device = next((value.device for value in inputs if isinstance(value, Tensor)), None)
    ours = torch.compile(model, backend="ksopt", dynamic=dynamic, options={"tune": tune})
    plain = torch.compile(model, backend="inductor", dynamic=dynamic)
    with _undone(model), torch.no_grad():
        found = medians_us(
            {
                "inductor": lambda: plain(*inputs, **named),
                "ksopt": lambda: ours(*inputs, **named),
            },
            device or torch.device("cpu"),
        )
    return EndToEnd(found["inductor"], found["ksopt"])
