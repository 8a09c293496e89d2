"""A search from request to report: an Optuna study over the chains of a space."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import optuna
from optuna.trial import Trial, TrialState

from ksopt.bench import device as devices
from ksopt.bench.device import DeviceRecord
from ksopt.bench.roofline import Roofline, measure_roofline
from ksopt.bench.timing import Measurement
from ksopt.errors import KsoptError
from ksopt.pattern import Chain
from ksopt.search import priors, recommend, report, sampler, store, words
from ksopt.search.given import GivenWeights
from ksopt.search.objective import Objective
from ksopt.search.progress import Progress, Silent
from ksopt.search.request import SearchRequest
from ksopt.search.result import SearchResult, SpaceRecord, TrialRecord
from ksopt.search.sampler import ChainSampler
from ksopt.search.space import Space, build

# Large enough that a GPU is busy and a CPU answers in milliseconds.
DEFAULT_BATCH = {"cpu": 256, "cuda": 8192}


def run_search(request: SearchRequest, progress: Progress | None = None) -> SearchResult:
    """Measure chains for a layer on this device, recommend, and write the report.

    Run again with the same output folder, it goes on with the study that is there: nothing that was
    measured is measured again, except that the finalists and the dense layer are always timed anew
    and together, so that no verdict rests on times of two processes. Ctrl-C ends it early, with a
    report of what was measured.

    Args:
        request: What to search.
        progress: Told how far it is; None shows nothing.

    Returns:
        What was found. ``result.folder`` holds report.html, report.md, results.json, plan.json,
        trials.csv and (unless another storage was given) study.db.

    Raises:
        InvalidInputError: No such device; no chain within any budget; an output folder or storage
            that cannot be used, or that holds a study of something else.

    Example:
        >>> import tempfile
        >>> request = SearchRequest(
        ...     "32x64", budgets=("50%",), batch=16, device="cpu", trials=3, out=tempfile.mkdtemp()
        ... )
        >>> result = run_search(request)
        >>> [trial.state for trial in result.trials], result.recommendations[0].chosen is not None
        (['complete', 'complete', 'complete'], True)
    """
    began = time.monotonic()
    progress = progress or Silent()
    try:
        with _quiet_optuna():
            return _run(request, progress, began)
    finally:
        progress.close()


def _run(request: SearchRequest, progress: Progress, began: float) -> SearchResult:
    device = devices.resolve(request.device)
    request = replace(
        request,
        device=str(device),
        batch=request.batch or DEFAULT_BATCH[device.type],
    )
    request = replace(request, out=request.out or _default_folder(request))
    record = devices.record(device)
    given = GivenWeights.of(request, device)
    progress.note(f"listing the chains of {words.layer(request.size)} within the budget")
    space = build(request)
    with store.folder(request) as folder:
        study = store.open_study(request, record, None if given is None else given.digest)
        progress.note(f"measuring the roofline of {record.name}")
        roofline = measure_roofline(device, request.dtype)
        campaign = _Campaign.begin(study, space, request, roofline, record)
        objective = Objective(request, device, given)
        stopped = campaign.run(objective, progress, began)
        trials = store.records(study, roofline, campaign.batch)
        final: dict[str, Measurement] | None = None
        elected = recommend.elect(trials, space.steps, request.max_error)
        if elected and stopped != "interrupted":
            progress.note(f"timing {len(elected)} finalists against each other and dense")
            try:
                final = objective.final([trial.facts.chain for trial in elected])
            except KeyboardInterrupt:
                stopped = "interrupted"
        standing = recommend.finalists(elected, final)
        result = SearchResult(
            request=request,
            device=record,
            runs=store.runs(study),
            roofline=roofline,
            space=SpaceRecord(len(space.candidates), space.count, space.exact, space.complete),
            sampler=campaign.sampler.name,
            trials=trials,
            finalists=standing,
            recommendations=recommend.recommend(space, standing, request.max_error),
            stopped=stopped,
            seconds=time.monotonic() - began,
            folder=folder,
        )
        report.write(result, folder)
        return result


@dataclass
class _Campaign:
    """One run's share of the trials of a study."""

    study: optuna.Study
    sampler: ChainSampler
    request: SearchRequest
    roofline: Roofline
    pending: list[tuple[str, Chain]]
    number: int

    @classmethod
    def begin(
        cls,
        study: optuna.Study,
        space: Space,
        request: SearchRequest,
        roofline: Roofline,
        device: DeviceRecord,
    ) -> _Campaign:
        """Take up the study where it is: what was cut off comes first, then the priors."""
        store.give_up_running(study)
        known = store.tried(study)
        number = store.begin_run(study, device)
        chains = ChainSampler(
            space.candidates,
            tried=known,
            exhaustive=len(space.candidates) <= request.trials,
            seed=request.seed + len(study.get_trials(deepcopy=False)),
        )
        study.sampler = chains
        first = [*store.lost(study), *priors.enqueued(space, request, roofline)]
        pending: dict[Chain, str] = {}
        for origin, chain in first:
            if chain not in known:
                pending.setdefault(chain, origin)
                chains.close(chain)
        return cls(
            study, chains, request, roofline, [(o, chain) for chain, o in pending.items()], number
        )

    @property
    def batch(self) -> int:
        """Rows of the input."""
        assert self.request.batch is not None
        return self.request.batch

    def run(self, objective: Objective, progress: Progress, began: float) -> str | None:
        """Measure until the trials are done; why it stopped before, or None."""
        done = store.settled(self.study)
        progress.start(max(self.request.trials, done), done)
        best: TrialRecord | None = None
        try:
            while done < self.request.trials and self._has_more():
                limit = self.request.timeout_s
                if limit is not None and time.monotonic() - began > limit:
                    return "timeout"
                record = self._trial(objective)
                done += 1
                if record.ratio and (
                    best is None or best.ratio is None or record.ratio < best.ratio
                ):
                    best = record
                progress.trial(record, best)
        except KeyboardInterrupt:
            store.give_up_running(self.study)
            return "interrupted"
        return None

    def _has_more(self) -> bool:
        waiting = self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,))
        return bool(self.pending or waiting or self.sampler.remaining)

    def _trial(self, objective: Objective) -> TrialRecord:
        if self.pending:
            origin, chain = self.pending.pop(0)
            self.study.enqueue_trial(
                sampler.coordinates(chain), user_attrs={"chain": str(chain), "origin": origin}
            )
        trial = self.study.ask(sampler.distributions(self.request.size))
        drawn = self.sampler.drawn(trial.number)
        if drawn is not None:
            trial.set_user_attr("origin", drawn[1])
            trial.set_user_attr("chain", str(drawn[0]))
        chain = Chain.parse(trial.user_attrs["chain"])
        trial.set_user_attr("run", self.number)
        self._note_facts(trial, chain)
        try:
            outcome = objective.measure(chain)
        except (KsoptError, RuntimeError) as error:
            # Out of memory, a kernel that does not compile, a wrong result: the chain has no time.
            trial.set_user_attr("reason", f"{type(error).__name__}: {error}".splitlines()[0])
            self.study.tell(trial, state=TrialState.FAIL)
        else:
            latency, dense = outcome.latency.median_us, outcome.dense.median_us
            floor = self.roofline.chain_floor_us(chain, self.batch)
            for name, value in {
                "latency": asdict(outcome.latency),
                "dense": asdict(outcome.dense),
                "dense_ratio": latency / dense,
                "efficiency": floor / latency,
                "error": outcome.error,
                "error_pytorch": outcome.error_pytorch,
                "weight_error": outcome.weight_error,
            }.items():
                trial.set_user_attr(name, value)
            self.study.tell(trial, [latency, chain.nnz])
        return next(
            record
            for record in store.records(self.study, self.roofline, self.batch)
            if record.number == trial.number
        )

    def _note_facts(self, trial: Trial, chain: Chain) -> None:
        known = priors.facts(chain, self.roofline, self.batch)
        for name in ("nnz", "share", "rho", "d_rho", "floor_us"):
            trial.set_user_attr(name, getattr(known, name))


@contextmanager
def _quiet_optuna() -> Iterator[None]:
    """Optuna's log would break the progress bar; failures are in the report."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)


def _default_folder(request: SearchRequest) -> Path:
    device = request.device.replace(":", "")
    name = f"ksopt-report-{request.size}-{device}-{request.dtype}-{request.layout}-{request.batch}"
    return Path(name)
