"""The decisions of the CPU's backend: taken like all others, with a fixed rule and no disk."""

import pytest
import torch

from ksopt.kernels import tuning_cache
from ksopt.kernels.backends import cpu
from ksopt.kernels.problem import ProblemKey
from ksopt.patterns.chain import Pattern
from ksopt.reference import ks_reference

PATTERN = Pattern(2, 64, 64, 2)
KEY = ProblemKey.of(PATTERN, "float32", 16, False, exact=True)


@pytest.fixture(autouse=True)
def no_choices(monkeypatch, tmp_path):
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("KSOPT_TUNE", raising=False)
    cpu.forget()
    yield
    cpu.forget()


@pytest.fixture
def operands():
    return torch.randn(16, PATTERN.in_features), torch.randn(PATTERN.weight_shape)


def test_a_first_product_is_measured_and_not_recorded(operands):
    cpu.run(*operands, False)
    (decision,) = cpu._decisions.values()
    assert decision.cached.source == "measured"
    assert tuning_cache.load(cpu.fingerprint(), KEY) is None


def test_a_tuned_choice_is_read_from_disk(operands):
    way = cpu.tune(*operands, False, 0.01).chosen(repacked=True).way
    cpu.forget()
    cpu.run(*operands, False)
    (decision,) = cpu._decisions.values()
    assert (decision.cached.source, decision.cached.name) == ("recorded", way)


@pytest.mark.parametrize("mode", ["off", "model"])
def test_the_rule_decides_where_nothing_is_timed(mode, operands, monkeypatch):
    cpu.tune(*operands, False, 0.01)
    cpu.forget()
    monkeypatch.setenv("KSOPT_TUNE", mode)
    cpu.run(*operands, False)
    (decision,) = cpu._decisions.values()
    assert (decision.cached.source, decision.cached.name) == ("rule", cpu.rule(PATTERN))


def test_while_another_thread_times_the_rule_serves_and_is_not_stored(operands):
    with cpu._decider.timing:
        y = cpu.run(*operands, False)
        assert not cpu.chosen()
    torch.testing.assert_close(y, ks_reference(*operands, "batch_first"))
    cpu.run(*operands, False)
    assert len(cpu.chosen()) == 1


def test_a_forked_process_may_time_while_its_parent_did(operands):
    with cpu._decider.timing:
        cpu._after_fork()
        cpu.run(*operands, False)
    assert len(cpu.chosen()) == 1


def test_an_empty_batch_decides_nothing(operands):
    x, weight = operands
    assert cpu.run(x[:0], weight, False).shape == (0, PATTERN.out_features)
    assert not cpu.chosen()
