"""A device as one file: the backend of devices that compute by the reference alone."""

from ksopt.kernels.backends.base import DeviceBackend, Unmeasured
from ksopt.kernels.problem import Problem
from ksopt.kernels.tuning_cache import Record, Timed, load, save
from ksopt.patterns.chain import Pattern
from ksopt.precision import dtype_name
from ksopt.reference import ks_reference


class ToyBackend(DeviceBackend):
    """Multiplies by the reference, and counts its products. A subclass names its type."""

    def __init__(self):
        self.products = 0

    def run(self, x, weight, batch_last, out=None):
        self.products += 1
        y = ks_reference(x, weight, "batch_last" if batch_last else "batch_first")
        return y.contiguous() if out is None else out.copy_(y)

    def tune(self, x, weight, batch_last, budget_s):
        batch = x.shape[-1 if batch_last else 0]
        problem = Problem.of_factor(Pattern(*weight.shape), dtype_name(x.dtype), batch_last)
        timed = Timed("reference", None, "any", None, 7.0, 6.0, 8.0)
        record = Record(self.key(problem, batch), batch, (timed,), 0, 0)
        save(self.fingerprint(x.device), record)
        return record

    def fingerprint(self, device):
        return {"device": "toy"}

    def measured(self, key, device, mode, repacked):
        record = load(self.fingerprint(device), key)
        return None if record is None else (record, "recorded")

    def unmeasured(self, key, batch, spec, mode):
        return Unmeasured("reference", None, None, "rule", "it has one way")

    def forget(self):
        self.products = 0
