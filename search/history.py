"""History of a study's trials, updated incrementally.

A trial that has ended no longer changes, so each is read once. Reading all at every update would
take time proportional to the number of trials.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import optuna
from optuna.trial import FrozenTrial, TrialState

from ksopt.operators.registry import Replacement
from ksopt.search.trial_records import chain_of, facts_of, outcome_of

# Processes that may die while measuring one chain before it is excluded.
_MOST_ENDS = 3


class Trials:
    """A study's trials at the last update.

    Args:
        study: The study.
    """

    def __init__(self, study: optuna.Study) -> None:
        self._study = study
        self.all: Sequence[FrozenTrial] = ()
        """Every trial, by number."""
        self.open: Sequence[FrozenTrial] = ()
        """The trials that had not ended."""

    def look(self) -> list[FrozenTrial]:
        """Read new trials and states.

        Returns:
            The trials that have ended since the last update.
        """
        known = len(self.all)
        self.all = self._study.get_trials(deepcopy=False)
        seen = [self.all[one.number] for one in self.open] + list(self.all[known:])
        self.open = [trial for trial in seen if not trial.state.is_finished()]
        return [trial for trial in seen if trial.state.is_finished()]


class History:
    """The chains of a study that were tried, at the last update.

    Args:
        study: The study.
    """

    def __init__(self, study: optuna.Study) -> None:
        self._trials = Trials(study)
        self._ends: Counter[Replacement] = Counter()
        self._lost: dict[Replacement, str] = {}
        self.ended: dict[Replacement, None] = {}
        """Chains that are never drawn again, in the order of that decision.

        They were measured, or failed; or the processes that measured them were killed so often that
        they may be the cause. A chain that was only drawn does not count: a trial has facts once it
        is measured.
        """
        self.look()

    def look(self) -> None:
        """Read new trials and states."""
        for trial in self._trials.look():
            chain = chain_of(trial)
            if chain is not None:  # else its process ended before it had one
                self._add(chain, trial)

    def _add(self, chain: Replacement, trial: FrozenTrial) -> None:
        is_tried = trial.state != TrialState.FAIL or "reason" in outcome_of(trial)
        if not is_tried and "interrupted" not in trial.user_attrs and facts_of(trial):
            self._ends[chain] += 1
            is_tried = self._ends[chain] >= _MOST_ENDS
        if is_tried:
            self.ended[chain] = None
            self._lost.pop(chain, None)
        elif chain not in self.ended:
            self._lost[chain] = str(trial.user_attrs["origin"])

    @property
    def trials(self) -> Sequence[FrozenTrial]:
        """All trials, by number."""
        return self._trials.all

    @property
    def open(self) -> Sequence[FrozenTrial]:
        """The trials that had not ended."""
        return self._trials.open

    @property
    def waiting(self) -> bool:
        """Whether an enqueued trial was not drawn yet."""
        return any(trial.state == TrialState.WAITING for trial in self._trials.open)

    @property
    def under_way(self) -> set[Replacement]:
        """Chains of trials that are enqueued or running, without those of ``ended``."""
        return self._apart(self._trials.open)

    @property
    def tried(self) -> set[Replacement]:
        """Chains that must not be drawn."""
        return {*self.ended, *self.under_way}

    @property
    def begun(self) -> int:
        """Number of chains that were measured, failed for a reason of their own, or are running."""
        running = (one for one in self._trials.open if one.state == TrialState.RUNNING)
        return len(self.ended) + len(self._apart(running))

    @property
    def lost(self) -> list[tuple[str, Replacement]]:
        """(origin, chain) of trials that were begun, did not end, and were not repeated since."""
        under_way = self.under_way
        return [(origin, one) for one, origin in self._lost.items() if one not in under_way]

    def _apart(self, trials: Iterable[FrozenTrial]) -> set[Replacement]:
        chains = (chain_of(trial) for trial in trials)
        return {one for one in chains if one is not None and one not in self.ended}
