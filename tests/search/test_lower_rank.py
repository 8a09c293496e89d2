"""What full rank, the default, costs: predicted by an H200's cost model, or an invented one."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import torch

from ksopt.kernels.problem import DeviceSpec
from ksopt.operators.registry import Replacement
from ksopt.patterns.chain import Chain
from ksopt.search import LayerRequest, SearchResult, lower_rank, replay, study_store
from ksopt.search.report import page, results_json
from ksopt.search.samplers.cost_model import CostModel
from ksopt.search.space.space import build

H200 = DeviceSpec((9, 0), 132, 227 * 1024)
GPU = torch.device("cuda")  # of the invented models, which do not use it
FULL = Chain.monarch(64, 64, p=4)
Search = Callable[..., SearchResult]


def invent(monkeypatch: pytest.MonkeyPatch, lower_us: float | None) -> None:
    """A device whose cost model predicts 10 us for chains of full rank."""

    class Invented(CostModel):
        @classmethod
        def of(cls, request: LayerRequest, device: torch.device) -> CostModel | None:
            return cls(H200, request.dtype, 8, batch_last=False)

        def predicted_us(self, chain: Replacement) -> float | None:
            assert isinstance(chain, Chain)
            is_full = chain.rank_bound == min(chain.in_features, chain.out_features)
            return 10.0 if is_full else lower_us

    monkeypatch.setattr(lower_rank, "CostModel", Invented)


def layer(dims: str = "64x64", **options: Any) -> LayerRequest:
    return LayerRequest(dims, **{"budgets": ("50%",), "batch": 8, **options})


def test_an_h200_is_predicted_to_be_faster_at_a_third_of_full_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options: dict[str, Any] = {"budgets": ("25%", "50%"), "batch": 25_216, "dtype": "bfloat16"}
    request = layer("384x384", **options)
    model = CostModel(H200, "bfloat16", 25_216, batch_last=False)
    monkeypatch.setattr(lower_rank.CostModel, "of", lambda request, device: model)
    beside = Chain.parse("(1,48,48,8)*(6,64,64,1)")
    lower = lower_rank.faster(request, GPU, [beside])
    assert lower is not None
    assert lower.beside == beside
    assert lower.beside_us == model.predicted_us(beside)
    assert lower.predicted_us == model.predicted_us(lower.chain)
    assert lower.ratio <= lower_rank.CLEARLY_LESS
    assert 96 <= lower.chain.rank_bound < 384
    assert lower.chain in lower_rank.candidates(request)
    assert lower_rank.LowerRank.from_json(json.loads(json.dumps(lower.to_json()))) == lower


@pytest.mark.parametrize(
    ("lower_us", "options"),
    [
        (5.0, {"min_rank": 64}),
        (5.0, {"min_rank": 32}),
        (5.0, {"train": True}),
        (5.0, {"max_factors": 1}),
        (5.0, {"budgets": ("20%",)}),  # the candidates have half of the weights
        (5.0, {"block_sizes": "8"}),
        (5.0, {"families": "monarch"}),
        (5.0, {"structures": "low-rank"}),
        (9.5, {}),  # not clearly less
        (None, {}),  # no prediction
    ],
)
def test_no_chain_is_named(
    monkeypatch: pytest.MonkeyPatch, lower_us: float | None, options: dict[str, Any]
) -> None:
    invent(monkeypatch, 5.0)
    lower = lower_rank.faster(layer(), GPU, [FULL])
    assert lower == lower_rank.LowerRank(Chain.low_rank(64, 64, 16), 5.0, FULL, 10.0)
    invent(monkeypatch, lower_us)
    assert lower_rank.faster(layer(**options), GPU, [FULL]) is None


def test_a_final_without_chains_has_nothing_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    invent(monkeypatch, 5.0)
    assert lower_rank.faster(layer(), GPU, []) is None


def test_candidates_are_in_the_space_but_for_their_rank() -> None:
    request = layer("96x192", budgets=("25%", "75%"), min_use=0.8)
    chains = list(lower_rank.candidates(request))
    assert chains
    for chain in chains:
        assert 24 <= chain.rank_bound < 96
        assert not request.admits(chain)
        assert replace(request, min_rank=chain.rank_bound).admits(chain)
        share = chain.nnz / (96 * 192)
        assert 0.2 <= share <= 0.25 or 0.6 <= share <= 0.75
    # A search with the named rank can draw them.
    space = build(replace(request, min_rank=24, max_factors=2))
    assert space.complete
    assert set(chains) <= set(space.candidates)
    # Sizes that no d but 1 divides.
    assert all(chain[0].d == 1 for chain in lower_rank.candidates(layer("99x75")))


def test_the_answer_and_a_replayed_one_say_what_full_rank_costs(
    search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    invent(monkeypatch, 5.0)
    result = search(dims="64x64")
    (one,) = result.layers
    sentence = (
        "64x64: chains of lower rank are no candidates by default. (1,64,16,1)*(1,16,64,1), of "
        "rank 16 and 50% of the weights, is predicted to take 0.50 of the time of "
        f"{one.finalists[0].facts.chain}. It can express less: --min-rank 16 admits such chains."
    )
    monkeypatch.undo()  # a report needs no device
    for shown in (result, replay(str(result.folder))):
        assert sentence in str(shown)
        assert sentence in page.markdown(shown).replace("\\", "")  # it escapes asterisks
        assert sentence in re.sub("<[^>]*>", "", page.html(shown))
        written = json.loads(results_json.to_json(shown))
        assert written["notes"] == [sentence]
        jsonschema.validate(written, results_json.results_schema())
    # The study of an earlier version has no such key.
    (name,) = [one.request.study for one in result.layers]
    study = study_store.storage_of(result.request).load(name)
    value = dict(study.user_attrs["report"])
    del value["lower_rank"]
    study.set_user_attr("report", value)
    assert "lower rank" not in str(replay(str(result.folder)))


def test_each_of_several_sizes_has_its_own(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    invent(monkeypatch, 5.0)
    result = search(dims=("64x64", "64x128"))
    for size in ("64x64", "64x128"):
        assert f"{size}: chains of lower rank are no candidates by default." in str(result)
    assert len(json.loads(results_json.to_json(result))["notes"]) == 2


def test_a_cpu_and_a_passed_rank_say_nothing(
    search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = search(dims="64x64")
    assert "lower rank" not in str(result)
    assert "lower rank" not in page.markdown(result)
    invent(monkeypatch, 5.0)
    result = search(dims="64x64", min_rank=16)
    assert result.layers[0].lower_rank is None
    assert "lower rank" not in str(result)
