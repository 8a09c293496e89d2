"""Which chains of a study were tried, from one look at its trials to the next.

A trial that has ended changes no more, so each of those is read once. Reading all at every look
would take a long study more time for each trial, the more it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import optuna
from optuna.trial import FrozenTrial, TrialState

from ksopt.operators.registry import Replacement
from ksopt.search.trial_records import chain_of, facts_of, outcome_of

# Processes that end in the midst of one chain before it is tried no more.
_MOST_ENDS = 3


@dataclass
class Tally:
    """What some trials say of their chains.

    Args:
        tried: Not to be drawn again, in the order in which that was settled. They were measured, or
            failed, or are under way; or the processes that measured them were killed so often that
            they may be what kills them.
        ends: How many processes ended in the midst of a chain. What was only drawn is nobody's
            fault: a trial has facts from when it is measured.
        failed: The origins of what was begun and not measured.
    """

    tried: dict[Replacement, None] = field(default_factory=dict)
    ends: Counter[Replacement] = field(default_factory=Counter)
    failed: dict[Replacement, str] = field(default_factory=dict)

    @classmethod
    def of(cls, trials: Iterable[FrozenTrial]) -> Tally:
        """Of these trials alone."""
        tally = cls()
        for trial in trials:
            tally.add(trial)
        return tally

    def add(self, trial: FrozenTrial) -> None:
        """One trial more."""
        chain = chain_of(trial)
        if chain is None:  # its process ended before it had one
            return
        if trial.state != TrialState.FAIL:
            self.tried[chain] = None
            return
        self.failed[chain] = str(trial.user_attrs["origin"])
        if "reason" in outcome_of(trial):
            self.tried[chain] = None
        elif "interrupted" not in trial.user_attrs and facts_of(trial):
            self.ends[chain] += 1
            if self.ends[chain] >= _MOST_ENDS:
                self.tried[chain] = None


class History:
    """A study's trials as they were at the last look, which may be this process's or another's.

    Args:
        study: Whose trials.
    """

    def __init__(self, study: optuna.Study) -> None:
        self._study = study
        self._read = 0
        self.ended = Tally()
        """Of the first trials, all of which have ended. What was tried there stays so."""
        self.look()

    def look(self) -> None:
        """Read what is new."""
        self.trials: Sequence[FrozenTrial] = self._study.get_trials(deepcopy=False)
        while self._read < len(self.trials) and self.trials[self._read].state.is_finished():
            self.ended.add(self.trials[self._read])
            self._read += 1
        later = self.trials[self._read :]
        self._rest = Tally.of(one for one in later if one.state != TrialState.WAITING)
        self._waiting = [one for one in later if one.state == TrialState.WAITING]

    @property
    def waiting(self) -> bool:
        """Whether a trial was enqueued and not drawn yet."""
        return bool(self._waiting)

    @property
    def recent(self) -> set[Replacement]:
        """Chains that are not to be drawn again, of which ``ended`` knows nothing yet."""
        waiting = {chain for one in self._waiting if (chain := chain_of(one)) is not None}
        return self._recent | (waiting - self.ended.tried.keys())

    @property
    def tried(self) -> set[Replacement]:
        """Chains that are not to be drawn again."""
        return {*self.ended.tried, *self.recent}

    @property
    def begun(self) -> int:
        """How many chains were measured, failed for a reason of their own, or are under way."""
        return len(self.ended.tried) + len(self._recent)

    @property
    def settled(self) -> int:
        """How many were measured or failed for a reason of their own."""
        return len(Tally.of(one for one in self.trials if one.state.is_finished()).tried)

    @property
    def lost(self) -> list[tuple[str, Replacement]]:
        """(origin, chain) of what was begun, not ended, and not redone since."""
        failed, recent = {**self.ended.failed, **self._rest.failed}, self.recent
        return [
            (origin, chain)
            for chain, origin in failed.items()
            if chain not in self.ended.tried and chain not in recent
        ]

    @property
    def _recent(self) -> set[Replacement]:
        """Of trials that were drawn."""
        ends = {chain: count + self.ended.ends[chain] for chain, count in self._rest.ends.items()}
        often = [chain for chain, count in ends.items() if count >= _MOST_ENDS]
        return {one for one in [*self._rest.tried, *often] if one not in self.ended.tried}
