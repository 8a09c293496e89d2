"""Records whether a product treated its weight as changing or as cached."""

import shutil
import sys
from pathlib import Path
from types import FrameType

import pytest
import torch

import ksopt
from ksopt.jit import host
from ksopt.kernels import dispatch, host_plans, weight_scopes
from ksopt.kernels.backends import cpu
from ksopt.ops import trained


class Served:
    """Whether the host library's own kernels of the products are registered above Python's."""

    def __init__(self) -> None:
        self._is_on = True

    @property
    def is_on(self) -> bool:
        return self._is_on

    @is_on.setter
    def is_on(self, value: bool) -> None:
        if host.load_built():  # before a product does so, which would register them
            torch.ops.ksopt_host.serve_products(value)
        self._is_on = value


SERVED = Served()


def by_pythons_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every call of a product enter Python, which may take it from the library's tables."""
    monkeypatch.setattr(SERVED, "is_on", False)


def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute every product and layer in Python, even if the host library has an entry for it."""
    by_pythons_kernels(monkeypatch)
    for module, name in (
        (cpu, "run_known"),
        (dispatch, "run_known"),
        (dispatch, "run_known_repacked"),
        (host_plans, "run"),
        (trained, "run"),
    ):
        monkeypatch.setattr(module, name, lambda *_, **__: None)


def as_close(
    actual: torch.Tensor, expected: torch.Tensor, summed: torch.Tensor | None = None
) -> None:
    """Assert that results differ by no more than sums in another order do.

    Of the largest number 16 roundings are allowed: up to 3 factors, a bias and an activation.

    Args:
        actual, expected: the results.
        summed: what they would be if nothing cancelled, where they are so few that it may.
    """
    finite = (expected if summed is None else summed)[expected.isfinite()].abs()
    largest = finite.max().item() if finite.numel() else 0.0
    allowed = 16 * torch.finfo(expected.dtype).eps * largest
    torch.testing.assert_close(actual, expected, rtol=0, atol=allowed, equal_nan=True)


class Python:
    """The functions of ksopt that this thread enters inside of this block.

    Attributes:
        entered: their names.
    """

    _PACKAGE = str(Path(ksopt.__file__).parent)

    def __enter__(self) -> "Python":
        self.entered: list[str] = []
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(self._PACKAGE):
            self.entered.append(frame.f_code.co_name)


class SeenProducts:
    """What each product took its weight for, whichever way computed it.

    Args:
        monkeypatch: undoes what is put in the place of the ways to multiply.
        by_library: whether the host library serves what is known to it; else all is Python's.

    Attributes:
        repacked: of each product, whether its weight was taken for one that changes.
        by_python: how many products Python has multiplied.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, by_library: bool) -> None:
        self.repacked: list[bool] = []
        self.by_python = 0
        run = dispatch.run

        def run_by_python(*args):
            self.repacked.append(weight_scopes.thread_state.repacked)
            self.by_python += 1
            return run(*args)

        monkeypatch.setattr(dispatch, "run", run_by_python)
        if by_library:
            if shutil.which("c++") is None:
                pytest.skip("no C++ compiler on this machine")
            assert host.load() is None
            by_pythons_kernels(monkeypatch)
            self._see_the_library(monkeypatch)
            return
        without_library(monkeypatch)

    def _see_the_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # One operator computes a layer that is trained: here it is left to its products.
        monkeypatch.setattr(trained, "run", lambda *_: None)
        run_known, run_known_repacked = dispatch.run_known, dispatch.run_known_repacked
        run_layer = host_plans.run

        def known(*args):
            y = run_known(*args)
            if y is not None:
                self.repacked.append(weight_scopes.thread_state.repacked)
            return y

        def known_repacked(*args):
            y = run_known_repacked(*args)
            if y is not None:
                self.repacked.append(True)
            return y

        def known_layer(x, weights, *args, **named):
            y = run_layer(x, weights, *args, **named)
            if y is not None:
                self.repacked += [weight_scopes.thread_state.repacked] * len(weights)
            return y

        monkeypatch.setattr(dispatch, "run_known", known)
        monkeypatch.setattr(dispatch, "run_known_repacked", known_repacked)
        monkeypatch.setattr(host_plans, "run", known_layer)

    def clear(self) -> None:
        """Clear the record."""
        self.repacked.clear()
        self.by_python = 0
