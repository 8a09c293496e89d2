"""`ksopt bench kernels` as a user runs it: measurements, stored rows, refusals, reports."""

import csv
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from ksopt import baselines
from ksopt.bench import benchmark, implementations, result_tables, results_folder, worker
from ksopt.bench.benchmark import Bench
from ksopt.bench.options import BenchOptions
from ksopt.bench.request import EAGER, BenchRequest, Subject
from ksopt.bench.results import OURS, Line, Row
from ksopt.cli import main
from ksopt.errors import InvalidInputError, KsoptError
from ksopt.measure.accuracy import Around
from ksopt.measure.roofline import Roofline
from ksopt.measure.timing import Measurement
from ksopt.patterns.chain import Chain
from ksopt.patterns.surroundings import Surroundings
from ksopt.reference import chain_to_dense
from ksopt.system.worker_process import WorkerProcess
from tests.kernels import toy_chains

TINY = ["(2,8,4,3)", "(1,4,4,1)", "(3,2,4,2)", "(1,4,8,8)"]
WORDS = [
    "--device",
    "cpu",
    "--dtype",
    "float32",
    "--batch",
    "16",
    "--against",
    "bmm,bmm_loop,dense",
]


@pytest.fixture(autouse=True)
def quick(brief: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A synthetic roofline and the fewest repeats: the tests are not about the numbers."""
    invented = Roofline("cpu", "float32", 1e10, 1e11, 0, 0, "made up")
    monkeypatch.setattr(benchmark, "measure_roofline", lambda device, dtype: invented)
    monkeypatch.setattr(benchmark, "_SECONDS", 0.001)
    monkeypatch.setattr(benchmark, "_FEWEST", 3)


def run(out: Path, *words: str, patterns: list[str] | None = None) -> int:
    chosen = TINY if patterns is None else patterns
    arguments = ["--patterns", *chosen] if chosen else []
    return main.main(["bench", "kernels", *arguments, *WORDS, "--out", str(out), *words])


def rows_of(out: Path, name: str = "bench.csv") -> list[dict[str, str]]:
    with (out / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def request(**changed: object) -> BenchRequest:
    defaults: dict[str, object] = {
        "patterns": TINY,
        "device": "cpu",
        "dtype": "float32",
        "batch": "16",
        "against": "bmm,dense",
    }
    return BenchRequest.of(BenchOptions(**{**defaults, **changed}))  # type: ignore[arg-type]


def test_every_way_is_timed_or_says_why_not(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert run(tmp_path) == 0
    rows = rows_of(tmp_path)
    assert {row["chain"] for row in rows} == set(TINY)
    for row in rows:
        assert bool(row["median_us"]) or bool(row["reason"])
        if row["median_us"]:
            assert 0 < float(row["p20_us"]) <= float(row["median_us"]) <= float(row["p80_us"])
            efficiency = float(row["floor_us"]) / float(row["median_us"])
            assert float(row["efficiency"]) == pytest.approx(efficiency)
    assert {(row["way"], row["layout"]) for row in rows} == {
        (OURS, "batch_first"),
        *((way, layout) for way in ("bmm", "bmm_loop", "dense") for layout in baselines_layouts()),
    }
    lines = rows_of(tmp_path, "summary.csv")
    assert [line["chain"] for line in lines] == TINY
    for line in lines:
        timed = [r for r in rows if r["chain"] == line["chain"] and r["median_us"]]
        theirs = [float(r["median_us"]) for r in timed if r["way"] != OURS]
        (ours,) = (float(r["median_us"]) for r in timed if r["way"] == OURS)
        assert float(line["best_us"]) == min(theirs)
        assert float(line["ratio"]) == pytest.approx(min(theirs) / ours)
        here = [
            float(r["median_us"]) for r in timed if r["way"] != OURS and r["layout"] != "batch_last"
        ]
        assert float(line["best_in_layout_us"]) == min(here)
    assert "times PyTorch's best" in capsys.readouterr().out


def baselines_layouts() -> tuple[str, str]:
    return ("batch_first", "batch_last")


def test_floor_bytes_and_flops_are_the_products(tmp_path: Path) -> None:
    run(tmp_path, patterns=["(2,8,4,3)"])
    row = rows_of(tmp_path)[0]
    pattern = Chain.parse("(2,8,4,3)")[0]
    assert int(row["bytes"]) == pattern.bytes(16, "float32")
    assert int(row["flops"]) == pattern.flops(16)
    assert float(row["floor_us"]) == pytest.approx(
        1e6 * max(int(row["bytes"]) / 1e10, int(row["flops"]) / 1e11)
    )


LAYERS = [
    (("gelu", "bias", "residual"), 1, "batch_first"),
    (("bias",), 3, "batch_last"),
    (("silu_gate", "bias"), 2, "batch_first"),
]


@pytest.mark.parametrize(("epilogue", "siblings", "layout"), LAYERS)
def test_a_layer_is_measured_whole(
    epilogue: tuple[str, ...], siblings: int, layout: str, tmp_path: Path
) -> None:
    chain, around = Chain.parse("(1,8,4,4)*(4,4,8,1)"), Surroundings.checked(epilogue, siblings, "")
    words = ["--chain", str(chain), "--layout", layout, "--against", "bmm,dense"]
    layer = ["--epilogue", *epilogue, "--siblings", str(siblings)]
    assert run(tmp_path, *words, *layer, patterns=["(2,8,4,3)"]) == 0
    rows = rows_of(tmp_path)
    assert len(rows) == 2 * (1 + 2 * 2)
    for row in rows:
        assert row["median_us"], row["reason"]  # right against float64 of the whole layer
        assert row["epilogue"] == " ".join(around.epilogue)
        assert row["siblings"] == str(siblings)
        if row["chain"] == str(chain):
            added = 4 * ("bias" in epilogue) * siblings * chain.out_features
            added += 4 * ("residual" in epilogue) * 16 * chain.out_features
            assert int(row["bytes"]) == siblings * chain.bytes(16, "float32") + added
            assert int(row["flops"]) == siblings * chain.flops(16)
    before = (tmp_path / "rows.jsonl").read_bytes()
    assert run(tmp_path, *words, *layer, patterns=["(2,8,4,3)"]) == 0  # nothing is left to measure
    assert (tmp_path / "rows.jsonl").read_bytes() == before
    assert run(tmp_path, *words, patterns=["(2,8,4,3)"]) == 2  # other products
    page = (tmp_path / "bench.md").read_text("utf-8")
    assert str(around) in page
    assert "float64 of the whole layer" in page


def test_the_time_of_a_layer_is_predicted_with_what_follows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KSOPT_TUNE", "model")
    words = ["--chain", "(1,8,4,4)*(4,4,8,1)", "--epilogue", "gelu", "bias", "--against", "bmm"]
    with toy_chains.registered() as family:
        monkeypatch.setattr(family, "us", 1e-3)
        assert run(tmp_path, *words, patterns=["(2,8,4,3)"]) == 0
    ours = {row["chain"]: row["predicted_us"] for row in rows_of(tmp_path) if row["way"] == OURS}
    assert float(ours["(1,8,4,4)*(4,4,8,1)"]) == 1e-3
    assert float(ours["(2,8,4,3)"]) > 1e-3  # a product, and PyTorch's operations behind it
    assert not any(row["predicted_us"] for row in rows_of(tmp_path) if row["way"] != OURS)


@pytest.mark.parametrize("layout", ["batch_first", "batch_last"])
@pytest.mark.parametrize("name", [OURS, "bmm", "dense", "inductor_bmm", "inductor_einsum"])
def test_a_way_with_what_follows_it_is_the_layer(
    name: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    chain = Chain.parse("(1,8,4,4)*(4,4,8,1)")
    weights = [torch.randn(p.weight_shape) / p.c**0.5 for p in [*chain] * 2]
    last = layout == "batch_last"
    x, residual = torch.randn(6, chain.in_features), torch.randn(6, chain.out_features)
    bias = torch.randn(2 * chain.out_features)
    dense = torch.cat([chain_to_dense(weights[:2]), chain_to_dense(weights[2:])])
    first, second = (x @ dense.T + bias).chunk(2, -1)
    expected = torch.nn.functional.silu(first) * second + residual
    if last:
        x, residual, expected = (one.T.contiguous() for one in (x, residual, expected))
    around = Around(bias, "silu_gate", residual, 2)
    with torch.no_grad():
        result = implementations.bind(name, weights, layout, around)(x)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def break_einsum(monkeypatch: pytest.MonkeyPatch, by: object) -> None:
    einsum = baselines.BASELINES["einsum"]
    wrong = dataclasses.replace(einsum, core=lambda *args: by(einsum.core(*args)))  # type: ignore[operator]
    monkeypatch.setattr(implementations, "BASELINES", {**baselines.BASELINES, "einsum": wrong})


def last_row_lost(y: torch.Tensor) -> torch.Tensor:
    y[-1] = float("nan")
    return y


@pytest.mark.parametrize("by", [lambda y: y * 1.001, last_row_lost, lambda y: y[:, :-1]])
def test_a_wrong_way_of_pytorch_gets_no_time_and_is_reported(
    by: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    break_einsum(monkeypatch, by)
    assert run(tmp_path, "--against", "bmm,einsum", patterns=["(2,8,4,3)"]) == 0
    wrong = [row for row in rows_of(tmp_path) if row["way"] == "einsum"]
    assert [row["median_us"] for row in wrong] == ["", ""]
    assert all(row["reason"].startswith("wrong: ") for row in wrong)
    assert "einsum batch_first: wrong: " in capsys.readouterr().err
    assert "Faults" in (tmp_path / "bench.md").read_text("utf-8")


def test_times_that_hold_a_part_of_the_hosts_are_listed(tmp_path: Path) -> None:
    assert run(tmp_path, patterns=TINY[:1]) == 0
    assert "part of the host" not in (tmp_path / "bench.md").read_text("utf-8")
    log = tmp_path / results_folder.ROWS
    stored = log.read_text("utf-8")
    log.write_text(stored.replace('"is_host_late": false', '"is_host_late": true', 1), "utf-8")
    assert main.main(["bench", "kernels", "--report", str(tmp_path), "--out", str(tmp_path)]) == 0
    assert "Times that hold a part of the host's" in (tmp_path / "bench.md").read_text("utf-8")


def test_a_wrong_operator_gets_no_time_and_fails_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    right = implementations.ks_linear
    monkeypatch.setattr(
        implementations, "ks_linear", lambda *args, **named: right(*args, **named) + 1
    )
    assert run(tmp_path, patterns=["(2,8,4,3)"]) == 1
    (row,) = (row for row in rows_of(tmp_path) if row["way"] == OURS)
    assert row["median_us"] == ""
    (line,) = rows_of(tmp_path, "summary.csv")
    assert line["ratio"] == line["slower"] == ""
    assert line["reason"].startswith("wrong: ")


def test_a_way_that_fails_leaves_its_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(y: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such kernel\nand a long trace")

    break_einsum(monkeypatch, fail)
    assert run(tmp_path, "--against", "bmm,einsum", patterns=["(2,8,4,3)"]) == 0
    assert {row["reason"] for row in rows_of(tmp_path) if row["way"] == "einsum"} == {
        "failed: no such kernel"
    }


def test_a_way_that_only_multiplies_zeros_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "_MOST_FLOORS", 1.0)
    rows = Bench(request(patterns=["(4,8,8,8)"], batch="4096")).measure(
        Subject(Chain.parse("(4,8,8,8)"), 4096)
    )
    dense = [row for row in rows if row.way == "dense"]
    assert all(row.latency is None and row.reason.startswith("not tried") for row in dense)
    assert not any(row.is_fault for row in rows)


def test_chains_are_compared_with_the_dense_layer(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    chain = "(1,8,4,4)*(4,4,8,1)"
    assert run(tmp_path, "--chain", chain, "--batch", "1,16", patterns=[]) == 0
    lines = rows_of(tmp_path, "summary.csv")
    assert [(line["chain"], line["batch"]) for line in lines] == [(chain, "1"), (chain, "16")]
    out = capsys.readouterr().out
    assert "ksopt / dense" in out
    assert "25.0 %" in out  # 256 weights for 32 x 32
    assert "Beside the dense layer" in (tmp_path / "bench.md").read_text("utf-8")


def test_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    measured: list[str] = []
    real = Bench.measure

    def spied(self: Bench, subject: Subject) -> list[Row]:
        measured.append(str(subject.chain))
        if len(measured) == 3:
            raise KeyboardInterrupt
        return real(self, subject)

    monkeypatch.setattr(Bench, "measure", spied)
    assert run(tmp_path) == 130
    assert len(rows_of(tmp_path, "summary.csv")) == 2
    assert "2 products are left" in capsys.readouterr().err
    before = (tmp_path / results_folder.ROWS).read_bytes()
    assert run(tmp_path) == 0
    assert measured == [*TINY[:3], *TINY[2:]]
    assert (tmp_path / results_folder.ROWS).read_bytes().startswith(before)
    assert run(tmp_path) == 0
    assert len(measured) == 5
    setting = json.loads((tmp_path / "setting.json").read_text("utf-8"))
    assert len(setting["runs"]) == 2
    assert setting["runs"][0]["rooflines"][0]["rate_from"] == "made up"


def test_time_that_is_up_is_no_failure(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert run(tmp_path, "--timeout", "0.000001") == 0
    assert "4 products are left" in capsys.readouterr().err
    assert "Nothing was measured yet" in (tmp_path / "bench.md").read_text("utf-8")
    assert run(tmp_path) == 0
    assert len(rows_of(tmp_path, "summary.csv")) == 4


def test_half_a_line_is_measured_again(tmp_path: Path) -> None:
    run(tmp_path)
    file = tmp_path / results_folder.ROWS
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:2]) + lines[2][:50])
    assert run(tmp_path) == 0
    assert [line["chain"] for line in rows_of(tmp_path, "summary.csv")] == TINY
    assert file.read_bytes().splitlines(keepends=True)[:2] == lines[:2]


def started(out: Path, *words: str) -> subprocess.Popen[bytes]:
    patterns = [f"(1,{b},16,4)" for b in range(1, 200)]
    command = [sys.executable, "-m", "ksopt", "bench", "kernels", "--patterns", *patterns, *WORDS]
    return subprocess.Popen(
        [*command, "--out", str(out), *words], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )


def wait_for_lines(out: Path, count: int) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        if (out / results_folder.ROWS).exists() and (
            (out / results_folder.ROWS).read_bytes().count(b"\n") >= count
        ):
            return
        time.sleep(0.02)
    pytest.fail(f"no {count} lines after two minutes")


@pytest.mark.slow
def test_measurements_of_a_killed_process_are_stored(tmp_path: Path) -> None:
    process = started(tmp_path, "--workers", "2")
    wait_for_lines(tmp_path, 3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    stored = results_folder.read_rows(tmp_path)
    assert len(stored) >= 3
    again = started(tmp_path, "--timeout", "0.000001")
    assert again.wait(timeout=120) == 0
    assert (
        len(rows_of(tmp_path, "summary.csv"))
        == len(stored)
        == len(results_folder.read_rows(tmp_path))
    )


def test_a_way_that_is_far_behind_is_checked_and_timed_by_two_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = 0
    real = implementations.bind

    def bind(
        name: str, weights: Any, layout: str, around: Around
    ) -> implementations.Implementation:
        way = real(name, weights, layout, around)

        def slow(x: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            time.sleep(0.5 if calls % 2 else 0.02)  # a layout's first call compiles
            return way(x)

        return slow if name == "dense" else way

    monkeypatch.setattr(implementations, "bind", bind)
    monkeypatch.setattr(benchmark, "_LONG_US", 15_000.0)
    bench_request = request(patterns=["(1,8,8,2)"], against="bmm_paper,einsum,dense", layout="both")
    rows = benchmark.Bench(bench_request).measure(bench_request.subjects[0])
    dense = [row for row in rows if row.way == "dense"]
    assert calls == 2 * len(dense) == 4
    for row in dense:
        assert row.latency is not None
        assert 20_000 < row.latency.median_us < 500_000
        assert (row.latency.repeats, row.latency.given_up) == (1, True)
        assert row.reason.startswith("timed once only")


@pytest.mark.parametrize(
    ("pattern", "dtype", "rows", "is_tried"),
    [
        ("(4,64,64,4)", "float32", 25_088, True),
        ("(4,128,64,4)", "float32", 25_088, False),
        ("(4,128,128,4)", "float16", 25_088, True),
        ("(4,256,128,4)", "bfloat16", 25_088, False),
        ("(4,1024,1024,4)", "float32", 25_088, True),  # 1,024 does not divide the rows
        ("(4,192,192,4)", "float32", 25_088, True),
    ],
)
def test_block_sparse_kernels_that_take_minutes_to_compile_are_not_tried(
    pattern: str, dtype: str, rows: int, is_tried: bool
) -> None:
    bench_request = request(patterns=[pattern], dtype=dtype, batch=str(rows), against="bsr")
    bench = benchmark.Bench(bench_request)
    bench.device = torch.device("cuda")
    why = bench._why_not_compiled("bsr", bench_request.subjects[0])
    assert ("minutes to compile" in why) != is_tried
    assert not bench._why_not_compiled("einsum", bench_request.subjects[0])


@pytest.mark.slow
def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    process = started(tmp_path, "--workers", "2")
    wait_for_lines(tmp_path, 2)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 2
    process.kill()
    process.wait()
    end = time.monotonic() + 60
    while any(is_running(int(child)) for child in children) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(is_running(int(child)) for child in children)


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_ctrl_c_reports_what_is_there(tmp_path: Path) -> None:
    process = started(tmp_path)
    wait_for_lines(tmp_path, 1)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert len(rows_of(tmp_path, "summary.csv")) == len(results_folder.read_rows(tmp_path)) >= 1


@pytest.mark.slow
def test_workers_share_the_patterns_and_one_file(tmp_path: Path) -> None:
    assert run(tmp_path, "--workers", "2") == 0
    lines = (tmp_path / results_folder.ROWS).read_text("utf-8").splitlines()
    measured = [json.loads(line)[0]["subject"]["chain"] for line in lines]
    assert sorted(measured) == sorted(TINY)
    assert {line["chain"] for line in rows_of(tmp_path, "summary.csv")} == set(TINY)
    (one,) = json.loads((tmp_path / "setting.json").read_text("utf-8"))["runs"]
    assert [roof["device"] for roof in one["rooflines"]] == ["cpu", "cpu"]


@pytest.mark.slow
def test_a_worker_that_dies_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = WorkerProcess.send

    def send_and_kill(process: WorkerProcess, value: dict[str, object]) -> None:
        real(process, value)
        if "chain" in value:
            os.kill(process.pid, signal.SIGKILL)

    monkeypatch.setattr(WorkerProcess, "send", send_and_kill)
    with pytest.raises(KsoptError, match="the process that measured on it was ended by signal 9"):
        list(worker.measure_with(request(), request().subjects, ["cpu"], lambda: False))


CHANGES = {
    "dtype": ["--dtype", "bfloat16"],
    "layout": ["--layout", "batch_last"],
    "subjects": ["--batch", "17"],
    "against": ["--against", "bmm"],
    "seed": ["--seed", "1"],
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_setting_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run(tmp_path, patterns=["(1,4,4,1)"])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert run(tmp_path, *CHANGES[name], patterns=["(1,4,4,1)"]) == 2
    error = capsys.readouterr().err
    assert "holds measurements of something else" in error
    assert (name if name != "subjects" else "not the same ones") in error
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"name": "another CPU"}, "device name .* there and another CPU here"),
        ({"torch": "0.1"}, "torch .* there and 0.1 here"),
        ({"driver": "7"}, "driver None there and 7 here"),
    ],
)
def test_another_machine_is_refused(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    bench_request, here = request(), results_folder.DeviceRecord(**record())
    with results_folder.opened(tmp_path, bench_request, here):
        pass
    with (
        pytest.raises(InvalidInputError, match=named),
        results_folder.opened(tmp_path, bench_request, dataclasses.replace(here, **change)),
    ):
        pass


def test_another_way_of_choosing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    run(tmp_path, patterns=["(1,4,4,1)"])
    monkeypatch.setenv("KSOPT_TUNE", "off")
    assert run(tmp_path, patterns=["(1,4,4,1)"]) == 2
    assert "tuning" in capsys.readouterr().err


def test_a_lost_device_leaves_what_it_was_lost_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def fail(y: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("an illegal memory access was encountered")

    def lost(device: torch.device, after: str) -> None:
        raise benchmark.DeviceLostError(f"{after} broke it")

    break_einsum(monkeypatch, fail)
    monkeypatch.setattr(benchmark, "raise_if_lost", lost)
    assert run(tmp_path, "--against", "bmm,einsum") == 1
    assert "einsum on (2,8,4,3) batch 16 broke it" in capsys.readouterr().err
    reasons = {row["way"]: row["reason"] for row in rows_of(tmp_path)}
    assert reasons == {
        OURS: "not timed: einsum on (2,8,4,3) batch 16 broke it",
        "einsum": "failed: an illegal memory access was encountered",
    }
    # The next run continues after it.
    assert run(tmp_path, "--against", "bmm,einsum") == 1
    assert [line["chain"] for line in rows_of(tmp_path, "summary.csv")] == TINY[:2]


def test_other_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, patterns=["(1,4,4,1)"])
    monkeypatch.setattr(results_folder, "CODE", results_folder.CODE[1:])
    assert run(tmp_path, patterns=["(1,4,4,1)"]) == 2


def record() -> dict[str, Any]:
    from ksopt.measure import device

    return dataclasses.asdict(device.record("cpu"))


def test_two_benchmarks_do_not_share_a_folder(tmp_path: Path) -> None:
    here = results_folder.DeviceRecord(**record())
    with (
        results_folder.opened(tmp_path, request(), here),
        pytest.raises(InvalidInputError, match="another benchmark is at work"),
        results_folder.opened(tmp_path, request(), here),
    ):
        pass


MISUSE = {
    "nothing": [],
    "a pattern": ["--patterns", "(1,2,3)"],
    "a chain as a pattern": ["--patterns", "(1,2,2,1)*(1,2,2,1)"],
    "no file": ["--patterns", "nowhere.txt"],
    "a sample": ["--patterns", "sample:many"],
    "too large a sample": ["--patterns", "sample:628"],
    "none at random": ["--patterns", "random:0"],
    "too many at random": ["--patterns", "random:1000000"],
    "a way": ["--patterns", "paper", "--against", "bmm,magic"],
    "rows": ["--patterns", "paper", "--batch", "0"],
    "no rows": ["--patterns", "paper", "--batch", "1,"],
    "a dtype": ["--patterns", "paper", "--dtype", "int8"],
    "a layout": ["--patterns", "paper", "--layout", "sideways"],
    "an epilogue": ["--patterns", "paper", "--epilogue", "gelu", "relu"],
    "a gate": ["--patterns", "paper", "--epilogue", "silu_gate"],
    "siblings": ["--patterns", "paper", "--siblings", "5"],
    "a device": ["--patterns", "paper", "--device", "toaster"],
    "graphs": ["--patterns", "paper", "--device", "cpu", "--graph"],
    "workers": ["--patterns", "paper", "--device", "cpu", "--workers", "0"],
    "a time": ["--patterns", "paper", "--device", "cpu", "--timeout", "-1"],
    "no report": ["--report", "nowhere"],
    "both": ["--report", "nowhere", "--patterns", "paper"],
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_is_answered_with_a_sentence(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.main(["bench", "kernels", *MISUSE[name]]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("ksopt: ")
    assert captured.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_patterns_come_from_files_samples_and_words(tmp_path: Path) -> None:
    file = tmp_path / "patterns.txt"
    file.write_text("# two\n(1,2,3,4)\n\n(4,3,2,1)  # and a remark\n", encoding="utf-8")
    bench_request = request(patterns=[str(file), "(1,2,3,4)", "sample:2"])
    named = [str(subject.chain) for subject in bench_request.subjects]
    assert named == ["(1,2,3,4)", "(4,3,2,1)", "(4,128,128,64)", "(1,64,64,96)"]
    assert len(request(patterns=["paper"]).subjects) == 627
    assert request(against="eager").against == EAGER
    file.write_text("(1,2,3,4)\n(1,2)\n", encoding="utf-8")
    with pytest.raises(InvalidInputError, match="line 2"):
        request(patterns=[str(file)])


def test_a_worker_makes_the_same_request() -> None:
    bench_request = request(
        chains=["(1,8,4,4)*(4,4,8,1)"],
        batch="1,2",
        inductor_sample=3,
        seed=5,
        plugins=["mine"],
        epilogue=["gelu", "bias"],
        siblings=3,
    )
    sent = json.loads(json.dumps(dataclasses.asdict(bench_request.options)))
    assert BenchRequest.of(BenchOptions(**sent)) == bench_request


@pytest.mark.slow
def test_plugins_are_imported_by_worker_processes_too(
    brief: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import os\nwith open('processes', 'a') as file:\n    print(os.getpid(), file=file)\n"
    (tmp_path / "bench_plugin.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    words = ["--patterns", "(1,8,8,2)", "(2,8,8,1)", "--device", "cpu", "--batch", "8"]
    words += ["--quiet", "--workers", "2", "--plugins", "bench_plugin"]
    assert main.main(["bench", "kernels", *words]) == 0
    processes = (tmp_path / "processes").read_text("utf-8").split()
    assert len(set(processes)) == len(processes) == 3
    monkeypatch.delitem(sys.modules, "bench_plugin")
    assert main.main(["bench", "kernels", *words[:-1], "no_such_plugin"]) == 2


def test_random_subjects_have_rows_of_their_own() -> None:
    bench_request = request(patterns=["random:20"], seed=4, batch=None)
    assert len({subject.batch for subject in bench_request.subjects}) > 5
    assert any(not subject.is_pattern for subject in bench_request.subjects)
    assert "--batch" not in bench_request.command
    again = BenchRequest.of(bench_request.options)
    assert again == bench_request
    assert request(patterns=["random:20"], seed=5, batch=None).subjects != bench_request.subjects
    with_rows = request(patterns=["random:20"], seed=4, batch="1,2").subjects
    assert {subject.batch for subject in with_rows} == {1, 2}
    both = request(patterns=["random:1", "(1,2,3,4)"], seed=4, batch=None)
    assert both.subjects[0].batch != both.subjects[1].batch == 256


def test_inductor_compiles_a_sample_spread_over_all() -> None:
    bench_request = request(patterns=["paper"], inductor_sample=3)
    places = [
        n for n, subject in enumerate(bench_request.subjects) if subject in bench_request.compiled
    ]
    assert places == [0, 209, 418]


@pytest.mark.parametrize("layout", baselines_layouts())
@pytest.mark.parametrize("name", ["inductor_bmm", "inductor_einsum"])
def test_what_inductor_compiles_is_right(
    name: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Eagerly: the compiled function is the same, and compiling takes half a minute.
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    weight = torch.randn(2, 3, 4, 5)
    x = torch.randn((40, 6) if layout == "batch_last" else (6, 40))
    from ksopt.reference import ks_reference

    result = implementations.bind(name, [weight], layout)(x)
    torch.testing.assert_close(result, ks_reference(x, weight, layout))


class Page(HTMLParser):
    """Checks that tags close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_one_report_of_several_folders(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    first, last, both = tmp_path / "first", tmp_path / "last", tmp_path / "both"
    run(first)
    run(last, "--layout", "batch_last", patterns=TINY[:2])
    capsys.readouterr()
    words = ["bench", "kernels", "--report", str(first), str(last), "--out", str(both)]
    assert main.main(words) == 0
    printed = capsys.readouterr().out
    page = (both / "bench.html").read_text("utf-8")
    text = (both / "bench.md").read_text("utf-8")
    for label in ("float32, batch_first, batch 16", "float32, batch_last, batch 16"):
        assert label in printed
        assert label in page
        assert label in text
    for chain in TINY:
        assert chain in page
    for heading in ("Efficiency", "by rho", "By class", "Least efficient", "Device"):
        assert heading in page
    parsed = Page(page)
    assert parsed.open == []
    assert parsed.tags.count("svg") == 6
    assert "script" not in parsed.tags
    assert page.count('class="line s0"') == page.count('class="line s1"') == 2
    assert len(rows_of(both, "summary.csv")) == 6
    assert len(rows_of(both)) == len(rows_of(first)) + len(rows_of(last))


def test_json_holds_every_row(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert run(tmp_path, "--json", patterns=TINY[:2]) == 0
    captured = capsys.readouterr()
    value = json.loads(captured.out)
    assert captured.err == ""
    (one,) = value["series"]
    assert one["complete"] is True
    assert [line["chain"] for line in one["lines"]] == TINY[:2]
    assert len(one["rows"]) == len(rows_of(tmp_path))
    assert one["setting"]["identity"]["dtype"] == "float32"


def line(ours: float, *theirs: float) -> Line:
    def row(way: str, us: float, layout: str = "batch_first") -> Row:
        took = Measurement(us, 0.99 * us, 1.01 * us, 9)
        return Row(Subject(Chain.parse("(4,64,64,16)"), 8), way, layout, 0, 0, 5.0, took)

    layouts = ("batch_last", "batch_first")
    names = ("bmm_loop", "bmm_paper")
    others = [
        row(*subject_of_rows) for subject_of_rows in zip(names, theirs, layouts, strict=False)
    ]
    return Line.of([row(OURS, ours), *others])


def test_a_line_says_who_is_faster() -> None:
    behind = line(10.0, 8.0, 30.0)
    assert behind.is_slower is True
    assert behind.is_slower_here is False
    assert behind.ratio(behind.best) == pytest.approx(0.8)
    assert behind.ratio(behind.best_here) == behind.ratio(behind.best_paper) == pytest.approx(3.0)
    within = line(10.0, 9.95, 30.0)
    assert within.is_slower is False
    assert line(10.0).is_slower is None


def test_the_table_of_all_is_medians(tmp_path: Path) -> None:
    lines = tuple(line(us, 20.0, 40.0) for us in (10.0, 20.0, 50.0))
    identity = {"dtype": "float16", "layout": "batch_first", "graph": False, "subjects": [1, 2, 3]}
    (cells,) = result_tables.overall_table(
        [result_tables.Series(tmp_path, {"identity": identity}, lines)]
    ).rows
    assert cells[1:] == ("3", "0.25", "0.13", "1.00", "1", "2.00", "1", "2.00", "")


def test_rows_survive_the_log(tmp_path: Path) -> None:
    rows = list(line(10.0, 8.0, 30.0).rows)
    here = results_folder.DeviceRecord(**record())
    with results_folder.opened(tmp_path, request(), here) as results:
        results.add(rows)
    assert results_folder.read_rows(tmp_path) == {rows[0].subject: tuple(rows)}


def test_both_layouts_time_ksopt_in_both(tmp_path: Path) -> None:
    ways = "bmm_paper,bmm_paper_product"
    words = ("--layout", "both", "--against", ways, "--every-way")
    assert run(tmp_path, *words, patterns=["(2,8,4,3)"]) == 0
    rows = rows_of(tmp_path)
    timed = {(row["way"], row["layout"]) for row in rows if row["median_us"]}
    names = (OURS, "bmm_paper", "bmm_paper_product")
    assert timed == {(way, layout) for way in names for layout in baselines_layouts()}
    (line,) = rows_of(tmp_path, "summary.csv")
    assert line["best"] == "bmm_paper"  # a product alone is no rival


def test_tf32_is_refused_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert run(tmp_path, "--dtype", "tf32") == 2
    assert "tf32 is for NVIDIA GPUs" in capsys.readouterr().err


@pytest.mark.parametrize("layout", ["batch_first", "batch_last"])
@pytest.mark.parametrize("pattern", ["(2,8,4,3)", "(1,4,4,1)", "(3,2,4,1)"])
def test_the_product_alone_permutes_nothing_that_is_timed(pattern: str, layout: str) -> None:
    weight = torch.randn(Chain.parse(pattern)[0].weight_shape)
    features = weight.shape[0] * weight.shape[2] * weight.shape[3]
    x = torch.randn(features, 5) if layout == "batch_last" else torch.randn(5, features)
    call, whole = implementations.product_only(weight, x, layout)
    torch.testing.assert_close(whole(), baselines.BASELINES["bmm"].bind(weight, layout)(x))
    assert call().shape[0] == weight.shape[0] * weight.shape[3]
