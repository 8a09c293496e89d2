"""The chains in a study's trials, read again and again."""

from typing import Any

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.trial import TrialState, create_trial

from ksopt.search import history
from ksopt.search.history import History

CHAINS = [f"(1,{2**k},4,1)" for k in range(4)]
MEASURED: dict[str, Any] = {"facts": {"device": "cpu"}}
# How a trial may end, or not: its state, and what was written of it.
ENDS: dict[str, tuple[TrialState, dict[str, Any]]] = {
    "complete": (TrialState.COMPLETE, {**MEASURED, "outcome": {"latency": {}}}),
    "pruned": (TrialState.PRUNED, {**MEASURED, "outcome": {"pruned": "slow"}}),
    "failed": (TrialState.FAIL, {**MEASURED, "outcome": {"reason": "it failed"}}),
    "interrupted": (TrialState.FAIL, {**MEASURED, "interrupted": True}),
    "killed": (TrialState.FAIL, MEASURED),
    "killed when drawn": (TrialState.FAIL, {}),
    "under way": (TrialState.RUNNING, MEASURED),
    "enqueued": (TrialState.WAITING, {}),
}


@pytest.fixture
def study() -> optuna.Study:
    return optuna.create_study()


def add(study: optuna.Study, chain: str, end: str) -> None:
    state, attrs = ENDS[end]
    value = 1.0 if state == TrialState.COMPLETE else None
    attrs = {"chain": chain, "origin": f"of {chain}", **attrs}
    study.add_trial(create_trial(state=state, value=value, user_attrs=attrs))


def state_of(of: History) -> dict[str, Any]:
    return {
        "tried": {str(chain) for chain in of.tried},
        "counts": (of.begun, len(of.ended), of.waiting),
        "lost": {str(chain): origin for origin, chain in of.lost},
        "apart": not of.ended.keys() & of.under_way,
    }


@pytest.mark.parametrize(
    ("end", "tried", "counts", "lost"),
    [
        ("complete", True, (1, 1, False), False),
        ("pruned", True, (1, 1, False), False),
        ("failed", True, (1, 1, False), False),
        ("interrupted", False, (0, 0, False), True),
        ("killed", False, (0, 0, False), True),
        ("killed when drawn", False, (0, 0, False), True),
        ("under way", True, (1, 0, False), False),
        ("enqueued", True, (0, 0, True), False),
    ],
)
def test_how_a_trial_ended_says_whether_its_chain_is_drawn_again(
    study: optuna.Study, end: str, tried: bool, counts: tuple[int, int, bool], lost: bool
) -> None:
    add(study, CHAINS[0], end)
    assert state_of(History(study)) == {
        "tried": {CHAINS[0]} if tried else set(),
        "counts": counts,
        "lost": {CHAINS[0]: f"of {CHAINS[0]}"} if lost else {},
        "apart": True,
    }


@pytest.mark.parametrize("behind", [False, True])
def test_a_chain_that_three_processes_ended_in_is_tried_no_more(
    study: optuna.Study, behind: bool
) -> None:
    add(study, CHAINS[0], "killed")
    if behind:  # a trial that goes on: what comes after it has no fixed place yet
        add(study, CHAINS[1], "under way")
    add(study, CHAINS[0], "killed")
    assert CHAINS[0] not in state_of(History(study))["tried"]
    add(study, CHAINS[0], "killed")
    assert CHAINS[0] in state_of(History(study))["tried"]
    assert not state_of(History(study))["lost"]


def test_what_was_cut_off_and_redone_is_not_lost(study: optuna.Study) -> None:
    add(study, CHAINS[0], "killed")
    looked = History(study)
    assert state_of(looked)["lost"] == {CHAINS[0]: f"of {CHAINS[0]}"}
    add(study, CHAINS[0], "complete")
    looked.look()
    assert not state_of(looked)["lost"]


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.sampled_from(CHAINS), st.sampled_from(list(ENDS)), st.booleans())),
)
def test_looks_in_between_change_nothing(steps: list[tuple[str, str, bool]]) -> None:
    """An updated history equals one that reads the study for the first time."""
    study = optuna.create_study()
    looked = History(study)
    running: list[int] = []
    for chain, end, is_ended in steps:
        add(study, chain, end)
        if end == "under way":
            running.append(len(study.get_trials(deepcopy=False)) - 1)
        if is_ended and running:
            study.tell(running.pop(0), 1.0)
        looked.look()
        assert state_of(looked) == state_of(History(study))


def test_a_trial_that_has_ended_is_read_once(
    study: optuna.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers: list[int] = []

    def chain_of(trial: optuna.trial.FrozenTrial) -> Any:
        numbers.append(trial.number)
        return real(trial)

    real = history.chain_of
    monkeypatch.setattr(history, "chain_of", chain_of)
    looked = History(study)
    for at in range(3):
        add(study, CHAINS[at], "complete")
        looked.look()
    add(study, CHAINS[3], "under way")
    looked.look()
    looked.look()
    assert numbers == [0, 1, 2]
    assert {str(chain) for chain in looked.under_way} == {CHAINS[3]}
