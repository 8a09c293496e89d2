"""Explanation of a model: its speedup, the sites that were lowered, the others, and why.

It contains no weight's value, so it can be attached to a bug report.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

import torch
from torch import fx, nn

from ksopt import settings
from ksopt.compile.end_to_end import EndToEnd, measured, restored
from ksopt.compile.graph_breaks import GraphBreak, graph_breaks
from ksopt.compile.lowering.site_times import Times
from ksopt.compile.sites import LaunchTimes, Report, Site, Verdict
from ksopt.errors import KsoptError
from ksopt.report import document, tables
from ksopt.report.document import Fact, Section
from ksopt.report.tables import Table
from ksopt.system.plurals import counted


class RequirementError(KsoptError, RuntimeError):
    """``options["require"]`` asks for more than was lowered; the message is the table."""


@dataclass(frozen=True)
class Explanation:
    """Effect of the backend on a model.

    Args:
        report: its sites.
        end_to_end: times of the whole model, if requested.
        graph_breaks: lines of the model that Dynamo could not follow.
        dense_layers: number of ``nn.Linear`` in the model.
    """

    report: Report
    end_to_end: EndToEnd | None = None
    graph_breaks: tuple[GraphBreak, ...] = ()
    dense_layers: int = 0

    @property
    def sites(self) -> tuple[Site, ...]:
        """All sites, in the order in which the model runs them."""
        return tuple(self.report.sites)

    def table(self) -> Table:
        """One row for each site, with all its data."""
        return table_of(self.report)

    def overview(self) -> Table:
        """One numbered row for each site, narrow enough for a terminal; `details` has the rest."""
        rows = [
            (str(at), str(site.place), *_product(site), *_both_times(site), site.verdict.value)
            for at, site in enumerate(self.report.sites, 1)
        ]
        columns = (">", "where", "chain", ">rows", "dtype", ">predicted us", ">measured us",
                   "decision")  # fmt: skip
        return tables.of(columns, rows, "us of the products: ksopt / Inductor")

    def details(self) -> str:
        """A numbered line for each site: how it is written, what follows it, and the reason.

        The time of one launch for all of a site follows the reason.
        """
        digits = len(str(len(self.report.sites)))
        return "\n".join(
            f"{at:{digits}}  {', then '.join([site.spelling, *site.epilogue])}: {site.reason}"
            f"{_all_of_it(site)}"
            for at, site in enumerate(self.report.sites, 1)
        )

    def answer(self) -> str:
        """Sentence on the speedup of the model."""
        return _answer(self)

    def summary(self) -> str:
        """The answer, its evidence, and the obstacles, a line each."""
        return "\n".join([self.answer(), *_evidence(self)])

    def markdown(self) -> str:
        """A section of a Markdown document."""
        return f"{self.summary()}\n\n{self.table().markdown()}\n"

    def _repr_html_(self) -> str:
        """Facts and table for a notebook."""
        report, times = self.report, self.end_to_end
        lowered = f"{report.count(Verdict.LOWERED)} of {len(report.sites)}"
        facts = [
            Fact(lowered, "products lowered"),
            Fact(f"{100 * report.covered:.0f}%", "of the linear flops are in them"),
        ]
        if times is not None:
            both = f"{times.ksopt.median_us:.1f} us against {times.inductor.median_us:.1f} us"
            facts.insert(0, Fact(f"{times.speedup:.2f}x", "speedup over Inductor alone", both))
        answer = Section("Explanation", tuple(self.summary().split("\n")), facts=tuple(facts))
        sites = Section("Sites", table=self.table(), is_folded=True)
        return document.fragment([answer, *([sites] if report.sites else [])])

    def to_json(self) -> dict[str, Any]:
        """The explanation as JSON values."""
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
            "dense_layers": self.dense_layers,
            "passes": dict(report.passes),
            "end_to_end": None if times is None else times.to_json(),
        }

    def print(self, stream: TextIO | None = None) -> None:
        """Write the summary and the table, with colours and lines on a terminal."""
        print(self.summary(), file=stream)
        if self.report.sites:
            print(file=stream)
            tables.write(self.overview(), stream)
            print(self.details(), file=stream)

    def __str__(self) -> str:
        rows = ["", self.overview().plain(), self.details()] if self.report.sites else []
        return "\n".join([self.summary(), *rows])


def explain(
    model: Callable[..., Any],
    *inputs: Any,
    tune: Any = None,
    dynamic: bool | None = None,
    timed: bool = False,
    **named: Any,
) -> Explanation:
    """Explain the effect and the limits of ``torch.compile(model, backend="ksopt")`` on a model.

    The model runs once, uncompiled, on the inputs; its buffers and the random state are restored.

    Args:
        model: a module or function.
        *inputs: what to call it with; as many rows as it will see, because times depend on them.
        tune: as ``options["tune"]``.
        dynamic: as in torch.compile.
        timed: whether to compile the model both ways and time a call of each. Where nothing would
            be lowered, both are the same and nothing is timed.
        **named: keyword arguments of the model.

    Returns:
        An `Explanation`: print it, or take ``.markdown()`` or ``.to_json()``.

    Raises:
        InvalidInputError: ``tune`` or ``KSOPT_TUNE`` is none of its values.

    Example:
        >>> from ksopt.nn import KSLinear
        >>> explanation = explain(KSLinear(8, 8, "(2,4,4,1)"), torch.ones(3, 8))
        >>> [(str(site.chain), site.verdict.value) for site in explanation.sites]
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
        return original if values.patterns else gm.forward

    with restored(model), graph_breaks() as breaks:
        torch.compile(model, backend=collect, dynamic=dynamic)(*inputs, **named)
    times = None
    if timed and total.count(Verdict.LOWERED):
        try:
            times = measured(model, inputs, named, mode, dynamic)
        except Exception as error:  # no compiler, no memory: the rest is an answer all the same
            why = next(iter(str(error).strip().splitlines()), "").rstrip(".")
            total.notes.append(f"the model could not be timed: {type(error).__name__}: {why}")
    modules = model.modules() if isinstance(model, nn.Module) else ()
    dense_layers = sum(isinstance(module, nn.Linear) for module in modules)
    return Explanation(total, times, tuple(breaks), dense_layers)


