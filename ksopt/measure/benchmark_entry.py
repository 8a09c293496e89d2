"""The entries of a race, and the samples taken of each so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from ksopt.measure.measurement import Measurement, Quantile


@dataclass(frozen=True)
class BenchmarkEntry:
    """A function that takes part in a race.

    Attributes:
        name: for messages.
        call: what is timed.
        weight_modes: the weights that it competes for: prepared once ("cached") or at each call
            ("repacked"). It is given up when it is hopeless for all of them; never, if there are
            none.
        products: of one call; times are of one product.
    """

    name: str
    call: Callable[[], object]
    weight_modes: frozenset[str] = frozenset({"all"})
    products: int = 1


@dataclass
class Lane:
    """The samples of an entry in a race so far.

    Attributes:
        entry: the entry.
        calls: of a sample: more than 1 only where a call is too short for the clock.
        samples_us: of a product.
        late_us: samples that the host was late for: they hold a part of its time.
        launches_us: what launching each sample took the host, the warm-up's last one first.
        uncovered: how many of `samples_us` hold a part of the host's time: launching them takes it
            longer than the device can be kept busy before.
        given_up: whether it is sampled no longer.
        events: around a sample on CUDA, created once: else the host creates them between a sample's
            overwriting and its end.
    """

    entry: BenchmarkEntry
    calls: int = 1
    samples_us: list[float] = field(default_factory=list)
    late_us: list[float] = field(default_factory=list)
    launches_us: list[float] = field(default_factory=list)
    uncovered: int = 0
    given_up: bool = False
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def measurement(self, quantile: Quantile) -> Measurement | None:
        """The summary of the samples; of those that the host was late for only if all are."""
        samples_us = self.samples_us or self.late_us
        if not samples_us:
            return None
        of_all = Measurement.of(samples_us, self.calls, given_up=self.given_up, quantile=quantile)
        return replace(of_all, is_host_late=not self.samples_us or self.uncovered > 0)

    def launch(self) -> None:
        """Launch the calls of a sample."""
        for _ in range(self.calls):
            self.entry.call()
