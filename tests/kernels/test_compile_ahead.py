"""Processes that compile ahead: what they leave in the cache is what a first product asks for."""

import json
import time
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from ksopt.jit import nvrtc
from ksopt.kernels import compile_ahead, dispatch
from ksopt.kernels.compile_ahead import Compilers, Target
from ksopt.kernels.problem import DeviceSpec, Epilogue, Problem
from ksopt.patterns.chain import Chain, Pattern

H200 = DeviceSpec((9, 0), 132, 228 * 1024)
LAYER = Problem(
    Chain.parse("(1,48,16,2)*(2,16,48,1)"), "float16", False, epilogue=Epilogue(bias=True)
)


def test_on_a_cpu_there_is_nothing_to_compile() -> None:
    assert Target.of(torch.device("cpu")) is None
    with Compilers(None) as compilers:
        compilers.soon([LAYER], 64)
        assert compilers._processes == []


def test_a_target_is_written_and_read() -> None:
    target = Target(H200, "sm_90a")
    assert Target.from_json(json.loads(json.dumps(asdict(target)))) == target


def test_every_worker_gets_its_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead.os, "sched_getaffinity", lambda pid: set(range(16)))
    assert compile_ahead.affordable() == 4
    assert compile_ahead.affordable(workers=4) == 1
    assert compile_ahead.affordable(workers=8) == 0
    monkeypatch.setattr(compile_ahead.os, "sched_getaffinity", lambda pid: set(range(2)))
    assert compile_ahead.affordable() == 0


@pytest.mark.slow
def test_the_kernels_of_a_chain_are_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvrtc.version()  # a test dependency: not a reason to skip
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path))
    with Compilers(Target(H200, "sm_90a"), count=1) as compilers:
        compilers.soon([LAYER, LAYER], 64)
        expected = {
            source
            for problem in (*LAYER.factors(), LAYER)
            for source in compile_ahead.sources(problem, 64, H200)
        }
        assert any("chain_" in source for source in expected)
        until = time.monotonic() + 300
        while len(actual := list(tmp_path.glob("*/sm_90a/*/key.json"))) < len(expected):
            assert time.monotonic() < until, f"{len(actual)} of {len(expected)}"
            time.sleep(0.1)

    def compiles_again(*inputs: object) -> bytes:
        raise AssertionError("it was not in the cache")

    monkeypatch.setattr(nvrtc, "_compile", compiles_again)
    for source in expected:
        assert nvrtc.cubin(source, "sm_90a").data


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("batch_last", [False, True])
def test_sources_for_a_device_that_is_not_here(dtype: str, batch_last: bool) -> None:
    problem = Problem.of_factor(Pattern(4, 64, 64, 16), dtype, batch_last)
    kernels = compile_ahead.sources(problem, 25_088, H200)
    assert len(kernels) > 1
    assert len(set(kernels)) == len(kernels)
    assert not any("naive_kernel" in source for source in kernels)  # it would take far longer
    # Few other families take such j.
    odd = Problem.of_factor(Pattern(3, 5, 7, 11), dtype, batch_last)
    expected = "naive_kernel" if batch_last else "gather_mma_kernel"
    assert any(expected in source for source in compile_ahead.sources(odd, 25_088, H200))


def test_what_pytorch_alone_computes_has_nothing_to_compile() -> None:
    assert (
        compile_ahead.sources(Problem.of_factor(Pattern(1, 16, 16, 3), "float64", False), 64, H200)
        == []
    )


def test_an_older_device_has_the_naive_kernel_alone() -> None:
    old = DeviceSpec((7, 5), 40, 65_536)
    problem = Problem.of_factor(Pattern(1, 16, 16, 3), "bfloat16", True)
    (kernel,) = compile_ahead.sources(problem, 64, old)
    assert nvrtc.cubin(kernel, "compute_75").data


def test_processes_end_when_they_are_closed() -> None:
    compilers = Compilers(Target(H200, "sm_90a"), count=1)
    process = compilers._processes[0]
    compilers.close()
    assert process.has_ended
    compilers.soon([LAYER], 64)


def test_a_quick_choice_leaves_the_cpu_alone() -> None:
    x, weight = torch.randn(4, 128), torch.randn(8, 16, 16, 1)
    dispatch.choose_quickly(x, weight, batch_last=False)
