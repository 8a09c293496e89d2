"""The interface of a device backend, and the registry of backends by device type.

A backend is registered under torch's type of its devices; `backend_of` looks it up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ksopt.epilogue import After
from ksopt.errors import InvalidInputError, UnavailableError
from ksopt.kernels.autotuner import Choice, Source
from ksopt.kernels.problem import DeviceSpec, Problem, ProblemKey
from ksopt.kernels.tuning_cache import Fingerprint, Record
from ksopt.measure.device_types import BUILT_IN, DEVICE_TYPES, DeviceType
from ksopt.system.device_names import REGISTERED_TYPES


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


class DeviceBackend(DeviceType, ABC):
    """Computes products on devices of one type, and chooses the candidate of each.

    It also answers what measuring needs of its devices: see `DeviceType`, whose methods ksopt calls
    for every type but "cpu" and "cuda".
    """

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

    def run_known_repacked(
        self, x: Tensor, weight: Tensor, batch_last: bool, out: Tensor | None = None
    ) -> Tensor | None:
        """`run_known` where weights change, in or out of the scope `weight_scopes.repacked`."""
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

    def run_within(
        self, x: Tensor, weight: Tensor, batch_last: bool, after: After, out: Tensor | None = None
    ) -> Tensor | None:
        """The product and what is after it in one launch; None where there is no such launch.

        Args:
            x, weight, batch_last, out: as for `run`.
            after: not empty.
        """
        return None

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
        self, key: ProblemKey, device: torch.device, mode: str, repacked: bool
    ) -> tuple[Record, Source] | None:
        """The measurement for a key, of this process or from disk, if it is usable.

        Args:
            key: a problem's key.
            device: where it is computed.
            mode: of ``KSOPT_TUNE``.
            repacked: whether the weight changes from call to call.
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
_replaced: dict[str, list[DeviceBackend]] = {}
_listeners: list[Callable[[str], object]] = []


def register_backend(backend: type[DeviceBackend]) -> type[DeviceBackend]:
    """Class decorator that registers the backend of a device type, and replaces an earlier one.

    Raises:
        UnavailableError: torch knows no such type.
    """
    name = backend.device_type
    try:
        torch.device(name)
    except RuntimeError as error:
        raise UnavailableError(
            f"register_backend: torch knows no devices of type {name!r}; import the package that "
            "adds them first"
        ) from error
    if name in BACKENDS:
        _replaced.setdefault(name, []).append(BACKENDS[name])
    _enter(name, backend())
    REGISTERED_TYPES.add(name)
    for listener in _listeners:
        listener(name)
    return backend


def unregister_backend(device_type: str) -> None:
    """Take the backend of a device type out of the registry, and put back the one it replaced.

    Raises:
        InvalidInputError: there is none.
    """
    backend_of(device_type)
    earlier = _replaced.get(device_type)
    if earlier:
        _enter(device_type, earlier.pop())
        return
    del BACKENDS[device_type]
    REGISTERED_TYPES.remove(device_type)
    if device_type not in BUILT_IN:
        del DEVICE_TYPES[device_type]


def _enter(name: str, backend: DeviceBackend) -> None:
    BACKENDS[name] = backend
    if name not in BUILT_IN:
        DEVICE_TYPES[name] = backend


def when_registered(listener: Callable[[str], object]) -> None:
    """Call a function with every type of devices that has a backend, now and later."""
    _listeners.append(listener)
    for name in BACKENDS:
        listener(name)


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
