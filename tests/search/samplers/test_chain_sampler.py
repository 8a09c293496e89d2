"""The measured chains, their order, and pruning."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import TrialState

from ksopt import ops
from ksopt.errors import InvalidInputError
from ksopt.kernels.problem import DeviceSpec
from ksopt.measure.roofline import Roofline
from ksopt.patterns.chain import Chain
from ksopt.search import LayerRequest, SearchResult
from ksopt.search import pruning as pruning_module
from ksopt.search.options import STUDY
from ksopt.search.plan import plan_of
from ksopt.search.pruning import MARGIN, Pruning
from ksopt.search.results import Verdict
from ksopt.search.samplers import chain_sampler, priors
from ksopt.search.samplers.chain_sampler import ChainSampler
from ksopt.search.samplers.cost_model import CostModel
from ksopt.search.space import space as spaces
from ksopt.search.study_store import FILE

build = functools.cache(spaces.build)
Search = Callable[..., SearchResult]
H200 = DeviceSpec((9, 0), 132, 228 * 1024)


def stored(result: SearchResult) -> list[optuna.trial.FrozenTrial]:
    url = f"sqlite:///{result.folder / FILE}"
    return optuna.load_study(study_name=STUDY, storage=url).trials


@pytest.mark.parametrize("kind", ["TPE", "NSGA-II", "exhaustive"])
def test_each_sampler_draws_each_chain_once(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_sampler, "_POPULATION", 8)
    space = build(LayerRequest("64x96", budgets=("50%",)))
    chains = ChainSampler(space.candidates, kind, seed=0)
    study = optuna.create_study(directions=["minimize"] * 2, sampler=chains)
    drawn: list[Chain] = []
    for number in range(40):
        chains.close(drawn)
        if number < 2:  # as priors come
            chain = space.candidates[7 * number]
            study.enqueue_trial(chain_sampler.coordinates(chain), user_attrs={"chain": str(chain)})
        trial = study.ask(chain_sampler.distributions(space.dims))
        actual = chains.drawn(trial.number)
        chain = Chain.parse(trial.user_attrs["chain"]) if actual is None else actual[0]
        assert trial.params == pytest.approx(chain_sampler.coordinates(chain))
        drawn.append(chain)
        trial.set_constraint("test", float(number % 3) - 1)
        study.tell(trial, [float(number % 7), chain.nnz])
    assert len(set(drawn)) == 40
    assert set(drawn) <= set(space.candidates)


def test_a_model_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    """TPE draws chains of a low value more often than chance does."""
    space = build(LayerRequest("256x256", budgets=("50%",)))
    chains = ChainSampler(space.candidates, "TPE", seed=0)
    study = optuna.create_study(sampler=chains)
    value = {
        chain: abs(chain_sampler.coordinates(chain)["log2_b1"] - 5) for chain in space.candidates
    }
    collected = []
    for _ in range(60):
        trial = study.ask(chain_sampler.distributions(space.dims))
        drawn = chains.drawn(trial.number)
        assert drawn is not None
        collected.append(value[drawn[0]])
        study.tell(trial, collected[-1])
    late = sum(collected[30:]) / 30
    assert late < 0.8 * sum(value.values()) / len(value)


def test_the_cost_models_picks_are_priors() -> None:
    request = LayerRequest("768x768", budgets=("25%",), dtype="bf16", batch=4096, max_factors=2)
    space = build(request)
    model = CostModel(H200, "bfloat16", 4096, batch_last=False)
    roofline = Roofline("cuda:0", "bfloat16", 4.2e12, 7e14, 0, 0, "")
    first = priors.enqueued(space, request, roofline, model)
    assert len({chain for _, chain in first}) == len(first)
    picks = [chain for origin, chain in first if origin == "cost model"]
    assert picks
    by_floor = sorted(space.candidates, key=lambda c: roofline.chain_floor_us(c, 4096))
    requested = [chain for chain in by_floor if set(chain) <= set(model._known)]
    fastest = sorted(requested, key=lambda c: model.predicted_us(c) or 0.0)
    named = {chain: origin for origin, chain in first}
    assert all(chain in named for chain in fastest[:2])
    without = priors.enqueued(space, request, roofline, None)
    assert all(origin != "cost model" for origin, _ in without)


def test_there_is_no_cost_model_on_a_cpu(search: Search) -> None:
    assert CostModel.of(LayerRequest("8x8", batch=1), torch.device("cpu")) is None
    assert all(trial.facts.predicted_us is None for trial in search(trials=2).layers[0].trials)


@pytest.mark.slow
def test_hopeless_chains_are_pruned_and_say_so(
    search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = ops.chain

    def slow(
        x: torch.Tensor, weights: Sequence[torch.Tensor], *around: Any, op: str
    ) -> torch.Tensor:
        if len(weights) == 2:
            time.sleep(0.02)
        return right(x, weights, *around, op=op)

    monkeypatch.setattr(ops, "chain", slow)
    monkeypatch.setattr(pruning_module, "MARGIN", 2.0)
    result = search(trials=14, objective="latency")
    assert {trial.state for trial in result.layers[0].trials} == {"complete", "pruned"}
    pruned = [trial for trial in result.layers[0].trials if trial.state == "pruned"]
    assert pruned
    for trial in pruned:
        assert trial.latency is not None
        assert trial.latency.given_up
        assert trial.latency.repeats == 2
        assert trial.ratio is None
        assert trial.ratio_seen is not None
        assert "given up after 2 repeats" in (trial.reason or "")
    assert any(len(trial.facts.chain) == 2 for trial in pruned)
    in_study = [trial.number for trial in stored(result) if trial.state == TrialState.PRUNED]
    assert in_study == [trial.number for trial in pruned]
    assert "given up" in (result.folder / "report.md").read_text(encoding="utf-8")
    again = search(trials=14, objective="latency")  # pruned ones count, and are not tried again
    assert len(again.layers[0].trials) == 14


def pruning(ratios: dict[str, float], **options: Any) -> Pruning:
    request = LayerRequest("32x64", budgets=("50%",), **options)
    study = optuna.create_study(directions=["minimize"] * 2)
    for text, ratio in ratios.items():
        nnz = Chain.parse(text).nnz
        outcome = {"dense_ratio": ratio, "weight_error": ratio}
        attrs = {"chain": text, "facts": {"nnz": nnz}, "outcome": outcome}
        study.add_trial(optuna.create_trial(values=[ratio, nnz], user_attrs=attrs))
    return Pruning(study, build(request).steps, request)


def test_what_counts_as_hopeless() -> None:
    space = build(LayerRequest("32x64", budgets=("50%",)))
    small, *others = sorted(space.candidates, key=lambda chain: chain.nnz)
    *_, a, b, c, large = others
    assert small.nnz < a.nnz <= large.nnz
    ratios = {str(a): 0.5, str(b): 0.6, str(c): 0.7}
    few = {str(a): 0.5, str(b): 0.6}
    assert pruning(few, objective="latency").limit(large, "TPE") is None
    actual = pruning(ratios, objective="latency")
    assert actual.limit(large, "TPE") == pytest.approx(MARGIN * 0.7)
    assert actual.limit(large, priors.HEURISTIC) is None
    # On the front of latency and weights, only those with no more weights beat it.
    assert pruning(ratios).limit(large, "TPE") == pytest.approx(MARGIN * 0.7)
    assert pruning(ratios).limit(small, "TPE") is None
    # And only those that meet the constraint, here two of the three.
    strict = pruning(ratios, objective="latency", weights="w.safetensors", max_error=0.65)
    assert strict.limit(large, "TPE") is None
    # Only admitted chains: an earlier run may have allowed a lower rank.
    low = {str(Chain.low_rank(32, 64, rank)): ratio for rank, ratio in ((8, 0.1), (9, 0.1))}
    mixed = {**low, str(a): 0.5}
    assert pruning(mixed, objective="latency").limit(large, "TPE") is None
    loose = pruning(mixed, objective="latency", min_rank=4)
    assert loose.limit(large, "TPE") == pytest.approx(MARGIN * 0.5)


def test_a_speedup_that_is_not_reached(search: Search) -> None:
    result = search(min_speedup=1e6, trials=3)
    answer = result.layers[0].recommendations[0]
    assert answer.verdict in (Verdict.NOT_ENOUGH, Verdict.KEEP_DENSE, Verdict.NO_DIFFERENCE)
    if answer.verdict is Verdict.NOT_ENOUGH:
        assert "less than the 1e+06 times that were asked for" in answer.sentence
    for trial in stored(result):
        assert trial.constraints["min_speedup"] > 0
    assert plan_of(result).rules[0].chains == ()


def test_no_step_exceeds_the_most_weights() -> None:
    steps = LayerRequest("64x64", max_params="1k").steps
    assert [step.parameters for step in steps] == [409, 1000]
    assert [step.parameters for step in LayerRequest("64x64", max_params="100%").steps] == [
        409,
        1024,
        2048,
    ]


def test_latency_alone_is_another_study(search: Search) -> None:
    result = search(objective="latency", trials=2)
    assert [len(trial.values) for trial in stored(result)] == [1, 1]
    with pytest.raises(InvalidInputError, match="objective latency there and pareto here"):
        search(trials=3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"objective": "fast"}, "must be 'pareto', 'pareto-error' or 'latency'"),
        ({"min_speedup": 0.0}, "min_speedup 0.0: give a number more than 0"),
        ({"max_params": "lots"}, "budget 'lots': write a share"),
        ({"workers": 0}, "workers must be at least 1"),
    ],
)
def test_misuse(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        LayerRequest("64x64", **options)
