"""How the way to multiply is chosen on a CUDA device, with the device played by stand-ins."""

import itertools
import warnings

import pytest
import torch

from ksopt.errors import UnavailableError
from ksopt.kernels import cuda, families, general
from ksopt.kernels.families import Machine
from ksopt.pattern import Pattern

PATTERN = Pattern(4, 64, 64, 16)


class OnDevice(torch.Tensor):
    """A CPU tensor that says it is on CUDA device 0."""

    def get_device(self) -> int:
        return 0


class Clock:
    """Stands in for the device's time: each call of a way takes what the test says."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.calls: list[str] = []

    def way(self, name: str, ms: float):
        def call(x, weight):
            self.now_ms += ms
            self.calls.append(name)
            return name

        return call


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = clock.now_ms

        def elapsed_time(self, other):
            return other.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda _: warnings.catch_warnings())
    monkeypatch.setattr(
        Machine, "of_device", classmethod(lambda cls, _: cls((9, 0), 132, 228 * 1024))
    )
    monkeypatch.setattr(cuda, "_warned", set())
    cuda.forget()
    yield clock
    cuda.forget()


@pytest.fixture
def times(clock, monkeypatch):
    """Milliseconds by way; tiles of lanes16 take theirs in the order of their ranks."""
    table = {"lanes16": [1.0], "general": 9.0, "bmm": 3.0, "expand": 8.0, "bmm_loop": 8.0}
    tiles = itertools.count()

    def launcher(problem, config, device):
        rank = next(tiles)
        taken = table["lanes16"]
        return clock.way(f"lanes16 {rank}", taken[min(rank, len(taken) - 1)])

    monkeypatch.setattr(families.lanes16, "launcher", launcher)
    monkeypatch.setattr(general, "launcher", lambda *_: clock.way("general", table["general"]))
    monkeypatch.setattr(
        cuda,
        "_pytorch",
        lambda problem, name: cuda.Choice(name, clock.way(name, table.get(name, 50.0))),
    )
    return table


def operands(dtype=torch.float16, rows=1000, last=False):
    shape = (PATTERN.in_features, rows) if last else (rows, PATTERN.in_features)
    x = torch.zeros(shape, dtype=dtype).as_subclass(OnDevice)
    return x, torch.zeros(PATTERN.weight_shape, dtype=dtype)


@pytest.mark.usefixtures("clock")
def test_the_fastest_is_taken_and_kept(times):
    times["lanes16"] = [2.0, 1.0, 1.5]
    x, weight = operands()
    assert cuda.run(x, weight, False) == "lanes16 1"
    choice = cuda.choice_for(x, weight, False)
    assert choice is cuda.choice_for(x, weight, False)
    assert [us for name, us in choice.times_us if name == "lanes16"] == [2000.0, 1000.0, 1500.0]


def test_pytorch_is_taken_where_it_is_faster(times):
    times["bmm"] = 0.5
    assert cuda.run(*operands(), False) == "bmm"


def test_what_is_hopeless_is_timed_once(times, clock):
    cuda.run(*operands(), False)
    assert clock.calls.count("general") == 2  # a warm-up, and the round that drops it
    assert clock.calls.count("lanes16 0") > 3


def test_a_longer_batch_is_another_problem(times):
    cuda.run(*operands(rows=1000), False)
    cuda.run(*operands(rows=1023), False)
    assert len(cuda._choices) == 1
    cuda.run(*operands(rows=1024), False)
    assert len(cuda._choices) == 2


@pytest.mark.parametrize("why", ["off", "deterministic", "capturing", "busy"])
def test_nothing_is_timed_where_it_must_not_be(times, clock, monkeypatch, why):
    if why == "off":
        monkeypatch.setenv("KSOPT_TUNE", "off")
    elif why == "deterministic":
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    elif why == "capturing":
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    x, weight = operands()
    if why == "busy":
        with cuda._timing:
            assert cuda.run(x, weight, False) == "lanes16 0"
            assert cuda.run(x, weight, False) == "lanes16 0"
    else:
        assert cuda.run(x, weight, False) == "lanes16 0"
        assert cuda.run(x, weight, False) == "lanes16 0"
    assert clock.calls == ["lanes16 0"] * 2  # built once, called as often as asked
    assert not cuda._choices


def test_the_rule_is_bmm_where_no_family_computes_it(times, monkeypatch):
    monkeypatch.setenv("KSOPT_TUNE", "off")
    assert cuda.run(*operands(last=True), True) == "bmm"
    assert cuda.run(*operands(torch.float64), False) == "bmm"


def test_an_empty_batch_is_not_timed(times, clock):
    cuda.run(*operands(rows=0), False)
    assert len(clock.calls) == 1


def test_without_a_driver_pytorch_does_it_and_says_so_once(times, monkeypatch):
    def missing(*_):
        raise UnavailableError("The package cuda-bindings is not installed.")

    monkeypatch.setattr(Machine, "of_device", missing)
    monkeypatch.setattr(general, "launcher", missing)
    with pytest.warns(RuntimeWarning, match="cuda-bindings") as caught:
        found = cuda.run(*operands(), False)
    assert found == "bmm"
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cuda.run(*operands(rows=5), False) == "bmm"


def test_a_way_that_runs_out_of_memory_is_left_out(times, monkeypatch, clock):
    def too_big(problem, name):
        def call(x, weight):
            raise torch.OutOfMemoryError("no")

        return cuda.Choice(name, call if name == "expand" else clock.way(name, 3.0))

    monkeypatch.setattr(cuda, "_pytorch", too_big)
    x, weight = operands()
    assert cuda.run(x, weight, False) == "lanes16 0"
    assert "expand" not in dict(cuda.choice_for(x, weight, False).times_us)
