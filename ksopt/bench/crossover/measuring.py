"""One layer of a crossover map: every way prepared, checked, and timed in turns."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ksopt import precision
from ksopt.bench.crossover import layers
from ksopt.bench.crossover.layers import Dense, Layer
from ksopt.bench.crossover.request import CrossoverRequest, Site
from ksopt.bench.crossover.results import DENSE_FUSED, FP8, FP8_PRODUCT, SiteResult, Timed
from ksopt.errors import KsoptError, first_line
from ksopt.measure import device_types
from ksopt.measure.device_health import DeviceLostError
from ksopt.measure.timing import Measurement, measure
from ksopt.patterns.chain import Chain

_SECONDS, _FEWEST = 0.4, 5
_PRECISION = 0.01

_CheckedCall = tuple[str | None, Callable[[], object]]
"""The fault of a way, None if it is correct, and its call."""


@dataclass
class _Ready:
    """The ways of a layer: the call of each, or the reason it has none."""

    calls: dict[str, Callable[[], object]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    chains: dict[str, str] = field(default_factory=dict)
    budgets: dict[str, str] = field(default_factory=dict)

    def prepare(self, name: str, make: Callable[[], _CheckedCall]) -> None:
        """Record a way: ``make`` returns its fault and its call."""
        try:
            fault, call = make()
        except torch.OutOfMemoryError:
            self.reasons[name] = "out of memory"
        except (RuntimeError, KsoptError) as error:
            message = first_line(error)
            # Only torch knows whether this product exists on the device.
            is_optional = name in (FP8, FP8_PRODUCT, DENSE_FUSED)
            self.reasons[name] = f"{'not there' if is_optional else 'failed'}: {message[:200]}"
        else:
            if fault is None:
                self.calls[name] = call
            else:
                self.reasons[name] = f"wrong: {fault}"


def measure_site(request: CrossoverRequest, site: Site) -> SiteResult:
    """Check and time a layer: dense, in FP8 where the map is of 16 bit, and of each budget."""
    device, is_training = torch.device(request.device), site.plane.pass_ == "training"
    dtype: torch.dtype = getattr(torch, site.plane.torch_name)
    products = precision.fp32_products("tf32" if site.plane.precision == "tf32" else "ieee")
    ready = _Ready()
    on_gpu = [device] if device.type == "cuda" else []
    with products, torch.random.fork_rng(devices=on_gpu):
        torch.manual_seed(request.options.seed)
        x = torch.randn(site.rows, site.width, device=device, dtype=dtype)
        x.requires_grad_(is_training)
        g = torch.randn_like(x) if is_training else x
        with nullcontext() if is_training else torch.no_grad():
            _dense(site, ready, x, g)
            for budget in request.budgets:
                chains = budget.chains(site.width)
                if not chains:
                    why = f"no chain: {site.width} is no multiple of {budget.parts}"
                    ready.reasons[budget.text] = why
                for chain in chains:
                    name = f"{budget.text} {chain}"
                    ready.chains[name], ready.budgets[name] = str(chain), budget.text
                    ready.prepare(name, partial(_chain, chain, x, g))
            times = _timed(ready, device)
    ways = tuple(
        Timed(
            ready.budgets.get(name, name),
            ready.chains.get(name, ""),
            times.get(name),
            ready.reasons.get(name, ""),
        )
        for name in (*ready.calls, *ready.reasons)
    )
    ready.calls.clear()
    gc.collect()  # the next layer may need the memory
    return SiteResult(site, ways)


def _timed(ready: _Ready, device: torch.device) -> dict[str, Measurement]:
    """The times of all ways.

    Raises:
        DeviceLostError: a way failed that had worked before: later results mean nothing.
    """
    try:
        device_types.synchronize(device)  # reports the error of a faulty kernel
        if not ready.calls:
            return {}
        return measure(
            ready.calls, device, max_seconds=_SECONDS, min_repeats=_FEWEST, precision=_PRECISION
        )
    except torch.OutOfMemoryError:
        ready.reasons.update(dict.fromkeys(ready.calls, "out of memory"))
        ready.calls.clear()
        return {}
    except RuntimeError as error:
        message = first_line(error)
        raise DeviceLostError(f"timing on {device} failed: {message}") from error


def _dense(site: Site, ready: _Ready, x: Tensor, g: Tensor) -> None:
    with x.device:  # the initial weights of a wide layer take a CPU seconds
        module = Dense(site.width).to(x.dtype)
    for name, layer in layers.dense_layers(module, x.requires_grad).items():

        def make(layer: Layer = layer) -> _CheckedCall:
            with torch.no_grad():
                fault = layers.fault_of_dense(layer, module, x.detach())
            if x.requires_grad:
                return fault, layers.step(layer, list(module.parameters()), x, g)
            return fault, partial(layer, x)

        ready.prepare(name, make)
    if x.requires_grad or x.dtype.itemsize != 2:
        return

    def fp8(is_rounded_before: bool) -> _CheckedCall:
        layer = layers.Fp8Dense(module, x)
        fault = layers.fault_of_fp8(layer, module, x)
        if is_rounded_before:
            return fault, partial(layer.of_rounded, layer.rounded(x))
        return fault, partial(layer, x)

    ready.prepare(FP8, partial(fp8, False))
    ready.prepare(FP8_PRODUCT, partial(fp8, True))


def _chain(chain: Chain, x: Tensor, g: Tensor) -> _CheckedCall:
    layer = layers.ks_layer(chain, x.dtype, x.device)
    with torch.no_grad():
        fault = layers.fault_of_ks(layer, x.detach())
    if not x.requires_grad:
        return fault, partial(layer, x)
    fault = fault or layers.fault_of_gradients(layer, x)
    return fault, layers.step(layer, list(layer.parameters()), x, g)
