"""Explanation of a chain's speed: data movement, operations, and the binding one."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from ksopt.measure.roofline import Roofline
from ksopt.measure.timing import Measurement
from ksopt.patterns.chain import Chain, Pattern
from ksopt.search import SearchResult, finals
from ksopt.search.report import roofline
from ksopt.search.report.sections import written
from ksopt.search.results import Verdict

from one_layer import with_layer  # isort: skip

Search = Callable[..., SearchResult]
# A byte takes as long as ten operations.
DEVICE = Roofline("cpu", "float32", 1e10, 1e11, 0, 0, "")


def timed(us: float) -> Measurement:
    return Measurement(us, 0.99 * us, 1.01 * us, 20)


@pytest.fixture
def result(search: Search, monkeypatch: pytest.MonkeyPatch) -> SearchResult:
    """The result of chains that took 2 us in the final, beside a dense layer that took 8."""

    def final(request: object, device: object, chains: list[Chain], spare: object) -> dict:
        return {**{str(chain): timed(2) for chain in chains}, "dense": timed(8)}

    monkeypatch.setattr(finals, "final", final)
    return with_layer(search(max_factors=2), roofline=DEVICE)


@pytest.mark.parametrize(
    ("pattern", "batch", "memory_bound"),
    [
        (Pattern(1, 64, 64, 1), 1, True),  # all weights for one row
        (Pattern(1, 512, 512, 1), 4096, False),  # each weight for many rows
        (Pattern(64, 2, 2, 16), 4096, True),  # few operations for each feature
    ],
)
def test_what_binds_a_factor(pattern: Pattern, batch: int, memory_bound: bool) -> None:
    actual = roofline.Work.of(pattern, batch, DEVICE)
    assert actual.memory_bound is memory_bound
    assert actual.bytes_moved == pattern.bytes(batch, "float32")
    assert actual.flops == pattern.flops(batch)
    assert actual.floor_us == pytest.approx(max(actual.bytes_moved / 1e4, actual.flops / 1e5))
    three = roofline.Work.of(pattern, batch, DEVICE, passes=3)
    assert three.floor_us == pytest.approx(3 * actual.floor_us)


def test_a_sentence_for_each_chain(result: SearchResult) -> None:
    answer = result.layers[0].recommendations[0]
    assert answer.verdict is Verdict.USE
    assert answer.chosen is not None
    chain = answer.chosen.facts.chain
    (sentence,) = roofline.sentences(result.layers[0])
    dense = roofline.Work.of(Pattern(1, 64, 32, 1), 16, DEVICE)
    less = dense.flops / chain.flops(16)
    assert sentence.startswith(f"{chain} computes {less:.1f} times less than the dense layer")
    assert "all its factors are memory-bound, and the dense layer is memory-bound" in sentence
    floor = sum(roofline.Work.of(pattern, 16, DEVICE).floor_us for pattern in chain)
    assert f"an efficiency of {floor / 2:.2f}, the dense layer of {dense.floor_us / 8:.2f}" in (
        sentence
    )
    # What it saves and how much better it is done make up the four times that it is as fast.
    less, better = dense.floor_us / floor, 4 * floor / dense.floor_us
    assert sentence.endswith(f": {less:.1f} times less to do, done {better:.1f} times as well.")


def test_factors_that_are_bound_differently_are_named_in_a_short_sentence(
    result: SearchResult,
) -> None:
    (layer,) = result.layers
    (answer,) = layer.recommendations
    assert answer.chosen is not None
    chain = Chain.parse("(1,64,32,1)*(32,1,1,1)*(32,1,1,1)")
    chosen = replace(answer.chosen, facts=replace(answer.chosen.facts, chain=chain))
    fast_memory = replace(DEVICE, bandwidth=2e10)
    request = replace(layer.request, batch=4096)
    (sentence,) = roofline.sentences(
        replace(
            layer,
            request=request,
            roofline=fast_memory,
            recommendations=(replace(answer, chosen=chosen),),
        )
    )
    named = "factor 1 compute-bound, factor 2 memory-bound, factor 3 memory-bound."
    assert f"By this device's roofline, {named} The dense layer is compute-bound." in sentence


@pytest.mark.parametrize(
    ("floor", "dense_floor", "reached", "dense_reached", "reason"),
    [
        (0.5, 0.7, 0.6, 0.7, ": it is fast because there is less to do"),
        (0.5, 0.5, 0.8, 0.4, ": it is fast because its kernels come nearer to what the device"),
        (0.5, 1.0, 0.8, 0.4, ": 2.0 times less to do, done 2.0 times as well"),
    ],
)
def test_what_makes_it_fast(
    floor: float, dense_floor: float, reached: float, dense_reached: float, reason: str
) -> None:
    assert roofline._lead(floor, dense_floor, reached, dense_reached).startswith(reason)


@pytest.mark.parametrize("latency", [timed(10), Measurement(2, 1, 9, 20)], ids=["slower", "noise"])
def test_a_chain_that_is_not_faster_is_not_called_fast(
    result: SearchResult, latency: Measurement
) -> None:
    (answer,) = result.layers[0].recommendations
    assert answer.chosen is not None
    other = replace(answer, chosen=replace(answer.chosen, latency=latency))
    (sentence,) = roofline.sentences(replace(result.layers[0], recommendations=(other,)))
    assert sentence.endswith(
        f"{roofline.Work.of(Pattern(1, 64, 32, 1), 16, DEVICE).floor_us / 8:.2f}."
    )


def test_the_table_has_the_factors_and_dense(result: SearchResult) -> None:
    rows = roofline.table(result.layers[0]).rows
    chosen = result.layers[0].recommendations[0].chosen
    assert chosen is not None
    chain = chosen.facts.chain
    first = [row[0] for row in rows]
    assert first[0] == str(chain)
    assert first[-1] == "dense"
    assert first[1:-1] == [f"factor {n}: {pattern}" for n, pattern in enumerate(chain, start=1)]
    assert {row[4] for row in rows} == {"memory"}


def test_nothing_is_reported_where_nothing_was_measured(search: Search) -> None:
    result = search(trials=500, timeout_s=0.001)
    assert roofline.sentences(result.layers[0]) == []
    assert "Where the time goes" not in [section.title for section in written(result)]


@pytest.mark.slow
def test_the_code_of_a_report_runs(result: SearchResult) -> None:
    (use,) = [section for section in written(result) if section.title == "Use it"]
    assert "KSLinear" in use.code
    assert 'torch.compile(layer, backend="ksopt")' in use.code
    check = "import torch\nassert layer(torch.randn(3, 32)).shape == (3, 64)\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{use.code}\n{check}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_code_of_a_report_has_what_surrounds_the_layer(result: SearchResult) -> None:
    (layer,) = result.layers
    request = replace(layer.request, epilogue=("bias", "gelu"), siblings=3)
    (use,) = [
        section
        for section in written(with_layer(result, request=request))
        if section.title == "Use it"
    ]
    namespace: dict[str, Any] = {}
    exec(use.code.rpartition("# compiled")[0], namespace)
    assert namespace["layer"](torch.randn(3, 32)).shape == (3, 192)
    assert {part.activation for part in namespace["layer"].parts} == {"gelu"}


def test_the_code_of_a_report_has_a_gate(result: SearchResult) -> None:
    (layer,) = result.layers
    request = replace(layer.request, epilogue=("silu_gate",), siblings=2)
    (use,) = [
        section
        for section in written(with_layer(result, request=request))
        if section.title == "Use it"
    ]
    namespace: dict[str, Any] = {}
    exec(use.code.rpartition("# compiled")[0], namespace)
    x = torch.randn(3, 32)
    expected = functional.silu(namespace["gate"](x)) * namespace["up"](x)
    assert torch.equal(namespace["layer"](x), expected)
    assert namespace["up"].bias is None
