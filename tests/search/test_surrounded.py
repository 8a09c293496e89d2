"""A size whose chains lose alone, and are judged as layers of a model are; with invented times."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ksopt
from ksopt.conversion.model_call import ModelCall
from ksopt.conversion.plan import Plan, Rule
from ksopt.errors import KsoptError
from ksopt.kernels.problem import DeviceSpec
from ksopt.measure.roofline import Roofline
from ksopt.measure.timing import Measurement
from ksopt.nn import KSLinear, KSStacked
from ksopt.patterns.chain import Chain
from ksopt.patterns.surroundings import Surroundings
from ksopt.search import (
    LayerRequest,
    SearchRequest,
    SearchResult,
    finals,
    plan_of,
    recommend,
    replay,
    run_search,
    study_store,
    surrounded,
    surrounded_finals,
)
from ksopt.search.objectives import Objective
from ksopt.search.problems import epilogue_of
from ksopt.search.product_check import WrongResultError
from ksopt.search.report import page, results_json
from ksopt.search.results import TrialRecord, Verdict
from ksopt.search.samplers.cost_model import CostModel
from ksopt.search.samplers.priors import facts
from ksopt.search.space.space import build
from ksopt.search.surrounded import SurroundedTimes
from ksopt.search.surroundings import USUAL, may_be_surrounded
from ksopt.search.whole_model import at_random

THREE = Surroundings(("bias",), siblings=3)
ADDED, ACTIVATED = Surroundings(("bias", "residual")), Surroundings(("bias", "gelu"))
H200 = DeviceSpec((9, 0), 132, 227 * 1024)


def time_of(us: float) -> Measurement:
    return Measurement(us, 0.99 * us, 1.01 * us, 50)


def times_of(chains: Sequence[Any], us: float, dense_us: float = 100.0) -> dict[str, Measurement]:
    """A dense layer, and chains that take a little longer one after the other."""
    own = {str(chain): time_of(us + 0.1 * at) for at, chain in enumerate(chains)}
    return {**own, "dense": time_of(dense_us)}


@pytest.fixture
def judge(
    quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., SearchResult]:
    """Searches 16x16 and 16x32 as if on a GPU, with invented times of their finals.

    ``alone`` has the microseconds of the chains of each size; ``there`` has those of 16x16 in
    surroundings, for dense layers of 100 us. With ``others_us`` the cost model predicts that as
    siblings chains that are no finalists are fastest, and these then take as long.
    """

    def run(
        alone: Mapping[str, float],
        there: Mapping[Surroundings, float],
        others_us: float | None = None,
        **options: Any,
    ) -> SearchResult:
        finalists: set[Any] = set()

        class Invented(CostModel):
            @classmethod
            def of(cls, request: LayerRequest, device: torch.device) -> CostModel | None:
                model = cls(H200, request.dtype, 8, batch_last=False, siblings=request.siblings)
                return None if others_us is None else model

            def predicted_us(self, chain: Any) -> float | None:
                return 5.0 if self.siblings == 3 and chain not in finalists else 10.0

        def final(request: LayerRequest, device: Any, chains: Any, spare: Any) -> Any:
            finalists.update(chains)
            return times_of(chains, alone[str(request.size)])

        def measure(
            request: LayerRequest, device: Any, chains: Any, compilers: Any, note: Any
        ) -> tuple[SurroundedTimes, ...]:
            assert list(chains) == list(USUAL)
            several = []
            for around, own in chains.items():
                known = [chain for chain in own if chain in finalists]
                others = [chain for chain in own if chain not in finalists]
                alone_most = surrounded_finals.CHAINS_PER_STEP * len(request.steps)
                assert len(others) <= surrounded_finals.PREDICTED_CHAINS
                assert len(own) <= alone_most + surrounded_finals.PREDICTED_CHAINS
                times = times_of(known, there.get(around, 150.0))
                several.append(SurroundedTimes(around, times_of(others, others_us or 0.0) | times))
            return tuple(several)

        monkeypatch.setattr(finals, "final", final)
        monkeypatch.setattr(surrounded_finals, "measure", measure)
        monkeypatch.setattr(surrounded_finals, "CostModel", Invented)
        monkeypatch.setattr(surrounded_finals, "computes_surroundings", lambda device: True)
        # A slow moment of a trial must not make an invented final look held back.
        monkeypatch.setattr("ksopt.search.suspect_dense._SUSPECT", 1e9)
        requested: dict[str, Any] = {
            "dims": ("16x16", "16x32"),
            "budgets": ("50%", "75%"),
            "batch": 8,
            "device": "cpu",
            "trials": 8,
            "out": tmp_path / "report",
        }
        return run_search(SearchRequest(**{**requested, **options}))

    return run


def test_a_size_that_wins_as_siblings_alone_says_so(
    judge: Callable[..., SearchResult],
) -> None:
    result = judge({"16x16": 106.0, "16x32": 50.0}, {THREE: 66.0})
    square, wide = result.layers
    assert [one.around for one in square.surrounded] == list(USUAL)
    assert wide.surrounded == ()  # a chain wins alone, and so everywhere
    answer = square.recommendations[-1]
    assert answer.verdict is Verdict.KEEP_DENSE
    (there,) = [one for one in square.surrounded if one.around == THREE]
    chain = there.recommendations[-1].chosen.facts.chain
    expected = (
        f"Alone, {chain} is 0.94 times as fast as dense; as 3 on one input, followed by a bias, "
        "1.52 times as fast as one dense layer of 3 times the outputs: use it for q, k and v."
    )
    assert expected in answer.sentence
    assert f"16x16: {expected}" in str(result)
    assert "elsewhere the layer stays dense" in str(result)
    assert "16x32 becomes" in str(result)
    lines = page.markdown(result)
    assert "Use chains for 2 of 2 layer sizes, of 16x16 only in some surroundings." in lines
    assert "ksopt convert --model mymodel:build --plan plan.json --inputs mymodel:inputs" in lines
    assert "In other surroundings" in page.html(result)
    written = json.loads((result.folder / "results.json").read_text("utf-8"))
    jsonschema.validate(written, results_json.results_schema())
    own = {one["request"]["dims"]: one["surrounded"] for one in written["layers"]}
    assert own["16x32"] == []
    assert [one["siblings"] for one in own["16x16"]] == [1, 1, 3]
    verdicts = [one["recommendations"][-1]["verdict"] for one in own["16x16"]]
    assert verdicts == ["keep the dense layer", "keep the dense layer", "use the chain"]


def test_the_plan_has_the_chain_with_its_condition(judge: Callable[..., SearchResult]) -> None:
    result = judge({"16x16": 106.0, "16x32": 50.0}, {THREE: 66.0, ADDED: 50.0})
    plan = plan_of(result)
    assert Plan.read(result.folder / "plan.json") == plan
    rules = [(rule.in_features, rule.out_features, rule.where) for rule in plan.rules]
    assert rules == [
        (16, 16, ADDED),
        (16, 16, THREE),
        (16, 48, Surroundings(("bias",))),  # the same as one layer: a fused q, k and v
        (16, 16, None),
        (16, 32, None),
    ]
    added, three, fused, alone, wide = plan.rules
    assert len(added.chains) == len(three.chains) == len(wide.chains) == 1
    assert fused.chains == three.chains * 3
    assert alone.chains == ()
    # Siblings as one layer were searched by themselves: that answer counts.
    result = judge(
        {"16x16": 106.0, "16x48": 150.0}, {THREE: 66.0}, dims=("16x16", "16x48"), trials=6,
        out=result.folder / "another",
    )  # fmt: skip
    fused = [rule for rule in plan_of(result).rules if rule.out_features == 48]
    assert [len(rule.chains) for rule in fused if rule.where == Surroundings(("bias",))] == []


def test_where_no_chain_wins_the_layers_stay_dense(judge: Callable[..., SearchResult]) -> None:
    result = judge({"16x16": 106.0, "16x32": 50.0}, {THREE: 99.0})
    (square, _), plan = result.layers, plan_of(result)
    assert surrounded.winners(square) == ()
    assert not plan.has_conditions
    assert "use it" not in square.recommendations[-1].sentence
    assert "16x16 stays dense." in str(result)
    nor = "Nor is a chain worth using followed by a bias and a GELU (0.67x); followed by a bias "
    assert nor in page.markdown(result)


def test_the_study_holds_it_and_one_of_an_earlier_version_lacks_it(
    judge: Callable[..., SearchResult],
) -> None:
    result = judge({"16x16": 106.0, "16x32": 50.0}, {THREE: 66.0})
    again = replay(str(result.folder))
    assert [one.surrounded for one in again.layers] == [one.surrounded for one in result.layers]
    assert plan_of(again) == plan_of(result)
    storage = study_store.storage_of(result.request)
    study = storage.load("ksopt-search 16x16")
    value = dict(study.user_attrs["report"])
    del value["surrounded"]
    study.set_user_attr("report", value)
    earlier = replay(str(result.folder))
    assert all(one.surrounded == () for one in earlier.layers)
    assert not plan_of(earlier).has_conditions


def test_a_chain_that_is_slow_alone_and_predicted_to_be_fast_as_siblings_is_timed_so(
    judge: Callable[..., SearchResult],
) -> None:
    options: dict[str, Any] = {"others_us": 66.0, "dims": "16x16", "trials": 20}
    result = judge({"16x16": 106.0}, {THREE: 99.0}, **options)
    (square,) = result.layers
    finalists = {str(one.facts.chain) for one in square.finalists}
    added, activated, three = (
        next(one for one in square.surrounded if one.around == around)
        for around in (ADDED, ACTIVATED, THREE)
    )
    for one in (added, activated):
        assert {str(finalist.facts.chain) for finalist in one.finalists} <= finalists
    first, second = three.finalists[: surrounded_finals.PREDICTED_CHAINS]
    assert not {str(first.facts.chain), str(second.facts.chain)} & finalists
    assert {str(one.facts.chain) for one in three.finalists[2:]} <= finalists
    # It is no finalist: its time alone is its trial's.
    ((_, answer),) = surrounded.winners(square)
    assert answer.chosen in (first, second)
    own = square.trials[answer.chosen.trial]
    (sentence, *_) = surrounded.judged(square)
    assert sentence.startswith(f"Alone, {own.facts.chain} is {1 / own.ratio:.2f} times as fast as")
    assert "1.52 times as fast as one dense layer of 3 times the outputs" in sentence
    rules = [rule for rule in plan_of(result).rules if rule.where == THREE]
    assert [rule.chains for rule in rules] == [(answer.chosen.facts.chain,)]
    again = replay(str(result.folder))
    assert again.layers[0].surrounded == square.surrounded
    assert surrounded.judged(again.layers[0]) == surrounded.judged(square)
    assert plan_of(again) == plan_of(result)
    resumed = judge({"16x16": 106.0}, {THREE: 99.0}, **options)
    assert resumed.layers[0].run == 2
    assert resumed.layers[0].surrounded == square.surrounded
    assert plan_of(resumed).rules == plan_of(result).rules
    # A study of an earlier version has times of finalists only.
    study = study_store.storage_of(result.request).load(result.request.study)
    value = json.loads(json.dumps(study.user_attrs["report"]))
    for one in value["surrounded"]:
        one["times"] = {
            name: us for name, us in one["times"].items() if name in {*finalists, "dense"}
        }
    study.set_user_attr("report", value)
    earlier = replay(str(result.folder))
    assert [len(one.finalists) for one in earlier.layers[0].surrounded] == [
        len(one.finalists) - 2 * (one.around == THREE) for one in square.surrounded
    ]
    assert not plan_of(earlier).has_conditions


def test_q_k_and_v_get_the_chain_that_is_fastest_as_siblings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the predictions for an H200; the times alone are invented."""

    def of(request: LayerRequest, device: torch.device) -> CostModel:
        after, siblings = epilogue_of(request), request.siblings
        return CostModel(H200, "bfloat16", 25_216, False, after=after, siblings=siblings)

    monkeypatch.setattr(surrounded_finals.CostModel, "of", of)
    monkeypatch.setattr(surrounded_finals, "computes_surroundings", lambda device: True)
    best = "(1,96,96,4)*(12,32,32,1)"
    texts = [
        *("(1,48,48,8)*(6,64,64,1)", "(1,24,24,16)*(4,96,96,1)", "(1,96,96,4)*(6,64,64,1)"),
        *("(1,48,48,8)*(8,48,48,1)", "(1,24,24,16)*(8,48,48,1)", best),
    ]
    request = LayerRequest(
        "384x384", budgets=("25%", "50%"), batch=25_216, dtype="bfloat16", device="cuda"
    )
    roofline = Roofline("cuda:0", "bfloat16", 4.2e12, 7e14, 0, 0, "")
    trials = [
        TrialRecord(
            number,
            "complete",
            facts(Chain.parse(text), roofline, 25_216),
            "test",
            time_of(22.0 + number),
            time_of(20.0),
            0.001,
            None,
            run=1,
        )
        for number, text in enumerate(texts)
    ]
    space = build(request)
    elected = recommend.elect(trials, space.steps)
    standing = recommend.finalists(elected, None)
    answers = recommend.recommend(space, standing)
    chains = surrounded_finals.chains_of(
        request, torch.device("cuda"), space.steps, answers, standing, trials
    )
    assert list(chains) == list(USUAL)
    fastest = [Chain.parse(texts[at]) for at in (3, 4, 0, 1)]
    assert all(several[: len(fastest)] == fastest for several in chains.values())
    assert Chain.parse(best) in chains[THREE]
    assert len(chains[THREE]) == len(fastest) + surrounded_finals.PREDICTED_CHAINS
    # Without a cost model there are the fastest alone.
    monkeypatch.setattr(surrounded_finals.CostModel, "of", lambda request, device: None)
    chains = surrounded_finals.chains_of(
        request, torch.device("cuda"), space.steps, answers, standing, trials
    )
    assert chains == dict.fromkeys(USUAL, fastest)


