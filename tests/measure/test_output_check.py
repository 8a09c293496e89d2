"""What is looked at before a way is timed, and what is compiled ahead of it."""

import json
import subprocess
import sys
import time

import pytest
import torch

from ksopt.bench import compile_ahead
from ksopt.jit import nvrtc
from ksopt.kernels.problem import DeviceSpec, Problem
from ksopt.measure.output_check import Gate, checked_rows
from ksopt.patterns.chain import Pattern
from ksopt.reference import ks_reference

H200 = DeviceSpec((9, 0), 132, 227 * 1024 + 1024)


@pytest.mark.parametrize("batch", [1, 7, 64, 129, 1000, 25_088])
def test_checked_rows_are_in_the_batch_and_on_every_place_of_a_tile(batch: int) -> None:
    rows = checked_rows(batch)
    assert rows == sorted(set(rows))
    assert rows[0] == 0
    assert rows[-1] == batch - 1
    assert len(rows) <= 300
    assert len({row % 128 for row in rows}) == min(batch, 128)


@pytest.mark.parametrize("layout", ["batch_first", "batch_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounding_passes_and_less_does_not(layout: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(2, 8, 16, 3, dtype=dtype)
    x = torch.randn(200, 96).to(dtype)
    x = x.T.contiguous() if layout == "batch_last" else x
    gate = Gate(x, [weight], layout)

    def right(x: torch.Tensor) -> torch.Tensor:
        return ks_reference(x.double(), weight.double(), layout).to(dtype)

    def rounded_too_early(x: torch.Tensor) -> torch.Tensor:
        coarse = (x * 256).round() / 256 if dtype == torch.float32 else (x * 8).round() / 8
        return right(coarse)

    def one_row_is_wrong(x: torch.Tensor) -> torch.Tensor:
        y = right(x)
        (y[:, 65] if layout == "batch_last" else y[65]).mul_(2)
        return y

    assert gate.fault(right) == ""
    assert "error" in gate.fault(rounded_too_early)
    assert ("error" in gate.fault(one_row_is_wrong)) == (65 in checked_rows(200))
    assert "the result is" in gate.fault(lambda x: right(x).double())


def test_what_is_not_written_is_found_even_between_the_checked_rows() -> None:
    weight, x = torch.randn(1, 4, 4, 2), torch.randn(5000, 8)
    (unchecked, *_) = sorted(set(range(5000)) - set(checked_rows(5000)))

    def skips_a_row(x: torch.Tensor) -> torch.Tensor:
        y = ks_reference(x, weight)
        y[unchecked] = float("nan")
        return y

    assert "NaN" in Gate(x, [weight], "batch_first").fault(skips_a_row)


def test_memory_that_a_way_is_given_holds_nan() -> None:
    weight, x = torch.randn(1, 64, 64, 1), torch.randn(64, 64)
    gate = Gate(x, [weight], "batch_first")
    seen = []

    def spy(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.new_empty(64, 64).isnan().any().item())
        return ks_reference(x, weight)

    # Which block the allocator hands out is its own business, so one of a few.
    for _ in range(5):
        gate.fault(spy)
    assert any(seen)


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
