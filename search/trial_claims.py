"""Claims of trials: no two processes measure the same chain, and no chain is lost.

Processes that share a study draw their chains one after the other, in turns (`Storage.turn`), and
then measure concurrently. Each marks its trial as its own. A trial whose process has ended is
failed and its chain drawn again. On the same machine this is detected at once, by a lock that ends
with the process. On another machine, the heartbeat must have stopped for a minute: Optuna's own
heartbeat works alike, but only for databases and for `Study.optimize`.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, Trial, TrialState

from ksopt.operators import registry
from ksopt.operators.registry import Replacement
from ksopt.search import device_locks
from ksopt.search.device_locks import Presence
from ksopt.search.history import History
from ksopt.search.samplers import chain_sampler, factor_times
from ksopt.search.samplers.chain_sampler import ChainSampler
from ksopt.search.samplers.factor_times import Estimator
from ksopt.search.storage import Storage

BEAT_S = 10.0
"""Seconds between two heartbeats."""
GRACE_S = 60.0
"""Seconds without a heartbeat after which a process of another machine counts as ended."""


@dataclass(frozen=True)
class Claim:
    """A trial that this process has claimed."""

    trial: Trial
    chain: Replacement


@dataclass
class Claims:
    """Trials of a study for one process.

    Args:
        storage: Of the study.
        study: The study.
        chains: The sampler, used if no lost chain and no prior is left.
        priors: (origin, chain) to measure first.
        limit: Total number of trials of the study.
        run: The run of the study that this process belongs to, from 1.
        presence: This process's.
        estimator: Proposes chains in turns with ``chains``; None for none.
        clock: Seconds, rising.
    """

    storage: Storage
    study: optuna.Study
    chains: ChainSampler
    priors: Sequence[tuple[str, Replacement]]
    limit: int
    run: int
    presence: Presence
    estimator: Estimator | None = None
    clock: Callable[[], float] = time.monotonic
    # The last heartbeat of each running trial of another machine, and when it was first seen.
    _seen: dict[int, tuple[object, float]] = field(default_factory=dict)

    @functools.cached_property
    def _history(self) -> History:
        return History(self.study)

    def next(self) -> Claim | None:
        """A trial to measure; None if there is none at present: see `others`."""
        self.study.sampler = self.chains
        history = self._history
        with self.storage.turn():
            history.look()
            if self._fail_dead(history.open):
                history.look()
            if history.begun >= self.limit:
                return None
            under_way = history.under_way
            self.chains.close(history.ended, under_way)
            priors = [one for one in self.priors if one[1] not in history.ended]
            first = [*history.lost, *(one for one in priors if one[1] not in under_way)]
            if not (history.waiting or first or self.chains.remaining):
                return None
            if not (first or history.waiting) and self.estimator is not None:
                guess = self.estimator.next(history.trials, history.tried)
                first = [] if guess is None else [(factor_times.ORIGIN, guess)]
            if first and not history.waiting:
                origin, chain = first[0]
                self.study.enqueue_trial(
                    chain_sampler.coordinates(chain),
                    user_attrs={"chain": str(chain), "origin": origin},
                )
            trial = self.study.ask(chain_sampler.distributions(self.chains.dims))
            drawn = self.chains.drawn(trial.number)
            if drawn is not None:
                trial.set_user_attr("origin", drawn[1])
                trial.set_user_attr("chain", str(drawn[0]))
            whose = {"run": self.run, "host": self.presence.host, "worker": self.presence.token}
            trial.set_user_attr("claim", whose)
            return Claim(trial, registry.parse(trial.user_attrs["chain"]))

    def share_begun(self) -> float:
        """Number of begun trials of the study, over its limit."""
        self._history.look()
        return self._history.begun / self.limit

    def others(self) -> bool:
        """Whether other processes are measuring, whose lost trials may fall to this one."""
        running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return any(_claim_of(trial).get("worker") != self.presence.token for trial in running)

    def give_back(self, claim: Claim) -> None:
        """Return a trial that was not begun to the other processes."""
        with suppress(UpdateFinishedTrialError):  # another process failed it meanwhile
            claim.trial.set_user_attr("interrupted", True)
        self.study.tell(claim.trial, state=TrialState.FAIL, skip_if_finished=True)

    def _fail_dead(self, trials: Sequence[FrozenTrial]) -> bool:
        """Fail the trials of ended processes; return whether there were any."""
        running = [trial for trial in trials if trial.state == TrialState.RUNNING]
        dead = [trial for trial in running if self._is_dead(trial)]
        for trial in dead:
            self.study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)
        numbers = {trial.number for trial in running}
        self._seen = {number: seen for number, seen in self._seen.items() if number in numbers}
        return bool(dead)

    def _is_dead(self, trial: FrozenTrial) -> bool:
        whose = _claim_of(trial)
        if not whose:
            return True  # its process was killed before its turn ended
        gone = device_locks.is_gone(whose["host"], whose["worker"])
        if gone is not None:
            return gone
        mark, now = trial.user_attrs.get("heartbeat"), self.clock()
        last, since = self._seen.setdefault(trial.number, (mark, now))
        if mark != last:
            self._seen[trial.number] = (mark, now)
            return False
        return now - since > GRACE_S


def _claim_of(trial: FrozenTrial) -> Mapping[str, Any]:
    """The run, host and worker of a trial; empty if not written yet."""
    return dict(trial.user_attrs.get("claim", {}))


@contextmanager
def alive(held: Callable[[], Iterable[Claim]]) -> Iterator[None]:
    """Context that writes heartbeats to all trials that this process holds, of all studies.

    Trials drawn ahead wait while others are measured: without heartbeats, another machine would
    take them over.

    Args:
        held: Returns the current claims; it is called from another thread.
    """
    ended = threading.Event()

    def beat() -> None:
        count = 0
        while not ended.wait(BEAT_S):
            count += 1
            for claim in held():
                with suppress(UpdateFinishedTrialError):  # another process failed it meanwhile
                    claim.trial.set_user_attr("heartbeat", count)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
