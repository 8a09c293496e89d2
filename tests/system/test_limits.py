"""Sizes that no machine can hold are refused at once, with a sentence; others are not."""

import time
from pathlib import Path

import pytest
import torch

from ksopt.cli.main import main
from ksopt.errors import InvalidInputError
from ksopt.patterns.size import Dims
from ksopt.search import LayerRequest, feasibility
from ksopt.search.space.enumerate import check_listable
from ksopt.search.space.factorizations import count, triples
from ksopt.search.space.space import build
from ksopt.system import limits

CPU = torch.device("cpu")
MUCH = "99999999999999"
SEARCH = ("search", "--dims", "16x24", "--device", "cpu")


def test_this_machine_has_some_memory_and_not_more_than_there_is() -> None:
    available = limits.available_bytes("cpu")
    assert available is not None
    assert 2**24 < available < 2**50
    assert limits.available_bytes("meta") is None


def test_the_least_limit_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(limits, "_system_bytes", lambda: 2**40)
    assert limits.available_bytes("cpu") in (2**40, limits._group_bytes(Path("/sys/fs/cgroup")))
    (tmp_path / "memory.max").write_text("1000000\n", encoding="ascii")
    (tmp_path / "memory.current").write_text("900000\n", encoding="ascii")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 300\n", encoding="ascii")
    assert limits._group_bytes(tmp_path) == 100_300
    (tmp_path / "memory.max").write_text("max\n", encoding="ascii")
    assert limits._group_bytes(tmp_path) is None
    monkeypatch.setattr("resource.getrlimit", lambda kind: (2**40, 2**40))
    left = limits._process_bytes()
    assert left is not None
    assert 2**39 < left < 2**40


def test_a_gpu_has_what_is_free_and_what_torch_does_not_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (1000, 5000))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: 300)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda device: 100)
    assert limits.available_bytes("cuda:0") == 1200
    with pytest.raises(InvalidInputError, match="and cuda:0 has 1,200 bytes available: a batch of"):
        limits.check_product((10, 10), 100, 11, "float32", "cuda:0", "it")
    limits.check_product((10, 10), 100, 10, "float32", "cuda:0", "it")


def test_a_batch_that_fits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "available_bytes", lambda device: 4 * (20 * 7 + 100) + 79)
    limits.check_product((8, 12), 100, 7, "float32", CPU, "it")
    with pytest.raises(InvalidInputError, match="a batch of at most 7 fits"):
        limits.check_product((8, 12), 100, 8, "float32", CPU, "it")
    with pytest.raises(InvalidInputError, match="a batch of at most 7 fits"):
        limits.check_product((8, 12), 100, 10**30, "float32", CPU, "it")
    with pytest.raises(InvalidInputError, match="not even a batch of 1 fits"):
        limits.check_product((8, 12), 10**9, 1, "float32", CPU, "it")


def test_what_a_search_needs_is_what_it_takes() -> None:
    """No more than the peak of the very tensors that a trial draws."""
    request = LayerRequest("64x96", batch=50, budgets=("50%",))
    x, y, weights = 50 * 64, 50 * 96, 64 * 96
    assert feasibility.least_bytes(request, 50) == max(
        4 * x, 4 * x + 8 * weights, 4 * (x + y + weights)
    )
    half = LayerRequest("64x96", batch=10**6, budgets=("50%",), dtype="float16")
    assert feasibility.least_bytes(half, 10**6) == 6 * 64 * 10**6
    training = LayerRequest("64x96", batch=10**6, budgets=("50%",), train=True)
    assert feasibility.least_bytes(training, 10**6) == 4 * 2 * (160 * 10**6 + weights)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ((*SEARCH, "--batch", MUCH), "batch 99,999,999,999,999 of in_features=16, out_features=24"),
        ((*SEARCH, "--workers", "1000000"), "workers 1,000,000: give at most "),
        (
            ("search", "--dims", "999999999x999999999", "--device", "cpu"),
            "not even a batch of 1 fits, so give a smaller layer",
        ),
        (
            ("search", "--dims", "16x24", "999999999x999999999", "--device", "cpu"),
            "batch 256 of in_features=999999999, out_features=999999999",
        ),
        (
            ("tune", "--pattern", "(1,8,8,1)", "--batch", MUCH, "--device", "cpu"),
            "factor (1,8,8,1)",
        ),
        (
            ("bench", "kernels", "--patterns", "(1,8,8,1)", "--batch", MUCH, "--device", "cpu"),
            "chain (1,8,8,1)",
        ),
        (
            ("bench", "kernels", "--patterns", "(1,8,8,1)", "--workers", "999", "--device", "cpu"),
            "workers 999: give at most ",
        ),
        (("explain", "torch.nn:Identity", "--input", f"{MUCH}x8"), f"--input {MUCH}x8 takes "),
        (("space", "--dims", "735134400x735134400"), "has: give a size with fewer divisors"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_done(
    options: tuple[str, ...],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    began = time.monotonic()
    assert main(options) == 2
    assert time.monotonic() - began < 10
    out, errors = capsys.readouterr()
    assert out == ""
    assert sentence in errors
    assert len(errors.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_worker_must_have_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "available_bytes", lambda device: 10**9)
    limits.check_workers(5)
    with pytest.raises(InvalidInputError, match="of memory are available: give at most 5"):
        limits.check_workers(6)
    monkeypatch.setattr(limits, "available_bytes", lambda device: 1)
    limits.check_workers(1)  # this process, which is there already


def test_large_but_sensible_layers_are_listed() -> None:
    for size in (Dims(53248, 16384), Dims(997_920, 720_720)):  # those have the most divisors
        check_listable(size)
    space = build(LayerRequest("53248x16384", budgets=("1%",), max_factors=2))
    assert len(space.candidates) > 10


def test_triples_are_counted_without_listing_them() -> None:
    assert all(count(n) == len(triples(n)) for n in range(1, 300))