def test_one_size_shows_its_use(judge: Callable[..., SearchResult]) -> None:
    result = judge({"16x16": 106.0}, {THREE: 66.0}, dims="16x16", trials=4)
    text = page.markdown(result)
    but = "Keep nn.Linear(16, 16) dense, but not as 3 on one input, followed by a bias."
    assert but in text
    assert "layer = KSStacked([KSLinear(16, 16," in text
    assert "1.52x" in text
    assert "use it for q, k and v" in str(result)


@pytest.mark.parametrize(
    "options", [{"epilogue": "bias"}, {"siblings": 2}, {"train": True}, {"layout": "batch_last"}]
)
def test_what_is_not_timed_alone_is_not_judged_again(options: dict[str, Any]) -> None:
    assert may_be_surrounded(LayerRequest("8x8").options)
    assert not may_be_surrounded(LayerRequest("8x8", **options).options)


def test_a_cpu_computes_no_surroundings_in_a_launch() -> None:
    assert not surrounded_finals.computes_surroundings(torch.device("cpu"))


def test_a_wrong_chain_has_no_time(brief: None, monkeypatch: pytest.MonkeyPatch) -> None:
    request = LayerRequest("8x8", batch=4, device="cpu")
    right, wrong = "(1,4,4,2)*(2,4,4,1)", "(2,4,4,1)*(1,4,4,2)"
    check = Objective.check

    def checked(self: Objective, chain: Any) -> None:
        check(self, chain)
        if str(chain) == wrong and self._request.siblings == 3:
            raise WrongResultError("its product is wrong\nby far")

    monkeypatch.setattr(Objective, "check", checked)
    task = {"device": "cpu", "seconds": 0.05}
    every = [{**one.to_json(), "chains": [right, wrong]} for one in USUAL]
    answers = surrounded_finals.measured({**task, "surroundings": every}, request)
    every = [SurroundedTimes.from_json(json.loads(json.dumps(one))) for one in answers]
    assert [set(one.times) for one in every] == [
        {right, wrong, "dense"},
        {right, wrong, "dense"},
        {right, "dense"},
    ]
    why = f"{wrong}: WrongResultError: its product is wrong"
    assert [one.left_out for one in every] == [(), (), (why,)]
    (alone,) = surrounded_finals.measured(
        {**task, "surroundings": [{**THREE.to_json(), "chains": [wrong]}]}, request
    )
    assert alone["times"] == {}
    assert alone["reason"] == why


