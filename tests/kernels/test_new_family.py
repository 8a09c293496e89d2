"""A kernel family is one module: what registers from outside is chosen like ksopt's own."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import stand_ins
import torch
from stand_ins import OnDevice
from toy_chains import toy_device

from ksopt.cli.main import main
from ksopt.errors import InvalidInputError
from ksopt.kernels import registry
from ksopt.kernels.backends import cuda
from ksopt.kernels.explain import choice_report
from ksopt.kernels.families.base import (
    KernelFamily,
    families,
    family_of,
    register_family,
    unregister_family,
)
from ksopt.kernels.problem import DeviceSpec, Problem
from ksopt.patterns.chain import Pattern
from ksopt.reference import ks_reference

PATTERN = Pattern(4, 64, 64, 16)
PROBLEM = Problem.of_factor(PATTERN, "float16", batch_last=False)


@dataclass(frozen=True)
class ToyConfig:
    """Two tiles, of which the first is the faster."""

    number: int
    blocks: int = 1

    def shared_bytes(self, p: Pattern) -> int:
        return 0


class Toy(KernelFamily[ToyConfig]):
    """Multiplies by PyTorch, and predicts that this takes little time: it does on the stand-in."""

    name = "toy"
    dtypes = family_of("mma16").dtypes
    layout = "batch_first"
    clock: stand_ins.Clock

    def configs(self, problem: Problem, device: DeviceSpec) -> Iterator[ToyConfig]:
        yield from (ToyConfig(0), ToyConfig(1))

    def predicted_us(
        self, problem: Problem, config: ToyConfig, batch: int, device: DeviceSpec
    ) -> float:
        return 8.0 + config.number

    def sources(self, problem: Problem, config: ToyConfig) -> list[str]:
        return []

    def launcher(self, problem: Problem, config: ToyConfig, device_index: int) -> Any:
        def multiply(x, weight, out=None):
            y = ks_reference(x, weight)
            self.clock.now_ms += 0.1 * (1 + config.number)
            return y if out is None else out.copy_(y)

        return multiply


@pytest.fixture
def device(monkeypatch, tmp_path):
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path / "cache"))
    yield stand_ins.install(monkeypatch)
    cuda.forget()


@pytest.fixture
def toy(device):  # after the stand-ins have taken the other launchers' place
    register_family(Toy)
    family = family_of("toy")
    family.clock = device.clock
    yield family
    if any(family.name == "toy" for family in families()):
        unregister_family("toy")


def names() -> set[str]:
    return {one.name for one in registry.candidates(PROBLEM, 1000, stand_ins.A100)}


def operands():
    x = torch.randn(1000, PATTERN.in_features).half().as_subclass(OnDevice)
    return x, torch.randn(PATTERN.weight_shape).half()


def test_it_is_among_the_candidates_until_it_is_unregistered(toy):
    assert "toy" in names()
    unregister_family("toy")
    assert "toy" not in names()
    with pytest.raises(InvalidInputError, match=r"'toy' is not a kernel family; there are .*mma16"):
        unregister_family("toy")


@pytest.mark.usefixtures("toy")
def test_it_is_chosen_launched_and_recorded_and_gone_after_unregistering(device):
    x, weight = operands()
    y = cuda.run(x, weight, False)
    assert torch.equal(y, ks_reference(x, weight))
    choice = cuda.choice_for(x, weight, False)
    assert (choice.name, choice.source) == ("toy", "measured")
    assert choice.candidate.config == {"number": 0, "blocks": 1}
    assert {"toy", "mma16", "bmm"} <= {name for name, _ in choice.times_us}
    out = torch.empty_like(y)
    assert cuda.run(x, weight, False, out) is out
    cuda.forget()  # as in another process
    assert cuda.choice_for(x, weight, False).source == "recorded"
    unregister_family("toy")
    cuda.forget()
    again = cuda.choice_for(x, weight, False)
    assert (again.source, again.name) == ("measured", "mma16")
    assert "toy" not in dict(again.times_us)


@pytest.mark.usefixtures("toy")
def test_the_cost_model_alone_takes_it(monkeypatch):
    monkeypatch.setenv("KSOPT_TUNE", "model")
    report = choice_report(PATTERN, "float16", 1000, spec=stand_ins.A100)
    assert (report.way, report.predicted_us) == ("toy", 8.0)
    other_layout = choice_report(PATTERN, "float16", 1000, batch_last=True, spec=stand_ins.A100)
    assert other_layout.way != "toy"


@pytest.mark.usefixtures("toy")
def test_two_families_cannot_have_one_name():
    with pytest.raises(InvalidInputError, match="there is a family 'toy' already"):
        register_family(Toy)


def test_tune_times_the_family_of_a_plugin(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path / "cache"))
    chain = "(1,24,8,2)*(2,8,24,1)"
    words = ["tune", "--chain", chain, "--batch", "8", "--device", "cpu", "--seconds", "0.01"]
    with toy_device():
        try:
            assert main([*words, "--plugins", "plugin_family"]) == 0
        finally:
            unregister_family("plugin_chain")
            del sys.modules["plugin_family"]  # which another test may import
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"{chain} ")]
    assert "plugin_chain" in rows[0]
