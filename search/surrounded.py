"""The best chains of a layer in its usual surroundings: their record, and the answer.

A layer of a model is seldom alone: an activation follows, or q, k and v read one input, and one
launch computes all of it. A chain that loses alone may win there, against a dense layer with the
same. `ksopt.search.surrounded_finals` measures it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ksopt.measure.roofline import Roofline
from ksopt.measure.timing import Measurement
from ksopt.patterns.surroundings import Surroundings
from ksopt.search import recommend
from ksopt.search.layer_request import LayerRequest
from ksopt.search.metrics import WEIGHT_ERROR
from ksopt.search.objectives import DENSE
from ksopt.search.report import phrases
from ksopt.search.results import (
    Finalist,
    LayerResult,
    Recommendation,
    SurroundedResult,
    TrialRecord,
    Verdict,
)
from ksopt.search.samplers.priors import facts
from ksopt.search.space.space import Space

_USES = {"gelu": "an activation follows", "residual": "a residual is added"}


@dataclass(frozen=True)
class SurroundedTimes:
    """Times of a final in some surroundings.

    Args:
        around: The surroundings.
        times: By the chain's text, and under "dense"; of all siblings. Empty if nothing was timed.
        reason: Why nothing was timed; empty if something was.
        left_out: Chains that were not timed beside others, each with its reason.
    """

    around: Surroundings
    times: Mapping[str, Measurement] = field(default_factory=dict)
    reason: str = ""
    left_out: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The times as JSON values, see `from_json`."""
        times = {name: asdict(one) for name, one in self.times.items()}
        left_out = list(self.left_out)
        words = {"times": times, "reason": self.reason, "left_out": left_out}
        return {**self.around.to_json(), **words}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SurroundedTimes:
        """The inverse of `to_json`."""
        times = {name: Measurement(**one) for name, one in value["times"].items()}
        left_out = tuple(value.get("left_out", ()))
        return cls(Surroundings.from_json(value), times, value["reason"], left_out)


def results(
    surrounded: Sequence[SurroundedTimes],
    request: LayerRequest,
    space: Space,
    trials: Sequence[TrialRecord],
    roofline: Roofline,
) -> tuple[SurroundedResult, ...]:
    """Results of the finals in other surroundings.

    Args:
        surrounded: The times.
        request: Of the layer, with its batch resolved.
        space: Its space, for the steps.
        trials: The admitted trials. Each chain of the finals was measured in one, and not all of
            them are finalists.
        roofline: Of the device.
    """
    return tuple(_result(one, request, space, trials, roofline) for one in surrounded)


def _result(
    one: SurroundedTimes,
    request: LayerRequest,
    space: Space,
    trials: Sequence[TrialRecord],
    roofline: Roofline,
) -> SurroundedResult:
    measured = {str(trial.facts.chain): trial for trial in trials if trial.ratio is not None}
    standing = [
        _finalist(trial, one, request, roofline)
        for text, trial in measured.items()
        if text in one.times
    ]
    standing.sort(key=lambda finalist: finalist.latency.median_us)
    answers = recommend.recommend(space, standing, request.max_error, request.min_speedup)
    judged = tuple(answer for answer in answers if answer.chosen is not None)
    return SurroundedResult(one.around, tuple(standing), judged, one.reason)


def _finalist(
    trial: TrialRecord, one: SurroundedTimes, request: LayerRequest, roofline: Roofline
) -> Finalist:
    """A chain with its times there; of its trial's metrics only what no time depends on."""
    chain = trial.facts.chain
    assert request.batch is not None
    values = {name: value for name, value in trial.values.items() if name == WEIGHT_ERROR.name}
    return Finalist(
        facts(chain, roofline, request.batch, siblings=one.around.siblings),
        one.times[str(chain)],
        one.times[DENSE],
        trial.number,
        trial.origin,
        retimed=True,
        values=values,
    )


