"""The first screen of a report, and its plot, of made-up times."""

import re
from collections.abc import Callable
from dataclasses import replace

from ksopt.measure.timing import Measurement
from ksopt.search import SearchResult
from ksopt.search.report import headline, plots
from ksopt.search.results import LayerResult, Verdict

from one_layer import with_layer  # isort: skip

Search = Callable[..., SearchResult]


def exact(us: float) -> Measurement:
    return Measurement(us, 0.99 * us, 1.01 * us, 20)


def with_times(result: SearchResult, times: list[float]) -> LayerResult:
    """The layer, as if the chains of its budgets had taken so long, and the dense one 100 us."""
    (layer,) = result.layers
    answers = []
    for answer, us in zip(layer.recommendations, times, strict=True):
        assert answer.chosen is not None
        timed = replace(answer.chosen, latency=exact(us), dense=exact(100.0), retimed=True)
        answers.append(replace(answer, verdict=Verdict.USE, chosen=timed))
    return with_layer(result, recommendations=tuple(answers)).layers[0]


def test_a_smaller_budget_that_is_faster_than_what_is_used_is_named(search: Search) -> None:
    result = search(budgets=("30%", "60%"), trials=6)
    section = headline.of_layer(with_times(result, [25.0, 50.0]))
    assert (
        "The chain of 30% is faster, 4.00x against 2.00x, and has fewer weights" in section.lead[1]
    )
    section = headline.of_layer(with_times(result, [50.0, 50.0]))
    assert "is faster" not in section.lead[1]


def test_what_cannot_be_judged_has_no_speedup(search: Search) -> None:
    result = search(trials=3)
    (answer,) = result.layers[0].recommendations
    unjudged = replace(answer, verdict=Verdict.UNJUDGED, chosen=None)
    section = headline.of_layer(with_layer(result, recommendations=(unjudged,)).layers[0])
    assert section.facts == ()
    assert "held back the dense layer" in section.lead[1]
    assert section.table is not None
    assert [row[:4] for row in section.table.rows] == [("50%", "", "cannot be judged", "")]


def test_a_few_slow_chains_do_not_squash_the_plot(search: Search) -> None:
    layer = with_times(search(trials=3), [50.0])
    trials = [replace(one, latency=exact(50.0), dense=exact(100.0)) for one in layer.trials]
    finalists = tuple(one.chosen for one in layer.recommendations if one.chosen is not None)
    calm = replace(layer, trials=tuple(trials), finalists=finalists)
    assert plots.beyond(calm) == ""
    slow = replace(trials[0], latency=exact(1e6))
    squashed = replace(calm, trials=(slow, *trials[1:]))
    assert plots._latency_scale(squashed).high < 500.0  # us; the dense layer takes 100
    assert "1 chain takes more than 400 us" in plots.beyond(squashed)


def test_finalists_stand_where_the_final_timed_them(search: Search) -> None:
    """One that was luckier in its trial than what the final chose does not lie below it."""
    layer = with_times(search(trials=3), [50.0])
    trials = [replace(one, latency=exact(20.0), dense=exact(100.0)) for one in layer.trials]
    answer = layer.recommendations[0]
    assert answer.chosen is not None
    others = [one for one in trials if one.number != answer.chosen.trial]
    slower = [replace(answer.chosen, latency=exact(80.0), trial=one.number) for one in others]
    layer = replace(layer, trials=tuple(trials), finalists=(answer.chosen, *slower))
    drawn = plots.latency_plot(layer, answer, *plots.WIDE)
    (ring,) = re.findall(r'class="chosen" cx="[^"]+" cy="([^"]+)"', drawn)
    heights = [float(y) for y in re.findall(r'class="point" cx="[^"]+" cy="([^"]+)"', drawn)]
    assert max(heights) == float(ring)  # the lowest on the page
    assert "50.0 us" in drawn
    assert "20.0 us" not in drawn
