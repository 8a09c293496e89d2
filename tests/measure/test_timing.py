"""The timing protocol: what it measures, how it compares, how long it takes."""

import time
from collections.abc import Callable, Iterator

import pytest
import torch

from ksopt.errors import InvalidInputError
from ksopt.measure import device, device_types, interleaved, timers, timing
from ksopt.measure.timing import Comparison, Measurement, compare, measure


def sleeper(seconds: float) -> Callable[[], None]:
    return lambda: time.sleep(seconds)


class Turned:
    """A clock that goes on only as a test says: nobody else can hold the functions up."""

    def __init__(self) -> None:
        self.now_us = 0.0

    def taking(self, microseconds: float) -> Callable[[], None]:
        def call() -> None:
            self.now_us += microseconds

        return call

    def perf_counter(self) -> float:
        return self.now_us / 1e6

    def perf_counter_ns(self) -> int:
        return round(self.now_us * 1e3)


@pytest.fixture
def turned(monkeypatch: pytest.MonkeyPatch) -> Iterator[Turned]:
    clock = Turned()
    monkeypatch.setattr(timers, "time", clock)
    monkeypatch.setattr(interleaved, "time", clock)
    monkeypatch.setattr(timers, "flush_bytes", lambda cache_bytes: 2**16)  # takes no time there
    device_types._timer.cache_clear()
    yield clock
    device_types._timer.cache_clear()


def test_a_known_time_is_measured(turned: Turned) -> None:
    calls = {"5 ms": turned.taking(5_000), "1 ms": turned.taking(1_000)}
    results = measure(calls, "cpu", max_seconds=0.3)
    assert list(results) == ["5 ms", "1 ms"]
    assert [one.median_us for one in results.values()] == pytest.approx([5_000, 1_000])
    assert compare(results["1 ms"], results["5 ms"]) is Comparison.FASTER


def test_the_clock_is_the_walls() -> None:
    results = measure({"5 ms": sleeper(0.005)}, "cpu", max_seconds=0.1)
    assert results["5 ms"].median_us >= 5_000  # sleep never returns early


def test_variants_take_turns_and_each_leads() -> None:
    order: list[str] = []
    calls = {name: (lambda name=name: (order.append(name), time.sleep(1e-4))) for name in "abc"}
    measure(calls, "cpu", max_seconds=0.01, min_repeats=3, max_repeats=3, warmup_calls=1)
    timed = order[2 * 3 :]  # a warm-up call and a look at how long it takes, of each
    rounds = ["".join(timed[i : i + 3]) for i in range(0, len(timed), 3)]
    assert sorted(rounds) == ["abc", "bca", "cab"]


def test_a_slow_function_gets_few_repeats() -> None:
    began = time.monotonic()
    results = measure({"slow": sleeper(0.1)}, "cpu", max_seconds=0.1, min_repeats=50)
    assert 3 <= results["slow"].repeats <= 5
    assert time.monotonic() - began < 3


def test_repeats_stop_at_the_most() -> None:
    results = measure({"none": lambda: None}, "cpu", max_seconds=10, max_repeats=4, min_repeats=1)
    assert results["none"].repeats == 4


def test_what_is_too_short_for_the_clock_is_batched() -> None:
    results = measure({"pass": lambda: None, "2 ms": sleeper(0.002)}, "cpu", max_seconds=0.05)
    assert results["pass"].calls_per_sample > 1
    assert results["2 ms"].calls_per_sample == 1
    # a call's share of the batch, not the batch
    assert results["pass"].median_us < results["2 ms"].median_us


def test_caches_are_cold_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[torch.Tensor] = []
    fill = torch.Tensor.fill_
    monkeypatch.setattr(
        torch.Tensor, "fill_", lambda self, value: (written.append(self), fill(self, value))[1]
    )
    limits = {"max_seconds": 0.05, "min_repeats": 3, "max_repeats": 3}
    measure({"none": lambda: None}, "cpu", cold=False, **limits)
    assert not written
    measure({"none": lambda: None}, "cpu", **limits)
    assert len(written) >= 3
    assert all(buffer.nbytes >= 2**20 for buffer in written)


def test_it_stops_when_the_medians_stand() -> None:
    limits = {"max_seconds": 20.0, "min_repeats": 5, "max_repeats": 2000}
    results = measure({"5 ms": sleeper(0.005)}, "cpu", precision=0.2, **limits)["5 ms"]
    assert 5 <= results.repeats < 2000
    # 1.2533 / 1.683 of the band, by the root of the count
    assert 0.7447 * results.noise / results.repeats**0.5 <= 0.2 * 1.001


def test_hopeless_rivals_are_given_up_and_no_others(turned: Turned) -> None:
    calls = {
        "ours": turned.taking(500),
        "best": turned.taking(4000),
        "worst": turned.taking(20_000),
    }
    results = measure(
        calls, "cpu", max_seconds=0.2, min_repeats=6, hopeless=2.0, rivals=["best", "worst"]
    )
    assert [name for name, one in results.items() if one.given_up] == ["worst"]
    assert results["worst"].repeats == 2
    assert results["worst"].median_us == 20_000
    assert results["ours"].repeats == results["best"].repeats >= 3