def test_a_chain_that_is_left_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from ksopt.kernels.compile_ahead import Compilers
    from ksopt.search.worker_processes import SpareProcess

    one = SurroundedTimes(THREE, times_of([], 1.0), left_out=("C: its product is wrong",))
    answer = {"surrounded": [one.to_json()]}
    monkeypatch.setattr(SpareProcess, "ask", lambda *_: answer)
    notes: list[str] = []
    request = LayerRequest("8x8", batch=4, device="cpu")
    cpu = torch.device("cpu")
    assert surrounded_finals.measure(request, cpu, {}, Compilers(), notes.append) == (one,)
    assert notes == ["8x8, as 3 on one input, followed by a bias: left out C: its product is wrong"]


def test_a_process_that_fails_costs_these_times_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from ksopt.kernels.compile_ahead import Compilers
    from ksopt.search.worker_processes import SpareProcess

    def fail(self: SpareProcess, task: Mapping[str, Any]) -> Mapping[str, Any]:
        assert task["surroundings"] == [{**THREE.to_json(), "chains": [SQUARE]}]
        raise KsoptError("the process of the surrounded was killed")

    monkeypatch.setattr(SpareProcess, "ask", fail)
    notes: list[str] = []
    request = LayerRequest("16x16", batch=4, device="cpu")
    assert surrounded_finals.measure(
        request, torch.device("cpu"), {THREE: [Chain.parse(SQUARE)]}, Compilers(), notes.append
    ) == ()  # fmt: skip
    assert notes == ["16x16 was timed alone only: the process of the surrounded was killed"]


