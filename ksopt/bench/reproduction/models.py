"""The times of the modules of Tables 4, 6 and 7: checked, then timed in turns."""

from __future__ import annotations

import copy
import gc
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ksopt import precision
from ksopt.bench import results_log
from ksopt.bench.reproduction import module_cases
from ksopt.bench.reproduction.module_cases import Built
from ksopt.bench.reproduction.request import PaperRequest
from ksopt.bench.results_log import LogFormat, ResultsLog
from ksopt.measure.accuracy import TF32_ROUNDING, fault_against
from ksopt.measure.device import DeviceRecord
from ksopt.measure.timing import Measurement, measure

_SECONDS = 2.0
# Beside those of every benchmark, the modules that a time can depend on.
_CODE = (
    *("ksopt.nn.layers", "ksopt.bench.models.plain_layers", "ksopt.bench.models.chains"),
    *("ksopt.bench.reproduction.module_cases", "ksopt.bench.reproduction.transformer"),
    "ksopt.bench.reproduction.models",
)


@dataclass(frozen=True)
class Subject:
    """A case of `ksopt.bench.reproduction.module_cases.names` in a dtype."""

    name: str
    dtype: str


@dataclass(frozen=True)
class Case:
    """The measurements of a subject.

    Attributes:
        subject: the case and its dtype.
        times: of a call, by version.
        faults: in sentences; a version with a fault has no time.
    """

    subject: Subject
    times: dict[str, Measurement]
    faults: tuple[str, ...] = ()

    def seconds(self, version: str) -> float | None:
        """The median time of a version; None if it has none."""
        time = self.times.get(version)
        return None if time is None else time.median_us / 1e6

    def to_json(self) -> dict[str, Any]:
        """The case as plain values; `of_json` reads them."""
        return asdict(self)

    @classmethod
    def of_json(cls, value: Any) -> Case:
        """The inverse of `to_json`."""
        times = {name: Measurement(**one) for name, one in value["times"].items()}
        return cls(Subject(**value["subject"]), times, tuple(value["faults"]))


LOG_FORMAT: LogFormat[Subject, Case] = LogFormat(
    "ksopt bench paper",
    "ksopt.bench.paper.models/1",
    lambda case: case.subject,
    Case.to_json,
    Case.of_json,
)


@contextmanager
def opened(
    folder: Path, request: PaperRequest, record: DeviceRecord
) -> Generator[ResultsLog[Subject, Case]]:
    """The folder's log; see `ksopt.bench.results_log.opened`."""
    identity = results_log.identity(request.identity(), record, _CODE)
    with results_log.opened(folder, LOG_FORMAT, identity) as results:
        yield results


def measure_case(request: PaperRequest, subject: Subject, device_name: str) -> Case:
    """Build a case, check its versions against float64, and time them in turns.

    Layers are called without gradients, uncompiled, in the layout batch_first, as the paper did.

    Args:
        request: of the run.
        subject: the case and its dtype.
        device_name: torch's name of the device.
    """
    device = torch.device(device_name)
    is_tf32 = subject.dtype == "tf32"
    dtype: torch.dtype = torch.float32 if is_tf32 else getattr(torch, subject.dtype)
    with precision.fp32_products("tf32" if is_tf32 else "ieee"):
        try:
            small, seed = request.is_small, request.options.seed
            # Not in inference mode: ksopt caches prepared weights only if it can read the version.
            built = module_cases.build(subject.name, dtype, device, small=small, seed=seed)
            with torch.inference_mode():
                faults = _faults(built, TF32_ROUNDING if is_tf32 else torch.finfo(dtype).eps)
                calls = {
                    name: partial(module, built.inputs[name])
                    for name, module in built.versions.items()
                    if name not in faults
                }
                times = measure(calls, device, max_seconds=_SECONDS, min_repeats=5, precision=0.01)
        except torch.OutOfMemoryError:
            return Case(subject, {}, ("out of memory",))
    sentences = tuple(f"{name}: {fault}" for name, fault in faults.items())
    del built, calls
    gc.collect()  # the next model may need the memory
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Case(subject, times, sentences)


def _faults(built: Built, rounding: float) -> dict[str, str]:
    """The fault of ksopt's version against the author's in float64, by version."""
    if not built.truth:
        return {}
    module, inputs = built.versions[built.truth], built.inputs[built.truth]
    exact = inputs.double() if inputs.is_floating_point() else inputs
    truth = copy.deepcopy(module).double()(exact)
    theirs = module(inputs)
    fault = fault_against(built.versions[module_cases.KERNEL](inputs), theirs, truth, rounding)
    return {} if fault is None else {module_cases.KERNEL: fault}
