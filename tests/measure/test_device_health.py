"""A device that fails after an error is lost, and the reason is one line."""

import pytest
import torch

from ksopt.errors import first_line
from ksopt.measure.device_health import DeviceLostError, raise_if_lost

GPU = torch.device("cuda:1")


def test_a_reason_is_the_first_line_or_the_type() -> None:
    assert first_line(RuntimeError("\nno kernel\nat line 7")) == "no kernel"
    assert first_line(ValueError()) == "ValueError"


def test_a_device_that_fails_again_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> None:
        raise RuntimeError("an illegal memory access\nwas encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    raise_if_lost(torch.device("cpu"), "einsum")
    with pytest.raises(DeviceLostError, match=r"^einsum broke cuda:1: an illegal memory access$"):
        raise_if_lost(GPU, "einsum")
    with pytest.raises(DeviceLostError, match=r"^\{1\} failed \(an illegal memory access\)$"):
        raise_if_lost(GPU, "{1}", "{failed} failed ({reason})")


def test_a_device_that_works_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch, "ones", lambda *size, device: torch.zeros(size))
    raise_if_lost(GPU, "einsum")


def test_a_device_that_is_full_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    raise_if_lost(GPU, "einsum")
