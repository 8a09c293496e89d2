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


def test_times_that_spread_widely_settle_nothing(search: Search) -> None:
    result = search(trials=6)
    layer = with_times(result, [20.0])
    (answer,) = layer.recommendations
    assert answer.chosen is not None
    other = replace(answer.chosen, latency=exact(60.0))
    calm = replace(layer, recommendations=(replace(answer, ties=(other,)),))
    section = headline.of_layer(calm)
    assert section.lead[0].startswith("Use ")
    assert "1 other is as fast within noise" in section.lead[1]
    assert section.facts[0].value == "5.00x"

    chosen = replace(answer.chosen, latency=Measurement(20.0, 18.0, 61.0, 20))
    noisy = replace(answer, chosen=chosen, ties=(other,))
    section = headline.of_layer(replace(layer, recommendations=(noisy,)))
    assert section.lead[0].startswith("Measure again: ")
    assert "too widely to tell 1 other from it" in section.lead[1]
    assert "as fast" not in section.lead[1]
    assert section.facts[0].value == "1.6x to 5.6x"
    assert section.facts[-1].value == "doubtful"
    assert section.table is not None
    assert [row[1:3] for row in section.table.rows] == [("1.6x to 5.6x", "measure again")]


def test_the_caption_names_what_is_drawn(search: Search) -> None:
    layer = with_times(search(trials=6), [50.0])
    shapes = {len(one.facts.chain) for one in layer.trials if one.ratio is not None}
    caption = headline.of_layer(layer).paragraphs[-1]
    assert ("triangles" in caption) == (3 in shapes and len(shapes) > 1)
    assert "The ring is the fastest." in caption
    alike = [one for one in layer.trials if len(one.facts.chain) == 2]
    caption = headline.of_layer(replace(layer, trials=tuple(alike))).paragraphs[-1]
    assert "circles" not in caption
    given_up = replace(layer.trials[0], state="pruned", latency=None)
    caption = headline.of_layer(replace(layer, trials=(*alike, given_up))).paragraphs[-1]
    assert "1 chain given up early is not drawn" in caption


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
