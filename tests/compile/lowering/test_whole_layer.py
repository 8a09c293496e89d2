"""Layers are lowered as a whole if that is faster by the autotuner's times of their plans."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ksopt.compile.lowering import whole_layer
from ksopt.kernels import plan_autotuner
from ksopt.kernels.problem import EMPTY, Epilogue, Problem
from ksopt.patterns.chain import Chain
from tests.kernels import toy_chains

CHAIN = Chain.parse("(1,8,4,4)*(4,4,8,1)")
ROWS = 1 << 20  # an epilogue then takes time


@pytest.fixture(autouse=True)
def toy():
    with toy_chains.registered() as family:
        yield family


def is_whole(monkeypatch, epilogue, **times_us):
    """With these times of each way."""
    timed = [SimpleNamespace(way=way, median_us=us, weight="") for way, us in times_us.items()]
    monkeypatch.setattr(plan_autotuner, "tuned", lambda *_, **__: SimpleNamespace(timed=timed))
    problem = Problem(CHAIN, "float32", False, epilogue=epilogue)
    return whole_layer.is_whole(problem, ROWS, torch.device("cpu"), tune="measure")


@pytest.mark.parametrize("epilogue", [Epilogue(), Epilogue(True)])
def test_a_product_by_one_matrix_is_a_whole_layer_with_its_bias(monkeypatch, epilogue):
    assert is_whole(monkeypatch, epilogue, factors=9e9, toy_chain=8e9, merged=7e9)
    assert not is_whole(monkeypatch, epilogue, factors=6e9, toy_chain=8e9, merged=7e9)


@pytest.mark.parametrize("epilogue", [Epilogue(True, "gelu"), Epilogue(residual=True)])
def test_what_follows_a_product_by_one_matrix_is_inductors(monkeypatch, epilogue):
    assert not is_whole(monkeypatch, epilogue, factors=9e9, toy_chain=8e9, merged=7e9)
    assert is_whole(monkeypatch, epilogue, factors=9e9, toy_chain=6e9, merged=7e9)


def test_one_kernel_of_inductors_for_two_steps_counts(monkeypatch):
    """The race calls two operations behind the matrix; Inductor has one kernel for both."""
    both = Epilogue(True, "gelu", True)
    gain = whole_layer._fused_gain_us(
        Problem(CHAIN, "float32", False, epilogue=both), ROWS, 1, behind_bias=True
    )
    assert gain > 0
    times = {"factors": 9e9, "merged": 7e9}
    assert not is_whole(monkeypatch, both, toy_chain=7e9 - gain / 2, **times)
    assert is_whole(monkeypatch, both, toy_chain=7e9 - 2 * gain, **times)


def test_a_launch_per_factor_is_a_whole_layer_if_the_last_computes_the_epilogue(monkeypatch):
    times = {"factors": 5e9, "toy_chain": 8e9, "merged": 7e9}
    both = Epilogue(True, "gelu", True)
    assert not is_whole(monkeypatch, both, **times)
    choice = SimpleNamespace(way="decode_fma")
    monkeypatch.setattr(whole_layer.planner, "choice_of_factor", lambda *_: choice)
    assert is_whole(monkeypatch, both, **times)
    assert is_whole(monkeypatch, Epilogue(True), **times)
    assert not is_whole(monkeypatch, Epilogue(), **times)  # there is nothing to gain
    monkeypatch.setattr(whole_layer.planner, "whole_choice", lambda *_: None)
    problem = Problem(CHAIN, "float32", False, epilogue=both)
    place = torch.device("cpu")
    assert whole_layer.in_words(problem, ROWS, place, "stored") == "One launch per factor"
    trained = whole_layer.is_whole(problem, ROWS, place, "trained", tune="measure")
    assert not trained


def test_a_pair_is_a_whole_layer_where_it_beats_launches_with_inductors_kernel(monkeypatch):
    both = Epilogue(True, "gelu", True)
    problem = Problem(CHAIN, "float32", False, epilogue=both)
    gain = whole_layer._fused_gain_us(problem, ROWS, 1)
    assert is_whole(monkeypatch, both, factors=6e9, pair=6e9 - 2 * gain)
    assert not is_whole(monkeypatch, both, factors=6e9, pair=6e9 - gain / 2)
    choice = SimpleNamespace(way="decode_fma")
    monkeypatch.setattr(whole_layer.planner, "choice_of_factor", lambda *_: choice)
    assert is_whole(monkeypatch, both, factors=6e9, pair=6e9 - gain / 2)


def test_a_reader_that_activates_is_compared_with_products_alone(monkeypatch):
    choice = SimpleNamespace(way="decode_fma")
    monkeypatch.setattr(whole_layer.planner, "choice_of_factor", lambda *_: choice)

    def tuned(problem, *_, alone):
        us = 5e9 if problem.epilogue.is_empty else 6e9
        return SimpleNamespace(timed=[SimpleNamespace(way="factors", median_us=us, weight="")])

    monkeypatch.setattr(plan_autotuner, "tuned", tuned)
    problem = Problem(CHAIN, "float32", False, epilogue=Epilogue(True, "gelu"))
    arguments = (problem, ROWS, torch.device("cpu"), "stored")
    assert whole_layer.is_whole(*arguments, tune="measure")
    assert not whole_layer.is_whole(*arguments, beside_reader=EMPTY, tune="measure")


def test_launches_without_a_rival_are_measured_where_the_last_computes_the_epilogue(monkeypatch):
    """Also without the epilogue, where a reader may compute it."""
    choice = SimpleNamespace(way="decode_fma")
    monkeypatch.setattr(whole_layer.planner, "choice_of_factor", lambda *_: choice)
    monkeypatch.setattr(whole_layer.planner, "whole_choice", lambda *_: None)
    us_of = {"within": 0.0}

    def tuned(problem, *_, alone):
        us = 5e9 if problem.epilogue.is_empty else us_of["within"]
        timed = [SimpleNamespace(way="factors", median_us=us, weight="")]
        return SimpleNamespace(timed=timed) if alone else None

    monkeypatch.setattr(plan_autotuner, "tuned", tuned)
    problem = Problem(CHAIN, "float32", False, epilogue=Epilogue(True, "gelu"))
    arguments = (problem, ROWS, torch.device("cpu"), "stored")
    for us_of["within"], is_it in ((4e9, True), (6e9, False)):
        assert whole_layer.is_whole(*arguments, tune="measure")
        assert whole_layer.is_whole(*arguments, beside_reader=EMPTY, tune="measure") == is_it
    siblings = replace(problem, epilogue=Epilogue(True), siblings=3)
    assert not whole_layer.is_whole(siblings, *arguments[1:], tune="measure")
    choice.way = "gather_mma"  # has no epilogue
    assert not whole_layer.is_whole(*arguments, tune="measure")


@pytest.mark.parametrize("gain", [0.9, 1.1])
@pytest.mark.parametrize("way", ["decode_fma", "gather_mma"])
def test_a_residual_behind_launches_is_compared_with_a_readers_kernel(monkeypatch, way, gain):
    """That reads it and writes the sum. Kernels of whole layers keep it."""
    choice = SimpleNamespace(way=way)
    monkeypatch.setattr(whole_layer.planner, "choice_of_factor", lambda *_: choice)
    after = Epilogue(True, "none", True)
    problem = Problem(CHAIN, "float32", False, epilogue=after)
    beside = replace(after, residual=False)
    reader_us = whole_layer._reader_us(problem, beside, ROWS, 1)
    assert reader_us > 0

    def tuned(problem, *_, alone):
        us = 5e9 + gain * reader_us if problem.epilogue.residual else 5e9
        timed = [("factors", us)] if way == "decode_fma" else [("factors", 9e9), ("toy_chain", us)]
        return SimpleNamespace(
            timed=[SimpleNamespace(way=way, median_us=us, weight="") for way, us in timed]
        )

    monkeypatch.setattr(plan_autotuner, "tuned", tuned)
    arguments = (problem, ROWS, torch.device("cpu"), "stored")
    is_whole = whole_layer.is_whole(*arguments, beside_reader=beside, tune="measure")
    assert is_whole == (gain < 1 or way == "gather_mma")
    assert whole_layer.is_whole(*arguments, tune="measure")


def test_launches_without_a_rival_have_times(monkeypatch, tmp_path):
    """Predicted until they are measured alone."""
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path))
    plan_autotuner.forget()
    problem = Problem(CHAIN, "float32", False, epilogue=Epilogue(True, "gelu"))
    place = torch.device("cpu")
    layer = (problem, 8, place, "stored")
    monkeypatch.setattr(plan_autotuner, "has_rivals", lambda *_: False)
    assert whole_layer.launch_times(*layer) is None  # PyTorch's product leaves the epilogue
    choice = SimpleNamespace(way="decode_fma")
    monkeypatch.setattr(whole_layer.planner, "choice_of_factor", lambda *_: choice)
    predicted = whole_layer.launch_times(*layer)
    assert predicted.predicted_us > 0
    assert predicted.measured_us is None
    assert plan_autotuner.tuned(problem, 8, place) is None
    record = plan_autotuner.tuned(problem, 8, place, alone=True)
    measured = whole_layer.launch_times(*layer)
    assert measured.measured_us == record.chosen(False).median_us
