"""Who measures a study's trials: this process, or several, one for each GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import optuna
import torch

from ksopt.bench import device as devices
from ksopt.bench.roofline import Roofline
from ksopt.search import priors, processes, store
from ksopt.search.campaign import Campaign
from ksopt.search.claims import Claims
from ksopt.search.cost import CostModel
from ksopt.search.given import GivenWeights
from ksopt.search.locks import Presence
from ksopt.search.objective import Objective
from ksopt.search.progress import Progress
from ksopt.search.pruning import Pruning
from ksopt.search.request import SearchRequest
from ksopt.search.result import TrialRecord
from ksopt.search.sampler import ChainSampler, suited
from ksopt.search.space import Space
from ksopt.search.storage import Storage

# Between the seeds of two workers: more than the trials of any study, whose count is added.
_SEEDS_APART = 1_000_003


@dataclass(frozen=True)
class Crew:
    """Measures the trials of a request.

    Args:
        request: What to search, with batch, device and output folder resolved.
        device: The request's.
        storage: Of the study.
        study: Where trials are kept.
        space: What to draw from.
        roofline: Of the device.
        given: The trained weights, if any.
    """

    request: SearchRequest
    device: torch.device
    storage: Storage
    study: optuna.Study
    space: Space
    roofline: Roofline
    given: GivenWeights | None

    @property
    def sampler_name(self) -> str:
        """What the report calls what chooses the trials."""
        return self._sampler(0).name

    def run(self, number: int, progress: Progress, began: float) -> str | None:
        """Measure until the trials are done, as the study's run of that number.

        Returns:
            Why it stopped before they were ("timeout" or "interrupted"), or None.
        """
        request = self.request
        if request.storage is None:  # the study is in the output folder, which is ours alone
            store.give_up_running(self.study)
        trials = self.study.get_trials(deepcopy=False)
        done = store.settled(trials)
        progress.start(max(request.trials, done), done)
        told = self._teller(progress)
        deadline = None if request.timeout_s is None else began + request.timeout_s
        seed = request.seed + len(trials)
        try:
            if request.workers == 1:
                in_time = self._alone(number, seed, told, deadline)
            else:
                in_time = self._together(number, seed, told, deadline, progress.note)
        except KeyboardInterrupt:
            return "interrupted"
        return None if in_time else "timeout"

    def _alone(
        self, number: int, seed: int, told: Callable[[int], None], deadline: float | None
    ) -> bool:
        model = CostModel.of(self.request, self.device)
        with Presence() as presence:
            claims = Claims(
                self.storage,
                self.study,
                self._sampler(seed),
                priors.enqueued(self.space, self.request, self.roofline, model),
                limit=self.request.trials,
                run=number,
                presence=presence,
            )
            objective = Objective(self.request, self.device, self.given)
            campaign = Campaign(
                claims,
                objective,
                self.device,
                self.roofline,
                self.request,
                Pruning(self.study, self.space.steps, self.request),
                model,
            )
            return campaign.run(told, deadline)

    def _together(
        self,
        number: int,
        seed: int,
        told: Callable[[int], None],
        deadline: float | None,
        note: Callable[[str], None],
    ) -> bool:
        model = CostModel.of(self.request, self.device)
        first = priors.enqueued(self.space, self.request, self.roofline, model)
        places = workplaces(self.device, self.request.workers)
        if len(set(places)) < len(places):
            note(
                f"{len(places)} workers share {', '.join(sorted(set(places)))}: they measure there "
                "one after the other, so that no measurement disturbs another, and only what comes "
                "between measurements runs side by side; what noise that makes is in the times"
            )
        task = {
            "task": "trials",
            "request": self.request.to_json(),
            "roofline": asdict(self.roofline),
            "candidates": [str(chain) for chain in self.space.candidates],
            "steps": [asdict(step) for step in self.space.steps],
            "priors": [[origin, str(chain)] for origin, chain in first],
            "run": number,
            "seconds": None if deadline is None else max(0.0, deadline - time.monotonic()),
        }
        tasks = [
            {**task, "device": place, "seed": seed + _SEEDS_APART * worker}
            for worker, place in enumerate(places)
        ]
        return processes.run(tasks, told, note)

    def _teller(self, progress: Progress) -> Callable[[int], None]:
        """Tells the progress of a trial by its number."""
        best: TrialRecord | None = None
        batch = self.request.batch
        assert batch is not None

        def told(number: int) -> None:
            nonlocal best
            trial = self.study.get_trials(deepcopy=False)[number]
            record = store.record(trial, self.roofline, batch)
            if record is None:
                return
            if record.ratio and (best is None or best.ratio is None or record.ratio < best.ratio):
                best = record
            progress.trial(record, best)

        return told

    def _sampler(self, seed: int) -> ChainSampler:
        return ChainSampler(
            self.space.candidates, suited(len(self.space.candidates), self.request), seed
        )


def workplaces(device: torch.device, workers: int) -> list[str]:
    """The devices of so many workers: from the request's on, the GPUs of its kind, in turns.

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
        if place != "cpu" and torch.cuda.get_device_name(place) == name
    ]
    at = alike.index(str(device))
    alike = alike[at:] + alike[:at]
    return [alike[worker % len(alike)] for worker in range(workers)]