class Block(nn.Module):
    """Attention with three layers or one, its projection, and an MLP."""

    def __init__(self, is_fused: bool, width: int = 16) -> None:
        super().__init__()
        parts = 1 if is_fused else 3
        self.inner = nn.ModuleList(nn.Linear(width, 3 * width // parts) for _ in range(parts))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = [one(x) for one in self.inner]
        q, k, v = parts if len(parts) == 3 else parts[0].chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v))
        return x + self.down(F.gelu(self.up(x)))


SQUARE, OTHER, WIDE = "(1,8,8,2)*(2,8,8,1)", "(2,8,8,1)*(1,8,8,2)", "(1,16,8,2)*(2,8,8,1)"


def plan_of_siblings() -> Plan:
    three, wide = ksopt.Chain.parse(SQUARE), ksopt.Chain.parse(WIDE)
    return Plan(
        (
            Rule((three,), in_features=16, out_features=16, where=THREE),
            Rule((three,) * 3, in_features=16, out_features=48, where=Surroundings(("bias",))),
            Rule((), in_features=16, out_features=16),
            Rule((wide,), in_features=16, out_features=32, where=ACTIVATED),
        )
    )


def test_a_conversion_applies_a_chain_where_its_condition_is_true() -> None:
    x = torch.randn(2, 5, 16)
    model = nn.Sequential(Block(is_fused=False), Block(is_fused=True))
    done = ksopt.convert(model, plan_of_siblings(), example_inputs=x)
    assert [layer.name for layer in done.layers] == [
        *("0.inner.0", "0.inner.1", "0.inner.2", "0.up"),
        *("1.inner.0", "1.up"),
    ]
    assert isinstance(model[0].inner[0], KSLinear)
    assert isinstance(model[1].inner[0], KSStacked)
    assert set(done.dense) == {"0.out", "0.down", "1.out", "1.down"}
    assert done.dense["0.down"] == "no rule of the plan matches it"
    assert done.dense["0.out"] == (
        "the plan has chains for such layers only where they are 3 on one input, followed by a "
        "bias; this one is followed by a bias and a residual"
    )
    assert model(x).shape == x.shape


