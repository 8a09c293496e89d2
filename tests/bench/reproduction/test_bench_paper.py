"""`ksopt bench paper` as a user runs it: refusals, stored rows and resumed runs."""

import csv
import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from ksopt import baselines
from ksopt.bench import benchmark, implementations, paper_patterns
from ksopt.bench.benchmark import Bench
from ksopt.bench.reproduction import models, module_cases
from ksopt.bench.reproduction import run as runs
from ksopt.bench.reproduction.options import PaperOptions
from ksopt.bench.reproduction.products import FIRST, LAST
from ksopt.bench.reproduction.request import PaperRequest
from ksopt.bench.reproduction.saved_request import SavedRequest
from ksopt.bench.reproduction.tables_and_figures import ITEMS, items
from ksopt.bench.reproduction.tasks import in_turns, tasks_of
from ksopt.cli import main
from ksopt.measure.roofline import Roofline
from ksopt.patterns.chain import Pattern

CPU = ("--device", "cpu", "--quiet")


@pytest.fixture(autouse=True)
def quick(brief: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A synthetic roofline and the fewest repeats: the tests are not about the numbers."""
    invented = Roofline("cpu", "float32", 1e10, 1e11, 0, 0, "made up")
    monkeypatch.setattr(benchmark, "measure_roofline", lambda device, dtype: invented)
    monkeypatch.setattr(benchmark, "_SECONDS", 0.001)
    monkeypatch.setattr(benchmark, "_FEWEST", 3)
    monkeypatch.setattr(models, "_SECONDS", 0.001)


# What it refuses.


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--table", "9"), "that can be rerun are 3, 4, 5, 6, 7, 8 (1 and 2 hold no measurement)"),
        (("--figure", "5"), "are 4, 6, 7, 9, 10, 11, 12, 13, 14, 15, 16, 17"),
        ((), "nothing is asked for: give --table"),
        (("--table", "3", "--dtypes", "float8"), "'float8' is unknown"),
        (("--table", "3", "--dtypes", "tf32"), "tf32 is for NVIDIA GPUs"),
        (("--table", "3", "--minutes", "0"), "it must be above 0"),
        (("--table", "3", "--sample", "0"), "sample must be at least 1"),
    ],
)
def test_what_does_not_exist_is_refused(
    words: tuple[str, ...], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["bench", "paper", *words, *CPU, "--out", str(tmp_path / "out")]) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_of_something_else_has_no_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["bench", "paper", "--report", "--out", str(tmp_path)]) == 2
    assert "asked.json" in capsys.readouterr().err


def test_every_item_has_a_number_once() -> None:
    assert len({(one.kind, one.number) for one in ITEMS}) == len(ITEMS)
    assert items((), (), True) == ITEMS


def test_all_of_it_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ksopt.measure.device.resolve", lambda name: torch.device("cuda:0"))
    request = PaperRequest.of(PaperOptions(all=True))
    dtypes = ("float32", "float16", "tf32", "bfloat16")
    assert {part.name for part in request.parts} == {
        *(f"products-{dtype}" for dtype in dtypes),
        *(f"modules-{dtype}" for dtype in ("float32", "tf32", "float16", "bfloat16")),
        *("sizes-float16", "sizes-float32", "energy-float32"),
    }
    counts = {part.kind: len(part.patterns) for part in request.parts if part.patterns}
    assert counts == {"products": 627, "energy": request.population("energy")}
    assert (request.batch, request.is_small, request.remarks) == (25_088, False, ())
    quick = PaperRequest.of(PaperOptions(all=True, quick=True))
    assert {len(part.patterns) for part in quick.parts} == {48, 24, 0}
    (products, *_) = [part for part in quick.parts if part.dtype == "float16"]
    assert quick.bench_options(products).layout == "both"


def test_pieces_take_turns_and_the_papers_own_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ksopt.measure.device.resolve", lambda name: torch.device("cuda:0"))
    request = PaperRequest.of(PaperOptions(all=True, quick=True))
    order = in_turns(request, [task for part in request.parts for task in tasks_of(part)])
    assert len(order) == len(set(order)) == 4 * 48 + 24 + 4 * 11 + 2 * 4
    extra = [request.is_extra(task.part) for task in order]
    assert extra == sorted(extra)
    first = order[: extra.index(True)]
    assert {task.part.name for task in first} == {
        *("products-float32", "products-float16", "energy-float32"),
        *("modules-float32", "sizes-float16", "sizes-float32"),
    }
    modules = 11 + 2 * 4
    assert not any(task.is_product for task in first[:modules])
    # A run that is cut short has about the same share of every sample, each from its beginning.
    cut = first[: modules + 60]
    counts = Counter(task.part.name for task in cut)
    assert counts["products-float32"] == counts["products-float16"] == 24
    assert counts["energy-float32"] == 12
    own = [task.name for task in cut if task.part.name == "products-float32"]
    part = next(part for part in request.parts if part.name == "products-float32")
    assert own == [str(pattern) for pattern in part.patterns[:24]]


# A tiny run, as a user makes it.


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patterns that a CPU multiplies by in no time, and two modules."""
    few = (Pattern(1, 8, 8, 2), Pattern(2, 4, 16, 3), Pattern(1, 16, 4, 1))

    monkeypatch.setattr(paper_patterns, "patterns", lambda: few)
    monkeypatch.setattr(module_cases, "names", lambda kind: ("Linear N x N + bias", "Block"))


def run(out: Path, *words: str) -> int:
    return main.main(["bench", "paper", *words, *CPU, "--batch", "8", "--out", str(out)])


def numbers(out: Path) -> list[dict[str, str]]:
    with (out / "paper.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.usefixtures("tiny")
def test_a_run_leaves_tables_figures_and_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--table", "5", "--figure", "6", "9", "7") == 0
    output = capsys.readouterr()
    assert "Table 5: How often kernel wins, by layout" in output.out
    assert "which a CPU has not: Figure 7 is left out" in output.err
    first_numbers = numbers(tmp_path)
    assert {row["item"] for row in first_numbers} == {"Table 5", "Figure 6", "Figure 7", "Figure 9"}
    assert all(bool(row["ours"]) or bool(row["absent"]) for row in first_numbers)
    assert all(row["absent"] for row in first_numbers if row["item"] == "Figure 7")
    assert any(row["ours"] for row in first_numbers if row["item"] == "Table 5")
    text = (tmp_path / "paper.md").read_text("utf-8")
    assert "## Figure 9, float32" in text
    assert "The heuristic" in text
    assert (tmp_path / "figures" / "figure-9-float32.svg").stat().st_size > 500
    with (tmp_path / "products-float32.csv").open(encoding="utf-8", newline="") as file:
        ways = {(row["way"], row["layout"]) for row in csv.DictReader(file) if row["median_us"]}
    assert {("ksopt", FIRST), ("ksopt", LAST), ("bmm_paper_product", LAST)} <= ways

    # The report again, on a machine that knows nothing of the request.
    (tmp_path / "paper.csv").unlink()
    assert main.main(["bench", "paper", "--report", "--json", "--out", str(tmp_path)]) == 0
    assert numbers(tmp_path) == first_numbers
    assert len(json.loads(capsys.readouterr().out)["cells"]) == len(first_numbers)


@pytest.mark.usefixtures("tiny")
def test_a_run_that_is_stopped_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[str] = []
    real = Bench.measure

    def spied(self: Bench, subject: Any) -> Any:
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(str(subject.chain))
        return real(self, subject)

    monkeypatch.setattr(Bench, "measure", spied)
    assert run(tmp_path, "--table", "3", "7") == 130
    assert "not complete: products-float32" in capsys.readouterr().err
    assert any(row["ours"] for row in numbers(tmp_path))

    measured.clear()
    monkeypatch.setattr(Bench, "measure", lambda self, s: measured.append(str(s)) or real(self, s))
    assert run(tmp_path, "--table", "3", "7") == 0
    assert len(measured) == 1
    rows = (tmp_path / "modules-float32" / "rows.jsonl").read_text("utf-8").splitlines()
    assert len(rows) == 2


@pytest.mark.usefixtures("tiny")
def test_time_that_is_up_begins_nothing_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--table", "3", "7", "--minutes", "1e-9") == 0
    output = capsys.readouterr().err
    assert "not complete: products-float32, modules-float32; the same command goes on" in output


@pytest.mark.usefixtures("tiny")
def test_a_piece_that_fails_is_left_out_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Bench.measure

    def failing(self: Bench, subject: Any) -> Any:
        if "(1,8,8,2)" in str(subject):
            raise RuntimeError("no luck\nat all")
        return real(self, subject)

    monkeypatch.setattr(Bench, "measure", failing)
    assert run(tmp_path, "--table", "3") == 1
    output = capsys.readouterr().err
    assert "products-float32: (1,8,8,2): RuntimeError: no luck\n" in output
    assert "not complete: products-float32" in output
    assert len((tmp_path / "products-float32" / "rows.jsonl").read_text("utf-8").splitlines()) == 2


def einsum_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    right = baselines.BASELINES["einsum"]
    wrong = dataclasses.replace(right, core=lambda *args: right.core(*args) + 1)
    monkeypatch.setattr(implementations, "BASELINES", {**baselines.BASELINES, "einsum": wrong})


@pytest.mark.usefixtures("tiny")
def test_a_wrong_way_of_pytorch_is_reported_and_does_not_fail_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    einsum_off_by_one(monkeypatch)
    assert run(tmp_path, "--table", "3") == 0
    assert "einsum: patterns without a time: 3 + 3 (float32); (" in capsys.readouterr().err
    page = (tmp_path / "paper.md").read_text("utf-8")
    assert "Ways without a time" in page
    assert "Faults of ksopt" not in page


@pytest.mark.usefixtures("tiny")
def test_a_wrong_result_of_ksopt_fails_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = implementations.ks_linear
    monkeypatch.setattr(
        implementations, "ks_linear", lambda *args, **named: right(*args, **named) + 1
    )
    assert run(tmp_path, "--table", "3") == 1
    assert "ksopt batch_first: wrong: " in capsys.readouterr().err
    assert "Faults of ksopt" in (tmp_path / "paper.md").read_text("utf-8")


def test_small_models_and_the_papers_do_not_share_a_folder(tmp_path: Path) -> None:
    saved = SavedRequest(items((3,), (), False), True, ("small",), {"products": 3, "energy": 1})
    assert saved.merge_into(tmp_path) == saved
    more = dataclasses.replace(saved, items=items((), (6,), False), remarks=("other",))
    assert [one.name for one in more.merge_into(tmp_path).items] == ["Table 3", "Figure 6"]
    assert SavedRequest.read(tmp_path).remarks == ("small", "other")
    with pytest.raises(Exception, match="holds small models, and the paper's models are asked"):
        dataclasses.replace(saved, is_small=False).merge_into(tmp_path)


def test_all_gpus_share_the_work_unless_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    named = {device: runs.gpus_of(device) for device in ("auto", "cuda", "cuda:0", "cuda:2", "cpu")}
    assert named == {"auto": 3, "cuda": 3, "cuda:0": 1, "cuda:2": 1, "cpu": 1}


def test_no_worker_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("--table", "3", "--workers", "0", *CPU, "--out", str(tmp_path))
    assert main.main(["bench", "paper", *words]) == 2
    assert "workers must be at least 1, got 0" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_workers_share_all_parts(tmp_path: Path) -> None:
    words = ("--table", "3", "8", "7", "--batch", "2", "--sample", "3", "--workers", "2")
    assert main.main(["bench", "paper", *words, *CPU, "--out", str(tmp_path)]) == 0
    for part, count in (("products-float32", 3), ("products-float16", 3), ("modules-float32", 2)):
        lines = (tmp_path / part / "rows.jsonl").read_text("utf-8").splitlines()
        assert len(lines) == count
    setting = json.loads((tmp_path / "products-float32" / "setting.json").read_text("utf-8"))
    assert len(setting["runs"][0]["rooflines"]) >= 1
    # All is measured: nothing is begun again.
    assert main.main(["bench", "paper", *words, *CPU, "--out", str(tmp_path)]) == 0
