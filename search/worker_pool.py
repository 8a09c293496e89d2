"""Measurement of a study's trials by this process, or by several, one for each GPU."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import optuna
import torch

from ksopt.kernels.compile_ahead import Compilers
from ksopt.measure import device as devices
from ksopt.measure.energy import Meter
from ksopt.measure.roofline import Roofline
from ksopt.operators.registry import Replacement
from ksopt.search import keyboard_interrupts, study_store, trial_records, worker_processes
from ksopt.search.device_locks import Presence
from ksopt.search.history import History
from ksopt.search.layer_request import LayerRequest
from ksopt.search.options import SEEDS
from ksopt.search.progress import Progress
from ksopt.search.results import TrialRecord
from ksopt.search.samplers import priors
from ksopt.search.samplers.chain_sampler import Kind, suitable_sampler
from ksopt.search.samplers.cost_model import CostModel
from ksopt.search.space.space import Space
from ksopt.search.storage import Storage
from ksopt.search.trained_weights import TrainedWeights
from ksopt.search.trial_loop import TrialRun, Workplace, take_turns

log = logging.getLogger("ksopt.search")

# Difference of the seeds of two workers: more than the trials of any study, whose count is added.
_SEEDS_APART = 1_000_003
# Seconds of the cost model for its picks of each step: divided by the number of sizes, and minimum.
_PREDICTING_S, _LEAST_PREDICTING_S = 1.5, 0.3


@dataclass(frozen=True)
class Share:
    """One layer size's part of a search.

    Args:
        request: With batch, device and output folder resolved.
        study: The study of the trials.
        run: The number of this run of the study, from 1.
        space: The candidates.
        weights: The trained weights, if any.
    """

    request: LayerRequest
    study: optuna.Study
    run: int
    space: Space
    weights: TrainedWeights | None = None


@dataclass(frozen=True)
class TrialPool:
    """Measurement of the trials of one layer size, or of several in turns.

    Args:
        shares: One for each size; of one device, dtype, layout, storage, timeout, seed and number
            of workers.
        device: The device.
        storage: Of the studies.
        roofline: Of the device.
        compilers: Of the next kernels, if this process measures.
        meter: Of the device, if energy is measured by this process.
    """

    shares: Sequence[Share]
    device: torch.device
    storage: Storage
    roofline: Roofline
    compilers: Compilers = field(default_factory=Compilers)
    meter: Meter | None = None

    @property
    def _request(self) -> LayerRequest:
        """The first request, for the options that all shares have in common."""
        return self.shares[0].request

    def run(self, progress: Progress, began: float) -> str | None:
        """Measure until the trials are done.

        Returns:
            Why it stopped early ("timeout" or "interrupted"), or None.
        """
        request = self._request
        if (
            request.storage is None
        ):  # the studies are in the output folder, which this process has locked
            for share in self.shares:
                study_store.fail_running(share.study)
        histories = [History(share.study) for share in self.shares]
        done = [len(one.ended) for one in histories]
        limits = [share.request.trials for share in self.shares]
        progress.start(sum(map(max, limits, done)), sum(done))
        report = self._trial_callback(progress)
        deadline = None if request.timeout_s is None else began + request.timeout_s
        seeds = [(request.seed + len(one.trials)) % SEEDS for one in histories]
        try:
            with keyboard_interrupts.remembered() as interrupted:

                def on_trial(place: int, number: int) -> None:
                    report(place, number)
                    if interrupted():
                        raise KeyboardInterrupt

                if request.workers == 1:
                    in_time = self._alone(seeds, on_trial, deadline)
                else:
                    in_time = self._together(seeds, on_trial, deadline, progress.note)
        except KeyboardInterrupt:
            return "interrupted"
        return None if in_time else "timeout"

    def _alone(
        self, seeds: Sequence[int], on_trial: Callable[[int, int], None], deadline: float | None
    ) -> bool:
        with Presence() as presence:
            workplace = Workplace(
                self.device, self.roofline, self.storage, presence, self.compilers, self.meter
            )
            trial_runs = []
            for share, seed in zip(self.shares, seeds, strict=True):
                model = CostModel.of(share.request, self.device)
                trial_runs.append(
                    TrialRun.of(
                        share.request,
                        share.study,
                        workplace,
                        run=share.run,
                        candidates=share.space.candidates,
                        steps=share.space.steps,
                        priors=self._priors(share, model),
                        weights=share.weights,
                        seed=seed,
                        model=model,
                    )
                )
            return take_turns(trial_runs, on_trial, deadline)

    def _together(
        self,
        seeds: Sequence[int],
        on_trial: Callable[[int, int], None],
        deadline: float | None,
        note: Callable[[str], None],
    ) -> bool:
        places = workplaces(self.device, self._request.workers)
        if len(set(places)) < len(places):
            note(
                f"{len(places)} workers share {', '.join(sorted(set(places)))}: they measure there "
                "one after the other, so that no measurement disturbs another, and only what comes "
                "between measurements runs side by side; what noise that makes is in the times"
            )
        shares = [self._share_task(share) for share in self.shares]
        seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
        tasks = [
            {
                "task": "trials",
                "device": place,
                "roofline": asdict(self.roofline),
                "seconds": seconds,
                "workers": len(places),
                "shares": [
                    {**share, "seed": (seed + _SEEDS_APART * worker) % SEEDS}
                    for share, seed in zip(shares, seeds, strict=True)
                ],
            }
            for worker, place in enumerate(places)
        ]
        return worker_processes.run(tasks, on_trial, note)

    def _share_task(self, share: Share) -> dict[str, object]:
        first = self._priors(share, CostModel.of(share.request, self.device))
        return {
            "request": share.request.to_json(),
            "candidates": [str(chain) for chain in share.space.candidates],
            "steps": [asdict(step) for step in share.space.steps],
            "priors": [[origin, str(chain)] for origin, chain in first],
            "run": share.run,
        }

    def _priors(self, share: Share, model: CostModel | None) -> list[tuple[str, Replacement]]:
        seconds = max(_LEAST_PREDICTING_S, _PREDICTING_S / len(self.shares))
        return priors.enqueued(share.space, share.request, self.roofline, model, seconds)

    def _trial_callback(self, progress: Progress) -> Callable[[int, int], None]:
        """The function that reports a trial to ``progress`` by its share's index and its number."""
        best: dict[int, TrialRecord] = {}

        def on_trial(place: int, number: int) -> None:
            share = self.shares[place]
            assert share.request.batch is not None
            trial = share.study.get_trials(deepcopy=False)[number]
            record = trial_records.record(trial, self.roofline, share.request.batch)
            if record is None:
                return
            so_far = best.get(place)
            if record.ratio and (so_far is None or record.ratio < (so_far.ratio or 0.0)):
                best[place] = record
            log.info("trial %d: %s", number, _summary(record))
            progress.trial(record, best.get(place))

        return on_trial


def _summary(record: TrialRecord) -> str:
    """Summary of a trial for the log."""
    chain, ratio = record.facts.chain, record.ratio_seen
    speed = "" if ratio is None else f", {1 / ratio:.2f} times dense's speed"
    return f"{chain} {record.state}{speed}{f', {record.reason}' if record.reason else ''}"


def sampler_name(space: Space, request: LayerRequest) -> Kind:
    """Name of the sampler of a space in the report."""
    return suitable_sampler(len(space.candidates), request)


def workplaces(device: torch.device, workers: int) -> list[str]:
    """Devices of the workers: the GPUs of the request's kind in turns, beginning with its own.

    Example:
        >>> workplaces(torch.device("cpu"), 2)
        ['cpu', 'cpu']
    """
    if device.type != "cuda":
        return [str(device)] * workers
    name = torch.cuda.get_device_name(device)
    alike = [
        place
        for place in devices.available()
        if place.startswith("cuda") and torch.cuda.get_device_name(place) == name
    ]
    at = alike.index(str(device))
    alike = alike[at:] + alike[:at]
    return [alike[worker % len(alike)] for worker in range(workers)]
