"""Whether a site is lowered: by times that are measured, kept, or predicted."""

import pytest
import torch

from ksopt.compile import decide
from ksopt.compile.decide import Times, by_clock, by_times, measured
from ksopt.compile.sites import Place, Site, Verdict
from ksopt.errors import InvalidInputError
from ksopt.pattern import Chain

CPU = torch.device("cpu")
CHAIN = Chain.parse("(1,8,4,4)*(4,4,8,1)")


def site(batch=64):
    return Site("n", Place(), "bmm", Verdict.KEPT, "", CHAIN, batch, "float32")


def test_the_faster_one_is_taken_and_a_tie_is_lowered():
    assert by_times(Times(10.0, 20.0), measured=True).lower
    assert by_times(Times(20.3, 20.0), measured=True).lower
    slower = by_times(Times(21.0, 20.0), measured=False)
    assert not slower.lower
    assert slower.reason == "Predicted 21.0 us, slower than 20.0 us under Inductor."
    assert (slower.ksopt_us, slower.unfused_us, slower.measured) == (21.0, 20.0, False)


def test_a_measurement_is_made_once_and_kept():
    asked = []

    def timer(*problem):
        asked.append(problem)
        return Times(5.0, 8.0)

    for batch in (100, 128, 65):  # one power of two
        assert measured(CHAIN, "float32", batch, CPU, timer) == Times(5.0, 8.0)
    assert len(asked) == 1
    measured(CHAIN, "float32", 129, CPU, timer)
    measured(CHAIN, "bfloat16", 100, CPU, timer)
    assert len(asked) == 3
    path = decide._path(CHAIN, "float32", 100, CPU)
    path.write_text("{broken", encoding="utf-8")
    measured(CHAIN, "float32", 100, CPU, timer)
    assert len(asked) == 4


def test_a_folder_that_cannot_be_written_is_no_failure(monkeypatch, caplog):
    def full(path, text):
        raise OSError("no space left")

    monkeypatch.setattr(decide, "write_whole", full)
    assert measured(CHAIN, "float16", 3, CPU, lambda *_: Times(1.0, 2.0)) == Times(1.0, 2.0)
    assert "no space left" in caplog.text


def test_on_a_cpu_the_model_lowers_and_the_clock_decides(monkeypatch):
    assert decide.decide(site(), CPU).lower
    assert decide.decide(site(), CPU, "off").reason == (
        "Every recognised site is lowered: tune is off."
    )
    monkeypatch.setattr(decide, "measured", lambda *_: Times(9.0, 3.0))
    kept = decide.decide(site(), CPU, "measure")
    assert (kept.lower, kept.measured) == (False, True)


@pytest.mark.slow
def test_the_clock_times_both_ways():
    times = by_clock(CHAIN, "float32", 16, CPU)
    assert times.ksopt_us > 0
    assert times.unfused_us > 0


def test_a_wrong_value_is_refused():
    with pytest.raises(InvalidInputError, match="it must be one of model, measure, off"):
        decide.checked_tune("always")