def with_sentences(
    answers: Sequence[Recommendation],
    standing: Sequence[Finalist],
    trials: Sequence[TrialRecord],
    surrounded: Sequence[SurroundedResult],
) -> tuple[Recommendation, ...]:
    """A layer's answers, each with sentences on the surroundings in which its step has a winner.

    Args:
        answers: Of the layer alone.
        standing: Its finalists.
        trials: Its trials.
        surrounded: The results in other surroundings.
    """
    longer = []
    for answer in answers:
        won = [
            (one.around, there)
            for one in surrounded
            for there in one.recommendations
            if there.budget == answer.budget and is_won(there)
        ]
        texts = _sentences(won, _ratios_alone(standing, trials))
        longer.append(replace(answer, sentence=" ".join([answer.sentence, *texts])))
    return tuple(longer)


def is_won(answer: Recommendation) -> bool:
    """Whether an answer recommends its chain."""
    return answer.verdict is Verdict.USE and answer.chosen is not None


def winners(layer: LayerResult) -> tuple[tuple[Surroundings, Recommendation], ...]:
    """The surroundings in which a chain is worth using, with the step of the largest budget there.

    Empty where a chain wins alone: it then holds everywhere.
    """
    if any(map(is_won, layer.recommendations)):
        return ()
    best = []
    for one in layer.surrounded:
        won = [answer for answer in one.recommendations if is_won(answer)]
        if won:
            best.append((one.around, max(won, key=lambda answer: answer.budget.parameters)))
    return tuple(best)


def judged(layer: LayerResult) -> list[str]:
    """Sentences on the surroundings in which a layer was timed too: where a chain wins, or not."""
    won = winners(layer)
    sentences = _sentences(won, _ratios_alone(layer.finalists, layer.trials))
    lost = [
        f"{placed(one.around)} ({1 / min(finalist.ratio for finalist in one.finalists):.2f}x)"
        for one in layer.surrounded
        if one.finalists and one.around not in [around for around, _ in won]
    ]
    if lost:
        nor = "It was also timed" if sentences else "Nor is a chain worth using"
        tail = ": there no chain is worth using" if sentences else ""
        sentences.append(f"{nor} {'; '.join(lost)}{tail}.")
    unmeasured = [one for one in layer.surrounded if one.reason]
    sentences += [f"It was not timed {placed(one.around)}: {one.reason}." for one in unmeasured]
    return sentences


def _ratios_alone(standing: Sequence[Finalist], trials: Sequence[TrialRecord]) -> dict[str, float]:
    """Latency alone over dense by the chain's text: of the final, of others that of their trial."""
    ratios = {str(one.facts.chain): one.ratio for one in trials if one.ratio is not None}
    return ratios | {str(one.facts.chain): one.ratio for one in standing}


def _sentences(
    won: Sequence[tuple[Surroundings, Recommendation]], ratios_alone: Mapping[str, float]
) -> list[str]:
    """What each chain is good for in the surroundings in which it wins, beside its time alone."""
    by_chain: dict[str, list[tuple[Surroundings, Finalist]]] = {}
    for around, answer in won:
        assert answer.chosen is not None
        by_chain.setdefault(str(answer.chosen.facts.chain), []).append((around, answer.chosen))
    sentences = []
    for chain, places in by_chain.items():
        uses = [
            f"{placed(around)}, {phrases.times(there.ratio)} {_dense(around)}: {use(around)}"
            for around, there in places
        ]
        text = "; ".join([f"Alone, {chain} is {phrases.times(ratios_alone[chain])} dense", *uses])
        sentences.append(f"{text}.")
    return sentences


def use(around: Surroundings) -> str:
    """What to do with a chain that wins in some surroundings.

    Example:
        >>> use(Surroundings(("bias",), siblings=3)), use(Surroundings(("bias", "gelu")))
        ('use it for q, k and v', 'use it where an activation follows')
    """
    if around.siblings == 3:
        return "use it for q, k and v"
    if around.siblings > 1:
        return f"use it for {around.siblings} layers that read one input"
    where = [_USES[step] for step in around.epilogue if step in _USES]
    return f"use it where {where[-1] if where else 'layers are so'}"


def placed(around: Surroundings) -> str:
    """Surroundings as an adverbial phrase.

    Example:
        >>> placed(Surroundings(("bias",), siblings=3))
        'as 3 on one input, followed by a bias'
    """
    return f"as {around}" if around.siblings > 1 else str(around)


def _dense(around: Surroundings) -> str:
    """The dense layer of the comparison."""
    if around.siblings > 1:
        return f"one dense layer of {around.siblings} times the outputs"
    return "the dense layer with the same"
