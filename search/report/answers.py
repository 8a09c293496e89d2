"""The answer of a search in sentences, for the terminal and the page."""

from __future__ import annotations

from ksopt.search import diagnostics, surrounded, suspect_dense
from ksopt.search.plan import Effect, choice, effect_of
from ksopt.search.recommend import least_speedup
from ksopt.search.report import phrases
from ksopt.search.results import LayerResult, Recommendation, SearchResult, Verdict
from ksopt.system.plurals import counted


def lead(result: SearchResult) -> list[str]:
    """The answer in sentences, with reservations."""
    sentences = effect_sentences(result)
    if result.request.is_one_layer:
        sentences += [answer.sentence for one in result.layers for answer in one.recommendations]
    elif result.request.model is None:
        sentences += _sizes_sentences(result)
    return [*sentences, *_beside(result), *stopped(result), *warnings(result)]


def beside(result: SearchResult) -> list[str]:
    """Remarks beside the answer of several sizes, or of a model."""
    return [*effect_sentences(result)[1:], *_beside(result)]


def _beside(result: SearchResult) -> list[str]:
    sentences = [*_whole_sentences(result), *phrases.what_is_timed(result.request)]
    sentences += [
        f"The layers of {dims} stay dense: {text}." for dims, text in result.unmet.items()
    ]
    sentences += notes(result)
    if result.request.model is not None:
        sentences += [text for one in result.layers for text in surrounded_sentences(one)]
    if result.replayed and result.layers:
        sentences.append(phrases.replayed(result.layers[0].device))
    return sentences


def notes(result: SearchResult) -> list[str]:
    """What sizes were asked otherwise, and what the default rank costs them, a sentence each."""
    return [*result.request.notes, *(text for one in result.layers for text in layer_notes(one))]


def layer_notes(layer: LayerResult) -> list[str]:
    """Remark on a faster chain of lower rank; empty if none is predicted."""
    lower = layer.lower_rank
    if lower is None:
        return []
    chain = lower.chain
    share = phrases.percent(chain.nnz / layer.size.dense_parameters)
    return [
        f"{layer.size}: chains of lower rank are no candidates by default. {chain}, of rank "
        f"{chain.rank_bound} and {share} of the weights, is predicted to take {lower.ratio:.2f} of "
        f"the time of {lower.beside}. It can express less: --min-rank {chain.rank_bound} admits "
        "such chains."
    ]


def stopped(result: SearchResult | LayerResult) -> list[str]:
    """Sentence on a search that ended early; empty if it did not."""
    return {
        None: [],
        "interrupted": ["The search was interrupted: this is what it had measured."],
        "timeout": ["The time was up before all trials were measured."],
    }[result.stopped]


def warnings(result: SearchResult) -> list[str]:
    """Reservations about the times, in a sentence each."""
    drifts = {str(one.size): diagnostics.drift(one) for one in result.layers}
    drifted = {size: drift for size, drift in drifts.items() if drift and drift.beyond_noise}
    if result.request.is_one_layer:
        sentences = [sentence for one in result.layers for sentence in layer_warnings(one)]
        return sentences + [drift.sentence for drift in drifted.values()]
    beside = {str(one.size): suspect_dense.dense_layer(one) for one in result.layers}
    strange = suspect_dense.warning_of({size: dense for size, dense in beside.items() if dense})
    sentences = [strange] if strange else []
    floors = [(size, one.beats_floor) for size, one in beside.items() if one is not None]
    sentences += [f"{size}: {text}" for size, text in floors if text]
    failures = [(one.size, diagnostics.failures(one)) for one in result.layers]
    sentences += [f"{size}: {sentence}" for size, sentence in failures if sentence]
    if drifted:
        sentences.append(
            f"The dense layers of {', '.join(drifted)} took another time in the final than at "
            "first, beyond their noise. Clocks, throttling or another process changed the machine "
            "meanwhile. Ratios to dense, measured in turns, allow for that; absolute times do not."
        )
    return sentences


def layer_warnings(layer: LayerResult) -> list[str]:
    """Reservations about the times of one layer."""
    dense, failures = suspect_dense.dense_layer(layer), diagnostics.failures(layer)
    of_dense = () if dense is None else (dense.warning, dense.beats_floor)
    return [text for text in (*of_dense, failures) if text]