def test_what_is_too_slow_beside_a_reference_is_given_up(turned: Turned) -> None:
    calls = {"slow": turned.taking(10_000), "reference": turned.taking(1000)}
    limits = {"max_seconds": 0.05, "against": "reference"}
    results = measure(calls, "cpu", hopeless=3.0, **limits)
    assert results["slow"].given_up
    assert not results["reference"].given_up
    assert results["slow"].repeats == results["reference"].repeats == 2
    calls = {"fast": turned.taking(1000), "reference": turned.taking(10_000)}
    fast = measure(calls, "cpu", hopeless=0.5, **limits)
    assert not any(one.given_up for one in fast.values())
    with pytest.raises(InvalidInputError, match="against='x' is none of a"):
        measure({"a": lambda: None}, "cpu", hopeless=2, against="x")


@pytest.mark.parametrize("wrong", [{"precision": 0.0}, {"hopeless": 1.0}])
def test_senseless_rules_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        measure({"none": lambda: None}, "cpu", **wrong)


def test_percentiles_are_numpys() -> None:
    numpy = pytest.importorskip("numpy")
    samples = torch.rand(37).tolist()
    results = Measurement.of(samples)
    expected = numpy.quantile(samples, [0.5, 0.2, 0.8])
    assert [results.median_us, results.p20_us, results.p80_us] == pytest.approx(expected.tolist())
    assert results.noise == pytest.approx((expected[2] - expected[1]) / expected[0])


@pytest.mark.parametrize(
    ("this", "other", "expected"),
    [
        ((10, 9, 11), (20, 18, 22), Comparison.FASTER),
        ((20, 18, 22), (10, 9, 11), Comparison.SLOWER),
        ((10, 9, 11), (10.5, 9, 11), Comparison.WITHIN_NOISE),
        ((10, 9, 15), (14, 13, 16), Comparison.WITHIN_NOISE),  # its band reaches the other's median
        ((10, 9, 11), (12, 9.5, 13), Comparison.WITHIN_NOISE),  # the other's band reaches its own
    ],
)
def test_comparison(
    this: tuple[float, float, float], other: tuple[float, float, float], expected: Comparison
) -> None:
    assert compare(Measurement(*this, 20), Measurement(*other, 20)) is expected


@pytest.mark.parametrize(
    ("variants", "options", "words"),
    [
        ({}, {}, "no variants"),
        ({"a": lambda: None}, {"max_seconds": 0}, "max_seconds"),
        ({"a": lambda: None}, {"min_repeats": 0}, "min_repeats"),
    ],
)
def test_misuse(variants: dict, options: dict, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        measure(variants, "cpu", **options)


def test_only_cpu_and_cuda_are_timed() -> None:
    with pytest.raises(InvalidInputError, match="'meta' must be a CPU or CUDA device"):
        measure({"a": lambda: None}, "meta")


def test_what_a_function_raises_comes_through() -> None:
    def broken() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        measure({"broken": broken}, "cpu")


def test_the_flush_outgrows_the_cache() -> None:
    cache = timers.last_level_cache_bytes()
    assert timers.flush_bytes(cache) >= min(2 * cache, timers._LARGEST_FLUSH_BYTES)


@pytest.mark.gpu
def test_a_gpu_is_timed_by_its_own_clock() -> None:
    x = torch.randn(4096, 4096, device="cuda")

    def eight() -> torch.Tensor:
        y = x
        for _ in range(8):
            y = y @ x
        return y

    times = measure({"one": lambda: x @ x, "eight": eight}, "cuda", max_seconds=0.5)
    # The host would see its launches, some 20 us; no device reaches 500 TFLOP/s in FP32. Other
    # processes may use the device too, and then both take longer.
    assert times["one"].median_us > 2 * 4096**3 / 500e6
    assert times["eight"].median_us > 2 * times["one"].median_us


def test_auto_is_the_first_device() -> None:
    expected = "cuda:0" if torch.cuda.is_available() else "cpu"
    assert str(device.resolve("auto")) == expected


@pytest.mark.parametrize("name", ["tpu", "cuda:99", "", "CPU"])
def test_an_unknown_device_is_named_with_those_there_are(name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"device '{name}' is not available.*has cpu"):
        device.resolve(name)


def test_the_record_is_of_this_machine() -> None:
    results = device.record("cpu")
    assert (results.device, results.type, results.torch) == ("cpu", "cpu", torch.__version__)
    assert results.threads == torch.get_num_threads()
    assert dict(results.rows())["name"] == results.name


def test_a_record_does_without_git_and_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    device._commit.cache_clear()
    assert device.record("cpu").commit is None
    device._commit.cache_clear()


def test_what_was_first_measured_in_inference_mode_can_be_measured_outside_of_it() -> None:
    device_types._timer.cache_clear()
    with torch.inference_mode():
        timing.measure({"one": lambda: None}, "cpu", max_seconds=0.01)
    timing.measure({"one": lambda: None}, "cpu", max_seconds=0.01)
