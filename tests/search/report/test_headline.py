"""The first screen of a report, and its plot, with invented times."""

import html
import json
import re
from collections.abc import Callable
from dataclasses import replace

from ksopt.measure.timing import Measurement
from ksopt.search import SearchResult
from ksopt.search.report import (
    headline,
    layer_sections,
    page,
    phrases,
    plots,
    result_tables,
    results_json,
    sections,
)
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
    pruned = replace(layer.trials[0], state="pruned", latency=None)
    caption = headline.of_layer(replace(layer, trials=(*alike, pruned))).paragraphs[-1]
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


def test_a_layer_that_stays_dense_on_a_gpu_may_not_where_it_is_not_alone(search: Search) -> None:
    result = search(trials=3)
    (answer,) = result.layers[0].recommendations
    dense = replace(answer, verdict=Verdict.KEEP_DENSE, chosen=None)
    layer = with_layer(result, recommendations=(dense,)).layers[0]
    on_a_gpu = replace(layer, device=replace(layer.device, type="cuda"))
    assert "--siblings" not in headline.of_layer(layer).lead[1]
    assert "--siblings 3" in headline.of_layer(on_a_gpu).lead[1]
    several = replace(on_a_gpu, request=replace(on_a_gpu.request, siblings=3))
    assert "--siblings" not in headline.of_layer(several).lead[1]


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
    """A chain that was luckier in its trial than the chosen finalist is not below it."""
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


def test_the_plot_and_the_tables_say_the_same_latency(search: Search) -> None:
    """Also where the clocks were others before the final: there all times are twice as long."""
    layer = with_times(search(trials=4), [50.0])
    (answer,) = layer.recommendations
    assert answer.chosen is not None
    trials = [replace(one, latency=exact(170.0), dense=exact(200.0)) for one in layer.trials]
    layer = replace(layer, trials=tuple(trials), finalists=(answer.chosen,))
    drawn = plots.latency_plot(layer, answer, *plots.WIDE)
    table = result_tables.layer_answers_table(layer)
    assert table.rows[0][table.heads.index("latency")] == "50.0 us"
    assert "use this: 50.0 us, 2.00x" in drawn
    assert f"85.0 us, {phrases.times(0.85)} dense" in drawn
    assert "170 us" not in drawn
    table = layer_sections.trials(layer).table or table
    shown = [row[table.heads.index("latency")] for row in table.rows]
    assert shown == ["50.0 us", *["85.0 us"] * (len(trials) - 1)]
    assert "rho" not in result_tables.layer_answers_table(layer).heads


def test_measure_again_has_its_command_under_it(search: Search) -> None:
    result = search(trials=3)
    layer = with_times(result, [20.0])
    assert headline.of_layer(layer).command == ""
    (answer,) = layer.recommendations
    assert answer.chosen is not None
    chosen = replace(answer.chosen, latency=Measurement(20.0, 18.0, 61.0, 20))
    noisy = with_layer(result, recommendations=(replace(answer, chosen=chosen),))
    command = noisy.request.command
    page_text, text = html.unescape(page.html(noisy)), page.markdown(noisy)
    assert page_text.index(f'<pre class="command"><code>{command}') < page_text.index(
        'class="facts"'
    )
    assert text.index(f"```sh\n{command}\n```") < text.index("speedup over dense")
    unjudged = replace(answer, verdict=Verdict.UNJUDGED, chosen=None)
    of_unjudged = headline.of_layer(with_layer(result, recommendations=(unjudged,)).layers[0])
    assert of_unjudged.command == command


def test_an_unknown_weight_error_says_what_the_file_is(search: Search) -> None:
    facts = headline.of_layer(with_times(search(trials=3), [50.0])).facts
    (unknown,) = [fact for fact in facts if fact.value == "unknown"]
    assert "--weights FILE, your trained weights" in unknown.detail


def test_the_command_with_trained_weights_is_whole(search: Search) -> None:
    result = search(trials=3)
    (section,) = [one for one in sections.written(result) if one.title == "With trained weights"]
    assert section.code == f"{result.request.command} --weights model.safetensors"
    assert ".safetensors" in section.paragraphs[0]


def test_what_a_budget_leaves_is_reported(search: Search) -> None:
    layer = with_times(search(trials=6), [50.0])
    (answer,) = layer.recommendations
    assert answer.chosen is not None
    most = answer.chosen.facts.nnz
    full = replace(answer, budget=replace(answer.budget, parameters=most))
    assert "of the budget" not in headline.of_layer(replace(layer, recommendations=(full,))).lead[1]
    room = replace(answer, budget=replace(answer.budget, parameters=2 * most))
    layer = replace(layer, recommendations=(room,))
    fewer = [one for one in layer.trials if one.facts.nnz <= most]
    lead = headline.of_layer(replace(layer, trials=tuple(fewer))).lead[1]
    assert "It uses 50% of the budget. --min-use 0.9 searches chains that use more." in lead
    larger = replace(fewer[0], number=99, facts=replace(fewer[0].facts, nnz=2 * most))
    lead = headline.of_layer(replace(layer, trials=(*fewer, larger))).lead[1]
    assert f"The fastest measured that uses 90% or more is {larger.facts.chain}" in lead


def test_the_front_has_the_times_of_the_final(search: Search) -> None:
    result = search(trials=3)
    layer = with_times(result, [50.0])
    (answer,) = layer.recommendations
    assert answer.chosen is not None
    # In its trial the chain of the final was the slowest, and it has the most weights.
    most = 1 + max(one.facts.nnz for one in layer.trials)
    trials = [
        replace(one, latency=exact(190.0), dense=exact(200.0), facts=replace(one.facts, nnz=most))
        if one.number == answer.chosen.trial
        else replace(one, latency=exact(170.0), dense=exact(200.0))
        for one in layer.trials
    ]
    result = with_layer(result, trials=tuple(trials), finalists=(answer.chosen,))
    (front,) = layer_sections.front(result.layers[0])
    assert front.table is not None
    shown = [row[front.table.heads.index("latency")] for row in front.table.rows]
    assert shown == ["50.0 us", "85.0 us"]
    (value,) = json.loads(results_json.to_json(result))["layers"]
    assert value["front"]["trials"][0] == answer.chosen.trial
    assert len(value["front"]["trials"]) == 2