def table_of(report: Report) -> Table:
    """One row for each site of a report."""
    columns = ("where", "written as", "chain", ">rows", "dtype", f">predicted us{_BOTH}",
               f">measured us{_BOTH}", ">all of it, us", "then", "decision", "reason")  # fmt: skip
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
        are = "is" if missing == 1 else "are"
        problem = f"{missing} of {counted(len(report.sites), 'site')} {are} not lowered"
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
        _launch_us(site.launch_times),
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


def _launch_us(times: LaunchTimes | None) -> str:
    if times is not None and times.measured_us is not None:
        return f"{times.measured_us:.1f} measured"
    if times is not None and times.predicted_us is not None:
        return f"{times.predicted_us:.1f} predicted"
    return "-"


def _all_of_it(site: Site) -> str:
    us = _launch_us(site.launch_times)
    return "" if us == "-" else f" All of it, us: {us}."


def _answer(explanation: Explanation) -> str:
    report, times = explanation.report, explanation.end_to_end
    if times is not None:
        return times.sentence
    if not report.count(Verdict.LOWERED):
        return "With ksopt the model is as fast as under Inductor alone: nothing in it is lowered."
    return (
        "Not timed: ksopt.explain with timed=True, or the command without --no-time, says how much "
        "faster the model is."
    )


def _evidence(explanation: Explanation) -> list[str]:
    report = explanation.report
    graphs = counted(report.graphs, "graph")
    if report.sites:
        counts = ", ".join(f"{report.count(verdict)} {verdict.value}" for verdict in Verdict)
        lines = [
            f"{counted(len(report.sites), 'site')} in {graphs}: {counts}. Lowered sites do "
            f"{100 * report.covered:.0f} % of the linear flops. "
            f"The pass took {1e3 * report.pass_s:.0f} ms{_deciding(report)}."
        ]
    else:
        lines = [f"No product in {graphs} is Kronecker-sparse."]
        if explanation.dense_layers:
            lines[0] += (
                f" The model has {counted(explanation.dense_layers, 'dense linear layer')}: "
                "ksopt search --model, or ksopt.optimize, finds out whether chains in their place "
                "are faster."
            )
    lines += [f"Note: {note}." for note in report.notes]
    return lines + [f"Note: {one}." for one in explanation.graph_breaks]


def _deciding(report: Report) -> str:
    spent = report.deciding_s
    return f", and deciding what is faster {spent:.1f} s" if spent >= 0.05 else ""
