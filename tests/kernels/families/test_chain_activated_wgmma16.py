"""Two 16-bit factors with an activation between them: support, choice, and what is launched."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from checks import H200

from ksopt.jit import arch, driver, nvrtc
from ksopt.kernels import planner, registry
from ksopt.kernels.families.base import family_of
from ksopt.kernels.operands import random_operands
from ksopt.kernels.problem import DeviceSpec, Epilogue, Problem, SecondLayer
from ksopt.patterns.chain import Chain

family = family_of("chain_activated_wgmma16")
COLA = ("(1,256,1024,1)", "(1,1024,256,1)")


def problem_of(first, second, dtype="bfloat16", ahead=None, after=None):
    ahead = Epilogue(activation="silu") if ahead is None else ahead
    second = SecondLayer(Chain.parse(second), after or Epilogue(True, "none", True))
    return Problem(Chain.parse(first), dtype, False, epilogue=ahead, second=second)


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (problem_of(*COLA), None),
        (problem_of("(4,64,192,1)", "(1,96,64,4)", "float16"), None),
        (problem_of(*COLA, ahead=Epilogue(True, "silu")), "no bias"),
        (problem_of(*COLA, dtype="float32"), "float32"),
        (problem_of("(1,32,48,2)*(2,48,32,1)", "(1,64,64,1)"), "these have 2 and 1"),
        (problem_of("(1,64,192,2)", "(1,96,128,1)"), "is not of the form"),
        (problem_of(*COLA).layers()[0], "this is one"),
    ],
)
def test_what_it_computes(problem, words):
    reason = family.unsupported_reason(problem, H200)
    assert (reason is None) if words is None else (words in reason)


def test_it_is_taken_for_thousands_of_rows():
    plan = planner.plan_of(problem_of(*COLA), 8192, spec=H200)
    assert plan.ways == (family.name,)
    assert plan.is_whole
    assert len(planner.plan_of(problem_of(*COLA), 16, spec=H200).launches) == 2


def test_the_activation_takes_time():
    bare = problem_of(*COLA, ahead=Epilogue(), after=Epilogue())
    tile = registry.ranked(family, bare, 8192, H200)[0].tile
    activated = problem_of(*COLA, after=Epilogue())
    us = [family.predicted_us(one, tile, 8192, H200) for one in (bare, activated)]
    assert us[0] < us[1]


def test_what_is_launched(monkeypatch):
    launched = []

    def launch(kernel, blocks, threads, shared_bytes, arguments, device, early=False):
        launched.append((kernel, arguments))

    monkeypatch.setattr(nvrtc, "cubin", lambda source, arch: SimpleNamespace(data=b""))
    monkeypatch.setattr(arch, "of_device", lambda device: "sm_90a")
    monkeypatch.setattr(driver, "load_kernel", lambda code, name, shared_bytes, device: name)
    monkeypatch.setattr(driver, "launch", launch)
    monkeypatch.setattr(DeviceSpec, "of_device", lambda device: H200)
    problem = problem_of(*COLA)
    tile = registry.ranked(family, problem, 8192, H200)[0].tile
    call = family.launcher(problem, tile, 0)
    operands = random_operands(problem, 70, torch.device("cpu"))
    for _ in range(2):
        y = call(*operands.arguments(problem))
    assert y.shape == (70, 1024)
    packs = [kernel.startswith("ksopt_chain_pack") for kernel, _ in launched]
    assert packs == [True, False, False]
    assert launched[-1][0].endswith("silu_between")
    # The first layer's factor, and then the second one's, as the host library packs two chains.
    packing, arguments = launched[0][1], launched[-1][1]
    pointers = [packing.weights[at][0] for at in range(2)]
    assert pointers == [weight.data_ptr() for weight in operands.weights]
    assert arguments.weights == packing.packed
    assert arguments.bias == operands.bias.data_ptr()
    assert arguments.residual == operands.residual.data_ptr()
