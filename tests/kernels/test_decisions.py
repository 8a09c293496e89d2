"""Decisions under races; a test answers each question."""

import threading
from types import SimpleNamespace

import pytest
import torch

from ksopt.errors import UnavailableError
from ksopt.kernels import decisions, registry, tuning_cache
from ksopt.kernels.autotuner import Choice, Decision
from ksopt.kernels.decisions import Decider, Question
from ksopt.kernels.problem import ProblemKey
from ksopt.kernels.tuning_cache import Record, Timed
from ksopt.patterns.chain import Pattern

MACHINE = {"device": "played"}
KEY = ProblemKey.of(Pattern(2, 8, 8, 2), "float32", 16, False, exact=True)
CPU = torch.device("cpu")


class Race:
    """Counts what was timed, and says that one of PyTorch's ways was the fastest."""

    def __init__(self):
        self.budgets, self.before = [], []

    def __call__(self, budget_s, previous):
        self.budgets.append(budget_s)
        self.before.append(previous)
        way = next(one for one in registry.candidates(KEY.problem, 16, None) if one.name == "bmm")
        record = Record(KEY, 16, (Timed("bmm", None, "any", None, 7.0, 6.0, 8.0),), 0, 0)
        choice = Choice(way, way.build(-1), "measured", record)
        return Decision(choice, choice)


class QuestionCase:
    """One that decides, and one question that is put to it."""

    def __init__(self, keeps_stopgaps=False):
        self.race, self.is_open = Race(), True
        self.backend = SimpleNamespace(spec=lambda _: None, fingerprint=lambda _: dict(MACHINE))
        self.decider = Decider(threading.RLock(), keeps_stopgaps)

    @property
    def question(self):
        return Question(KEY, CPU, self.backend, lambda *how: self.race(*how), lambda: self.is_open)

    def decide(self):
        """Where the decision is from, and whether it holds for later calls."""
        decision, is_final = self.decider.decide("key", self.question)
        return decision.cached.source, is_final

    def while_another_times(self):
        """`decide`, while another thread holds the lock."""
        held, done = threading.Event(), threading.Event()

        def hold():
            with self.decider.timing:
                held.set()
                done.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        try:
            return self.decide()
        finally:
            done.set()
            thread.join()


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def case():
    return QuestionCase()


def test_it_is_measured_once_and_recorded(case):
    assert [case.decide() for _ in range(2)] == [("measured", True)] * 2
    case.decider.forget()  # as in another process
    assert [case.decide() for _ in range(2)] == [("recorded", True)] * 2
    assert case.race.before == [None]


def test_without_a_driver_nothing_is_cached_on_disk(case):
    def missing(_):
        raise UnavailableError("no driver")

    case.backend.fingerprint = missing
    assert case.decide() == ("measured", True)
    case.decider.forget()
    assert case.decide() == ("measured", True)
    with pytest.raises(UnavailableError):
        case.decider.tune("key", case.question, 0.5, lambda _: None)


@pytest.mark.parametrize(("mode", "source"), [("off", "rule"), ("model", "model")])
def test_what_is_not_measured_is_not_stored(case, monkeypatch, mode, source):
    monkeypatch.setenv("KSOPT_TUNE", mode)
    assert case.decide() == (source, True)
    assert not case.decider.table


def test_where_there_is_no_choice_a_rule_decides(case):
    case.is_open = False
    assert case.decide() == ("rule", True)
    assert not case.decider.table


def test_under_determinism_it_is_predicted_whatever_was_measured(case, monkeypatch):
    case.decide()
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert case.decide() == ("model", True)
    monkeypatch.undo()
    assert case.decider.table["key"].cached.source == "measured"


def test_without_memory_it_is_predicted_for_good(case):
    def too_big(*_):
        raise torch.OutOfMemoryError("no")

    race, case.race = case.race, too_big
    assert case.decide() == ("model", True)
    case.race = race
    assert case.decide() == ("model", True)
    assert tuning_cache.load_all(MACHINE) == []
    assert case.decider.timing.acquire(blocking=False)


def test_while_another_thread_times_it_is_decided_for_the_call_alone(case):
    assert case.while_another_times() == ("model", False)
    assert not case.decider.table
    tuning_cache.save(MACHINE, Race()(0.1, None).cached.record)
    assert case.while_another_times() == ("recorded", False)
    assert case.decide() == ("recorded", True)
    assert case.while_another_times() == ("recorded", True)


def test_a_stopgap_may_be_stored_until_it_is_decided():
    case = QuestionCase(keeps_stopgaps=True)
    assert case.while_another_times() == ("model", False)
    tuning_cache.save(MACHINE, Race()(0.1, None).cached.record)
    assert case.while_another_times() == ("model", False)
    assert case.decide() == ("recorded", True)


def test_tuning_measures_again_and_says_so(case):
    heard = []
    case.decide()
    (first,) = tuning_cache.load_all(MACHINE)
    record = case.decider.tune("key", case.question, 0.5, heard.append)
    assert heard == [case.decider.table["key"]]
    assert (case.race.budgets[-1], case.race.before[-1]) == (0.5, first)
    assert tuning_cache.load_all(MACHINE) == [record]


def test_what_is_known_is_this_process_own_or_on_disk(case):
    def known(decision=None):
        return decisions.known_record(decision, KEY, CPU, case.backend)

    assert known() is None
    case.decide()
    decision = case.decider.table["key"]
    record = decision.cached.record
    assert known(decision) == (record, "measured")
    assert known() == (record, "recorded")
    assert known(decisions.by_rule(KEY.problem)) is None  # it is what this process takes
    gone = Timed("gone", None, "any", None, 1.0, 1.0, 1.0)
    tuning_cache.save(MACHINE, Record(KEY, 16, (*record.timed, gone), 0, 1))
    assert known() is None
