"""What a study's trials say, from one look at them to the next.

A trial that has ended changes no more, so each of those is read once. Reading all at every look
would take a long study more time for each trial, the more it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import optuna
from optuna.trial import FrozenTrial, TrialState

from ksopt.operators.registry import Replacement
from ksopt.search.trial_records import chain_of, facts_of, outcome_of

# Processes that end in the midst of one chain before it is tried no more.
_MOST_ENDS = 3


class Trials:
    """A study's trials as they were at the last look.

    Args:
        study: Whose trials.
    """

    def __init__(self, study: optuna.Study) -> None:
        self._study = study
        self.all: Sequence[FrozenTrial] = ()
        """Every trial, by number."""
        self.open: Sequence[FrozenTrial] = ()
        """Those that had not ended."""

    def look(self) -> list[FrozenTrial]:
        """Read what is new.

        Returns:
            The trials that have ended since the last look.
        """
        known = len(self.all)
        self.all = self._study.get_trials(deepcopy=False)
        seen = [self.all[one.number] for one in self.open] + list(self.all[known:])
        self.open = [trial for trial in seen if not trial.state.is_finished()]
        return [trial for trial in seen if trial.state.is_finished()]


class History:
    """Which chains of a study were tried, at the last look.

    Args:
        study: Whose trials.
    """

    def __init__(self, study: optuna.Study) -> None:
        self._trials = Trials(study)
        self._ends: Counter[Replacement] = Counter()
        self._lost: dict[Replacement, str] = {}
        self.ended: dict[Replacement, None] = {}
        """Chains that are never drawn again, in the order in which that was settled.

        They were measured, or failed; or the processes that measured them were killed so often that
        they may be what kills them. What was only drawn is nobody's fault: a trial has facts from
        when it is measured.
        """
        self.look()

    def look(self) -> None:
        """Read what is new."""
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
        """Whether a trial was enqueued and not drawn yet."""
        return any(trial.state == TrialState.WAITING for trial in self._trials.open)

    @property
    def under_way(self) -> set[Replacement]:
        """Chains of trials that are enqueued or running, without those of ``ended``."""
        return self._apart(self._trials.open)

    @property
    def tried(self) -> set[Replacement]:
        """Chains that are not to be drawn."""
        return {*self.ended, *self.under_way}

    @property
    def begun(self) -> int:
        """How many chains were measured, failed for a reason of their own, or are running."""
        running = (one for one in self._trials.open if one.state == TrialState.RUNNING)
        return len(self.ended) + len(self._apart(running))

    @property
    def lost(self) -> list[tuple[str, Replacement]]:
        """(origin, chain) of what was begun, not ended, and not redone since."""
        under_way = self.under_way
        return [(origin, one) for one, origin in self._lost.items() if one not in under_way]

    def _apart(self, trials: Iterable[FrozenTrial]) -> set[Replacement]:
        chains = (chain_of(trial) for trial in trials)
        return {one for one in chains if one is not None and one not in self.ended}
