"""The choice of gradients' kernels; a family that calls torch takes part on the CPU."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from checks import H200
from torch import Tensor

from ksopt.errors import InvalidInputError
from ksopt.kernels import gradient_autotuner, tuning_cache
from ksopt.kernels.backends.base import backend_of
from ksopt.kernels.families import gradient_base
from ksopt.kernels.families.gradient_base import GradientProblem, gradient_families
from ksopt.kernels.gradient_autotuner import (
    GradientQuestion,
    Without,
    expected,
    fastest,
    kernel_of,
    ranked,
)
from ksopt.kernels.gradient_record import GradientKey, GradientRecord
from ksopt.measure.benchmark_entry import BenchmarkEntry
from ksopt.measure.interleaved import EntryResult
from ksopt.measure.measurement import Measurement
from ksopt.ops import input_gradient, weight_gradient
from ksopt.patterns.chain import Pattern
from tests.kernels import toy_gradients

FACTOR = Pattern(2, 3, 4, 2)
PROBLEM = GradientProblem("weight", (FACTOR,), "float32", with_bias=True)
CPU, ROWS = torch.device("cpu"), 50


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[None]:
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(type(backend_of("cpu")), "spec", lambda *_: H200)
    gradient_autotuner.forget()
    yield
    gradient_autotuner.forget()


@pytest.fixture
def raced(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The names in each race; the last entry is the fastest."""
    seen: list[list[str]] = []

    def race(entries: Sequence[BenchmarkEntry], *_: object) -> list[EntryResult]:
        seen.append([one.name for one in entries])
        times = [10.0 * (len(entries) - at) for at in range(len(entries))]
        return [
            EntryResult(one, (us,), Measurement.of([us]), host_us=us)
            for one, us in zip(entries, times, strict=True)
        ]

    monkeypatch.setattr(gradient_autotuner, "race", race)
    return seen


def question(rows: int = ROWS, us: float = 1.4) -> GradientQuestion:
    by_pytorch = partial(weight_gradient._by_pytorch, FACTOR.a, FACTOR.d, True)
    shapes = ((rows, FACTOR.out_features), (rows, FACTOR.in_features))
    without = Without("pytorch", us, by_pytorch, by_pytorch)
    return GradientQuestion(PROBLEM, rows, CPU, H200, without, shapes)


def test_a_family_from_outside_computes_gradients(raced: list[list[str]]) -> None:
    grad, x = toy_gradients.drawn(ROWS)
    with toy_gradients.registered():
        kernel, is_final = kernel_of(question())
        of_weight, of_bias = kernel(grad, x)
        assert is_final
        assert raced == [
            ["pytorch", *(f"toy_weight_grad(ToyTile(size={size}))" for size in (8, 4))]
        ]
        torch.testing.assert_close(
            of_weight, weight_gradient.weight_grad_decomposed(grad, x, FACTOR.a, FACTOR.d, False)
        )
        torch.testing.assert_close(of_bias, grad.sum(0))


def test_it_is_measured_once_and_recorded(raced: list[list[str]]) -> None:
    with toy_gradients.registered():
        for _ in range(2):
            kernel_of(question())
        gradient_autotuner.forget()  # as in another process
        assert kernel_of(question(rows=ROWS + 3))[0] is not None
    assert len(raced) == 1
    (record,) = tuning_cache.load_all(backend_of("cpu").fingerprint(CPU), GradientRecord)
    assert (record.key, record.batch) == (GradientKey(PROBLEM, 6), ROWS)
    assert record.choice.way == "toy_weight_grad"
    assert record.choice.config == {"size": 4}
    assert [one.median_us for one in record.timed] == [30.0, 20.0, 10.0]
    assert GradientRecord.from_json(json.loads(json.dumps(record.to_json()))) == record
    gradient_autotuner.forget()
    assert kernel_of(question())[0] is None  # the family is no longer there: nothing to choose


def test_what_siblings_read_is_raced_beside_what_one_chain_reads(raced: list[list[str]]) -> None:
    chain, by_pytorch = (Pattern(1, 3, 2, 2), Pattern(2, 2, 4, 1)), input_gradient._by_pytorch
    pair = tuple(p.weight_shape for p in chain)
    for count in (1, 3):
        problem = GradientProblem("chain_input", chain, "float32", siblings=count)
        without = Without("factors", 1.4, by_pytorch, by_pytorch)
        shapes = (((ROWS, 6),) * count, pair * count)
        with toy_gradients.registered(of=toy_gradients.ToyInputGrad):
            question_of = GradientQuestion(problem, ROWS, CPU, H200, without, shapes)
            kernel, is_final = kernel_of(question_of)
            assert is_final
            grads, weights = ([torch.randn(size) for size in sizes] for sizes in shapes)
            to, between = kernel(grads, weights)
            assert to.shape == (ROWS, 8)
            assert between.shape == ((count, ROWS, 4) if count > 1 else (ROWS, 4))
    assert raced == 2 * [["factors", *(f"toy_input_grad(ToyTile(size={size}))" for size in (8, 4))]]
    records = tuning_cache.load_all(backend_of("cpu").fingerprint(CPU), GradientRecord)
    assert {one.key.problem.siblings for one in records} == {1, 3}
    for one in records:
        assert GradientRecord.from_json(json.loads(json.dumps(one.to_json()))) == one


