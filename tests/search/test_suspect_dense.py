"""Dense layers that are too slow to be true: warned of, and a final that met one held again."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ksopt.measure.timing import Measurement
from ksopt.patterns.chain import Chain
from ksopt.search import SearchRequest, finals, layers_of_model, run_search, suspect_dense
from ksopt.search.layer_request import LayerRequest
from ksopt.search.report import answers, results_json, terminal
from ksopt.search.results import SearchResult
from ksopt.search.suspect_dense import DenseLayer, dense_layer, warning_of
from ksopt.search.worker_processes import SpareProcess

Search = Callable[..., SearchResult]


def around(us: float) -> Measurement:
    return Measurement(us, 0.99 * us, 1.01 * us, 20)


def finals_of(*dense_us: float) -> tuple[Callable[..., dict[str, Measurement]], list[float]]:
    """Finals whose dense layers take so long, one after the other; and those that were held."""
    held: list[float] = []

    def final(
        request: LayerRequest, device: torch.device, chains: Sequence[Chain], spare: SpareProcess
    ) -> dict[str, Measurement]:
        held.append(dense_us[len(held)])
        chain = {str(chain): around(300.0 + place) for place, chain in enumerate(chains)}
        return {**chain, "dense": around(held[-1])}

    return final, held


@pytest.mark.parametrize(
    ("median_us", "floor_us", "kind", "warns"),
    [
        (14_000.0, 660.0, "cpu", True),  # as it was seen on a loaded CPU
        (2_839.0, 660.0, "cpu", False),
        (2_841.0, 660.0, "cpu", True),
        (90.0, 0.6, "cpu", False),  # a tiny layer is overhead
        (90.0, 0.6, "cuda", True),
        (22.0, 0.6, "cuda", False),
    ],
)
def test_far_above_its_floor_is_warned_of(
    median_us: float, floor_us: float, kind: str, warns: bool
) -> None:
    actual = DenseLayer(around(median_us), floor_us, kind)
    assert actual.over_floor == pytest.approx(median_us / floor_us)
    assert bool(actual.warning) == warns
    if median_us == 14_000.0:
        assert actual.warning.startswith(
            "The dense layer took 14,000 us (p20 to p80: 13,860 to 14,140), 21 times its roofline "
            "floor of 660 us"
        )


def test_far_below_its_floor_the_floor_is_not_a_fact(search: Search) -> None:
    assert DenseLayer(around(301.0), 600.0, "cpu").beats_floor == ""
    # A copy at 0.17 GB/s, as it was seen on a loaded CPU, is no machine's memory.
    assert "far less than its roofline floor" in DenseLayer(around(299.0), 600.0, "cpu").beats_floor
    result = search(trials=2)
    (layer,) = result.layers
    slow = replace(layer, roofline=replace(layer.roofline, bandwidth=1e3))
    assert "Something else was using the machine" in " ".join(answers.layer_warnings(slow))
    fast = replace(layer, roofline=replace(layer.roofline, bandwidth=1e15, rate=1e18))
    assert "its ceilings" not in " ".join(answers.layer_warnings(fast))


@pytest.mark.slow
@pytest.mark.parametrize(("train", "times"), [(False, 1), (True, 3)])
def test_the_floor_is_that_of_the_dense_product(search: Search, train: bool, times: int) -> None:
    result = search(trials=2, train=train)
    actual = dense_layer(result.layers[0])
    assert actual is not None
    assert actual.measured == result.layers[0].finalists[0].dense
    roof = result.layers[0].roofline
    # 16 rows of 32 inputs and 64 outputs in float32, no bias.
    moved, flops = 4 * (16 * 32 + 16 * 64 + 32 * 64), 2 * 16 * 32 * 64
    floor_us = 1e6 * max(moved / roof.bandwidth, flops / roof.rate)
    assert actual.floor_us == pytest.approx(times * floor_us)
    (layer,) = json.loads(results_json.to_json(result))["layers"]
    value = layer["dense_layer"]
    assert value["floor_us"] == actual.floor_us
    assert value["over_floor"] == actual.over_floor
    assert value["warning"] == (actual.warning or None)


def test_nothing_measured_is_nothing_doubted(search: Search) -> None:
    assert dense_layer(search(timeout_s=0.001).layers[0]) is None


def test_the_page_and_the_terminal_warn(
    search: Search, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(finals, "final", finals_of(14_000.0, 14_100.0, 14_200.0)[0])
    result = search(trials=2)
    words = "The dense layer took 14,000 us"
    terminal.print_result(result, sys.stdout)
    assert words in capsys.readouterr().out
    for name in ("report.md", "report.html"):
        assert words in (result.folder / name).read_text("utf-8")
    quiet = finals_of(100.0, 100.0, 100.0)[0]
    monkeypatch.setattr(finals, "final", quiet)
    again = search(trials=2)
    assert "times its roofline floor" not in (again.folder / "report.md").read_text("utf-8")


def test_a_models_sum_that_rests_on_one_says_so(
    quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(finals, "final", finals_of(*[14_000.0] * 3)[0])
    monkeypatch.setattr(suspect_dense, "_SUSPECT", 1e9)  # as if it had been as slow in the trials
    model = torch.nn.Sequential(torch.nn.Linear(32, 64))
    request = SearchRequest(
        layers_of_model(model), budgets=("50%",), batch=16, device="cpu", trials=2, out=tmp_path
    )
    run_search(request)
    page = (tmp_path / "report.md").read_text("utf-8")
    assert "Do not rely on that yet: the dense layers of 32x64 were strangely slow" in page
    assert "32x64: The dense layer took 14,000 us" in page


@pytest.mark.parametrize(
    ("dense_us", "held", "final_us"),
    [
        ((900.0,), 1, 900.0),
        ((2_019.0,), 1, 2_019.0),  # twice as long, and some
        ((16_000.0, 1_100.0), 2, 1_100.0),
        ((16_000.0, 31_000.0, 15_000.0), 3, 15_000.0),
        ((15_000.0, 31_000.0, 16_000.0), 3, 15_000.0),
    ],
)
def test_a_final_is_held_again_where_dense_was_strangely_slow(
    monkeypatch: pytest.MonkeyPatch, dense_us: tuple[float, ...], held: int, final_us: float
) -> None:
    final, heard = finals_of(*dense_us)
    monkeypatch.setattr(finals, "final", final)
    notes: list[str] = []
    request: Any = LayerRequest("32x64", batch=16, device="cpu")
    with SpareProcess() as spare:
        actual = finals.trusted(
            request, torch.device("cpu"), [Chain.dense(32, 64)], spare, 1_000.0, notes.append
        )
    assert len(heard) == held
    assert len(notes) == held - 1
    assert actual["dense"].median_us == final_us
    if notes:
        assert "in the final and 1,000 us in the trials: the final is held again" in notes[0]


def test_several_are_warned_of_in_one_sentence() -> None:
    slow, fast = (DenseLayer(around(us), 100.0, "cuda") for us in (5_000.0, 150.0))
    assert warning_of({"8x8": fast}) == ""
    assert warning_of({"8x8": fast, "8x16": slow}) == f"8x16: {slow.warning}"
    assert warning_of({"8x8": slow, "8x16": slow, "16x8": fast}).startswith(
        "Far above their roofline floors were the dense layers of 8x8 (5,000 us, 50 times), "
        "8x16 (5,000 us, 50 times). The ceilings of this device, measured just before,"
    )
