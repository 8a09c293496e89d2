"""What is compiled ahead of what is timed."""

import json
import subprocess
import sys
import time

import pytest

from ksopt.bench import compile_ahead
from ksopt.jit import nvrtc
from ksopt.kernels.problem import DeviceSpec, Problem
from ksopt.patterns.chain import Pattern

H200 = DeviceSpec((9, 0), 132, 227 * 1024 + 1024)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("batch_last", [False, True])
def test_sources_for_a_machine_that_is_not_here(dtype: str, batch_last: bool) -> None:
    pytest.importorskip("cuda.bindings")
    problem = Problem(Pattern(4, 64, 64, 16), dtype, batch_last)
    found = compile_ahead.sources(problem, 25_088, H200)
    assert len(found) > 1
    assert len(set(found)) == len(found)
    assert not any("naive_kernel" in source for source in found)  # it would take far longer
    odd = Problem(Pattern(3, 5, 7, 11), dtype, batch_last)
    assert "naive_kernel" in compile_ahead.sources(odd, 25_088, H200)[-1]


def test_a_process_compiles_ahead_into_the_cache(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cuda.bindings")
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path))
    problem = Problem(Pattern(1, 16, 16, 3), "float64", False)
    assert compile_ahead.sources(problem, 64, H200) == []  # no kernel takes it: PyTorch's ways do
    job = {
        "problems": [[[1, 16, 16, 3], 64]],
        "dtype": "bfloat16",
        "batch_last": True,
        "spec": {"capability": [7, 5], "multiprocessors": 40, "shared_bytes": 65536},
        "target": "compute_75",
    }
    process = compile_ahead._start(job)
    assert process.wait(timeout=120) == 0
    (general,) = compile_ahead.sources(
        Problem(Pattern(1, 16, 16, 3), "bfloat16", True), 64, DeviceSpec((7, 5), 40, 65536)
    )
    monkeypatch.setattr(nvrtc, "_compile", lambda *given: pytest.fail("it was not compiled ahead"))
    assert nvrtc.cubin(general, "compute_75").data


@pytest.mark.slow
def test_it_ends_with_its_parent() -> None:
    parent = (
        "import json, sys, time\n"
        "from ksopt.bench import compile_ahead\n"
        f"job = json.loads({json.dumps(json.dumps(_long_job()))})\n"
        "print(compile_ahead._start(job).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.kill()
    process.wait()
    end = time.monotonic() + 60
    while _is_running(child) and time.monotonic() < end:
        time.sleep(0.05)
    assert not _is_running(child)


def _long_job() -> dict[str, object]:
    return {
        "problems": [[[1, 48, 48, d], 64] for d in range(1, 500)],
        "dtype": "bfloat16",
        "batch_last": True,
        "spec": {"capability": [7, 5], "multiprocessors": 40, "shared_bytes": 65536},
        "target": "compute_75",
    }


def _is_running(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat", encoding="ascii") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