def test_what_is_activated_has_a_record_of_its_own(raced: list[list[str]]) -> None:
    """Its race calls what is raced without the activation: neither waits for the other."""
    chain = (Pattern(1, 3, 2, 2), Pattern(2, 2, 4, 1), Pattern(1, 4, 3, 2))
    problem = GradientProblem("chain_input", chain, "float32", activation="gelu")
    plain = GradientProblem("chain_input", chain[:2], "float32")
    by_pytorch = partial(input_gradient.activated_by_pytorch, activation="gelu")
    sizes = (((ROWS, 6),), tuple(p.weight_shape for p in chain))

    def apart(grads: list[Tensor], weights: list[Tensor], below: Tensor) -> tuple[Tensor, ...]:
        without = Without("factors", 1.4, input_gradient._by_pytorch, input_gradient._by_pytorch)
        of_plain = (sizes[0], sizes[1][:2])
        kernel_of(GradientQuestion(plain, ROWS, CPU, H200, without, of_plain))
        return by_pytorch(grads, weights, below)

    with toy_gradients.registered(of=toy_gradients.ToyInputGrad):
        without = Without("factors", 1.4, apart, by_pytorch)
        began = time.monotonic()
        kernel_of(GradientQuestion(problem, ROWS, CPU, H200, without, (*sizes, (ROWS, 6))))
        assert time.monotonic() - began < 30
    assert len(raced) == 2
    records = tuning_cache.load_all(backend_of("cpu").fingerprint(CPU), GradientRecord)
    assert {one.key.problem for one in records} == {problem, plain}


def test_a_wrong_kernel_is_left_out(raced: list[list[str]]) -> None:
    with (
        toy_gradients.registered(error=0.1),
        pytest.warns(RuntimeWarning, match=r"toy_weight_grad.*left out: relative error"),
    ):
        assert kernel_of(question()) == (None, True)
    assert raced == [["pytorch"]]


def test_what_is_predicted_to_be_far_slower_is_not_timed(raced: list[list[str]]) -> None:
    with toy_gradients.registered(predicted=151.0):
        assert kernel_of(question(us=100.0)) == (None, True)
    with toy_gradients.registered(predicted=120.0):
        kernel_of(question(us=100.0))
        kernel_of(question(us=190.0, rows=2 * ROWS))
    assert [names.count("pytorch") for names in raced] == [1, 0]


def test_a_kernel_that_does_not_run_is_left_out(
    raced: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(*_: object) -> None:
        raise RuntimeError("too many resources")

    monkeypatch.setattr(toy_gradients.ToyWeightGrad, "launcher", lambda *_: call)
    with (
        toy_gradients.registered(),
        pytest.warns(RuntimeWarning, match="it does not run here: too many resources"),
    ):
        assert kernel_of(question()) == (None, True)
    assert raced == [["pytorch"]]


def test_where_no_kernel_is_right_nothing_else_is_left(raced: list[list[str]]) -> None:
    with (
        toy_gradients.registered(error=0.2),
        pytest.warns(RuntimeWarning, match="toy_weight_grad"),
    ):
        assert kernel_of(question(us=190.0)) == (None, True)
    assert raced == [["pytorch"]]


@pytest.mark.parametrize(("mode", "us"), [("model", 1.4), ("model", 0.5), ("off", 1.4)])
def test_what_is_not_measured_is_predicted(
    raced: list[list[str]], monkeypatch: pytest.MonkeyPatch, mode: str, us: float
) -> None:
    monkeypatch.setenv("KSOPT_TUNE", mode)
    with toy_gradients.registered():
        kernel, is_final = kernel_of(question(us=us))
    assert (kernel is not None) == (mode == "model" and us > 1)
    assert is_final
    assert not raced


def test_before_there_is_anything_to_time_the_record_answers(
    raced: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_autotuner, "spec_of", lambda _: H200)
    with toy_gradients.registered():
        before = expected(PROBLEM, ROWS, CPU, 100.0)
        assert before is not None
        assert before.tile.size == 8
        assert expected(PROBLEM, ROWS, CPU, 0.5) is None
        gradient_autotuner.forget()
        kernel_of(question())
        gradient_autotuner.forget()
        after = expected(PROBLEM, ROWS, CPU, 0.5)
        assert after is not None
        assert after.tile.size == 4
        monkeypatch.setenv("KSOPT_TUNE", "model")
        assert expected(PROBLEM, ROWS, CPU, 0.5) is None


def test_the_best_launch_of_each_tile_is_a_candidate() -> None:
    with toy_gradients.registered():
        several = ranked(PROBLEM, ROWS, H200)
        assert [(one.tile.size, one.launch.blocks) for one in several] == [(8, 2), (4, 2)]
        assert fastest(PROBLEM, ROWS, H200, 0.9) is None
        other = replace(PROBLEM, factors=(Pattern(2, 3, 4, 3),))
        assert ranked(other, ROWS, H200) == ()


def test_names_are_used_once() -> None:
    with toy_gradients.registered() as family, pytest.raises(InvalidInputError, match="already"):
        gradient_base.register_gradient_family(family)
    with pytest.raises(InvalidInputError, match="not a family of gradients' kernels"):
        gradient_base.unregister_gradient_family("toy_weight_grad")
    names = {kind: {one.name for one in gradient_families(kind)} for kind in gradient_base.KINDS}
    assert names == {
        "weight": {"weight_grad_fma", "weight_grad_mma16", "weight_grad_wgmma16"},
        "chain_weights": {"chain_grads_wgmma16"},
        "chain_input": {"input_grad_wgmma16"},
    }


@pytest.mark.parametrize(
    "broken",
    [
        {"gradient": "bias"},
        {"pattern": "no"},
        {"dtype": None},
        {"siblings": 0},
        {"activation": "no"},
        {"activation": "gelu"},  # of no product: it has too few factors
    ],
)
def test_a_key_of_something_else_is_refused(broken: dict[str, Any]) -> None:
    values = GradientKey(PROBLEM, 6).to_json()
    assert GradientKey.from_json(values) == GradientKey(PROBLEM, 6)
    with pytest.raises(ValueError, match=r"."):
        GradientKey.from_json(values | broken)