def test_a_conversion_without_inputs_leaves_them_dense_and_says_why() -> None:
    model = Block(is_fused=False)
    done = ksopt.convert(model, plan_of_siblings())
    assert done.layers == ()
    assert set(done.dense) == {"inner.0", "inner.1", "inner.2", "out", "up", "down"}
    for name in done.dense.keys() - {"down"}:
        reason = done.dense[name]
        assert "not known without inputs of the model (example_inputs of" in reason


def test_what_a_graph_does_not_show_stays_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise RuntimeError("no frames today")

    monkeypatch.setattr(torch, "compile", refuse)
    x = torch.ones(2, 5, 16)
    done = ksopt.convert(Block(is_fused=False), plan_of_siblings(), example_inputs=x)
    assert done.layers == ()
    assert "could not be read" in done.dense["inner.0"]
    assert "no frames today" in done.dense["inner.0"]
    # A rule without a condition needs no graph.
    done = ksopt.convert(Block(is_fused=False), {"16x32": WIDE}, example_inputs=x)
    assert [layer.name for layer in done.layers] == ["up"]


def test_a_model_is_timed_with_the_chains_whose_condition_is_true() -> None:
    model = Block(is_fused=False)
    call = ModelCall((torch.ones(2, 5, 16),), {}, "test")
    assert at_random(model, plan_of_siblings(), call) == 4
    assert at_random(Block(is_fused=False), plan_of_siblings()) == 0


def test_wrong_inputs_of_a_conversion_are_one_sentence() -> None:
    with pytest.raises(ksopt.InvalidInputError, match="the model does not take these inputs"):
        ksopt.convert(
            Block(is_fused=False), plan_of_siblings(), example_inputs=torch.ones(2, 5, 17)
        )
    with pytest.raises(ksopt.InvalidInputError, match="example_inputs: the inputs must be"):
        ksopt.convert(Block(is_fused=False), plan_of_siblings(), example_inputs=3)


def test_a_bias_does_not_make_another_layer() -> None:
    rule = Rule((ksopt.Chain.parse(SQUARE),), where=THREE)
    assert rule.holds(replace(THREE, epilogue=()))
    assert not rule.holds(replace(THREE, siblings=2))
    assert not rule.holds(ADDED)
    assert not rule.holds(None)