def effect_sentences(result: SearchResult) -> list[str]:
    """Predicted effect of the plan on the model; empty without a model."""
    effect, layers = effect_of(result), result.request.model
    if effect is None or layers is None:
        return []
    if not effect.converted:
        return [f"Keep the dense layers of {layers.source}: {_why_dense(result, effect)}."]
    share = phrases.percent(effect.parameters / effect.dense_parameters)
    sentences = [
        f"With the plan {effect.converted} of the {counted(layers.count, 'linear layer')} of "
        f"{layers.source} {'becomes a chain' if effect.converted == 1 else 'become chains'}.",
        f"{effect.dense_parameters:,} weights become {effect.parameters:,} ({share}).",
    ]
    if effect.ratio is not None:
        rows = phrases.rows(result.request)
        sentences += [
            f"Their latencies, measured layer by layer on {rows}, add up to "
            f"{phrases.microseconds(effect.latency_us)} in place of "
            f"{phrases.microseconds(effect.dense_us)}.",
            f"Predicted, the linear layers are {phrases.times(effect.ratio)} the dense ones.",
        ]
    doubtful = _doubtful(result, effect)
    if doubtful:
        sentences.append(
            f"Do not rely on that yet: the dense layers of {', '.join(doubtful)} were strangely "
            "slow, see below."
        )
    if layers.parameters is not None:
        left = layers.parameters - effect.dense_parameters + effect.parameters
        sentences.append(
            f"The whole model, with what is not linear, goes from {layers.parameters:,} parameters "
            f"to {left:,} ({phrases.percent(left / layers.parameters)})."
        )
    if effect.unmeasured:
        sizes = ", ".join(map(str, effect.unmeasured))
        sentences.append(f"The latencies of the layers of {sizes} are not known, and in no sum.")
    return sentences


def _why_dense(result: SearchResult, effect: Effect) -> str:
    """The reason why a plan converts nothing."""
    if not effect.dense_us:
        answers = [answer for one in result.layers for answer in one.recommendations]
        if any(answer.verdict is Verdict.KEEP_DENSE for answer in answers):
            # There is no finalist of any size.
            return f"no measured chain is within a weight error of {result.request.max_error:g}"
        return "nothing was measured"
    least = least_speedup(result.request)
    return f"no chain that was measured is measurably {least:g} times as fast as they are"


def _whole_sentences(result: SearchResult) -> list[str]:
    """Times of the whole model; empty if it was not timed."""
    whole, effect = result.whole, effect_of(result)
    if whole is None:
        is_requested = (
            "measure-model" in result.request.model_options and result.stopped != "interrupted"
        )
        if is_requested and effect is not None and effect.converted == 0:
            return ["The model was not timed whole: with this plan nothing in it would change."]
        return []
    what = "a forward pass" if result.request.train else "a pass"
    text = (
        f"Timed whole and eagerly, with random weights in the chains, {what} took "
        f"{phrases.timed(whole.planned)}. The dense model took {phrases.timed(whole.dense)}: "
        f"the plan is {whole.against_dense}."
    )
    rows = sorted(set(whole.rows.values()))
    if not rows:
        return [text]
    seen = f"{rows[0]:,} to " if len(rows) > 1 else ""
    seen += counted(rows[-1], "row")
    return [f"{text} Its layers saw {seen}; the search measured them on {result.request.batch:,}."]


def _doubtful(result: SearchResult, effect: Effect) -> list[str]:
    """The sizes whose dense layers are suspiciously slow."""
    sizes = dict.fromkeys(one.group.dims for one in effect.groups)
    beside = {dims: result.of(dims) for dims in sizes}
    dense = {
        dims: suspect_dense.dense_layer(one) for dims, one in beside.items() if one is not None
    }
    return [str(dims) for dims, one in dense.items() if one is not None and one.is_strange]


def _sizes_sentences(result: SearchResult) -> list[str]:
    sentences = ["The plan:"]
    for layer in result.layers:
        sentences += surrounded_sentences(layer) or [
            f"{layer.size} {_choice(choice(result, layer.size))}."
        ]
    return sentences


def surrounded_sentences(layer: LayerResult) -> list[str]:
    """Sentences on a size that becomes chains in some surroundings only; empty for others."""
    if not surrounded.winners(layer):
        return []
    first, *others = surrounded.judged(layer)
    alone = "Where it is so, the plan has the chain; elsewhere the layer stays dense."
    return [f"{layer.size}: {first}", *others, alone]


def _choice(answer: Recommendation | None) -> str:
    if answer is None or answer.chosen is None:
        return "stays dense"
    chosen = answer.chosen
    return (
        f"becomes {chosen.facts.chain} ({phrases.percent(chosen.facts.share)} of the weights, "
        f"{phrases.times(chosen.ratio)} dense)"
    )
