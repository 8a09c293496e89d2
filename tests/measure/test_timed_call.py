"""One call is timed until its result is there."""

import time

import pytest
import torch

from ksopt.measure.timed_call import TimedCall

CPU = torch.device("cpu")


def test_it_returns_the_result_and_records_the_time_of_the_last_call() -> None:
    def slept(seconds: float, *, result: str) -> str:
        time.sleep(seconds)
        return result

    call = TimedCall(slept, CPU)
    assert call.us == 0.0
    assert call(0.02, result="first") == "first"
    first_us = call.us
    assert first_us >= 20_000
    assert call(0.0, result="second") == "second"
    assert 0 < call.us < first_us


def test_a_call_that_fails_has_no_time() -> None:
    def half(x: int) -> int:
        if x % 2:
            raise ValueError(f"{x} is odd")
        return x // 2

    call = TimedCall(half, CPU)
    assert call(6) == 3
    with pytest.raises(ValueError, match="5 is odd"):
        call(5)
    assert call.us == 0.0


def test_on_a_gpu_it_waits_before_the_call_and_for_its_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    device = torch.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda which: events.append(f"wait {which}"))
    TimedCall(lambda: events.append("call"), device)()
    assert events == ["wait cuda:1", "call", "wait cuda:1"]
