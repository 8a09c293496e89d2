"""The interface of a device backend, and the registry of backends by device type.

A backend is registered under torch's type of its devices; `backend_of` looks it up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ksopt.errors import InvalidInputError
from ksopt.kernels.autotuner import Choice, Source
from ksopt.kernels.problem import DeviceSpec, Problem, ProblemKey
from ksopt.kernels.tuning_cache import Fingerprint, Record


@dataclass(frozen=True)
class Unmeasured:
    """The candidate that multiplies where nothing was measured.

    Attributes:
        way: a kernel family, or one of PyTorch's ways.
        config: the tile's configuration; None where there is none.
        predicted_us: by the cost model; None where there is none.
        source: "model" or "rule".
        reason: a sentence.
    """

    way: str
    config: dict[str, Any] | None
    predicted_us: float | None
    source: Source
    reason: str


class DeviceBackend(ABC):
    """Computes products on devices of one type, and chooses the candidate of each.

    Attributes:
        device_type: torch's name of it, such as "cuda".
    """

    device_type: ClassVar[str]

    def run_known(
        self,
        x: Tensor,
        weight: Tensor,
        batch_last: bool,
        out: Tensor | None = None,
        owner: Tensor | None = None,
    ) -> Tensor | None:
        """y, for operands that need neither checks nor a decision; None otherwise.

        Args:
            x, weight, batch_last, out: as for `run`, or anything else that an operator gets.
            owner: the tensor, no view itself, that weight is declared a view of, or None.
        """
        return None

    def run_known_changing(
        self, x: Tensor, weight: Tensor, batch_last: bool, out: Tensor | None = None
    ) -> Tensor | None:
        """`run_known` where weights change, in or out of the scope `weight_scopes.changing`."""
        return None

    @abstractmethod
    def run(self, x: Tensor, weight: Tensor, batch_last: bool, out: Tensor | None = None) -> Tensor:
        """y = x K^T.

        Args:
            x: (*batch, N), or (N, *batch) when batch_last; any strides.
            weight: (a, b, c, d), of x's dtype and device, any strides.
            batch_last: the layout.
            out: where y is written, instead of into new memory: of y's shape and x's dtype and
                device, contiguous, and sharing no memory with x and weight.

        Returns:
            y: (*batch, M) or (M, *batch), contiguous; new, or in ``out``.
        """

    @abstractmethod
    def tune(self, x: Tensor, weight: Tensor, batch_last: bool, budget_s: float) -> Record:
        """Measure for these operands even if a choice exists; store the result here and on disk.

        Args:
            x, weight, batch_last: as for `run`.
            budget_s: seconds for the timing; compilation comes on top.

        Raises:
            UnavailableError: nothing could be stored.
        """

    def choose_quickly(self, x: Tensor, weight: Tensor, batch_last: bool, budget_s: float) -> None:
        """Choose quickly, for this process alone; a no-op where `run` does so itself."""
        return

    def choice_for(self, x: Tensor, weight: Tensor, batch_last: bool) -> Choice | None:
        """The choice that `run` takes for these operands; None where a backend has none."""
        return None

    @abstractmethod
    def fingerprint(self, device: torch.device) -> Fingerprint:
        """The facts that choices on a device depend on.

        Raises:
            UnavailableError: the device cannot be queried.
        """

    def spec(self, device: torch.device) -> DeviceSpec | None:
        """The spec of a device, which kernels must fit; None where there are no cost models."""
        return None

    def key(self, problem: Problem, batch: int) -> ProblemKey:
        """The key of choices for contiguous operands with this number of rows."""
        return ProblemKey.of_problem(problem, batch)

    @abstractmethod
    def measured(
        self, key: ProblemKey, device: torch.device, mode: str, changing: bool
    ) -> tuple[Record, Source] | None:
        """The measurement for a key, of this process or from disk, if it is usable.

        Args:
            key: a problem's key.
            device: where it is computed.
            mode: of ``KSOPT_TUNE``.
            changing: whether the weight changes from call to call.
        """

    @abstractmethod
    def unmeasured(
        self, key: ProblemKey, batch: int, spec: DeviceSpec | None, mode: str
    ) -> Unmeasured:
        """The candidate of a product for which nothing was measured.

        Args:
            key: a problem's key.
            batch: rows of x.
            spec: of the device.
            mode: of ``KSOPT_TUNE``.
        """

    @abstractmethod
    def forget(self) -> None:
        """Drop this process's choices (not those on disk), so that the next calls choose again."""


BACKENDS: dict[str, DeviceBackend] = {}
"""Type of device -> its backend. The modules of this folder fill it."""


def register_backend(backend: type[DeviceBackend]) -> type[DeviceBackend]:
    """Class decorator that registers the backend of a device type, and replaces an earlier one."""
    BACKENDS[backend.device_type] = backend()
    return backend


def backend_of(device_type: str) -> DeviceBackend:
    """The backend for a type of devices.

    Raises:
        InvalidInputError: there is none.
    """
    backend = BACKENDS.get(device_type)
    if backend is None:
        known = ", ".join(sorted(BACKENDS))
        raise InvalidInputError(f"ksopt has no backend for {device_type} devices, only for {known}")
    return backend
