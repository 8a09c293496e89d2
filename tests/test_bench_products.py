"""The benchmark of single factors: right ways are timed, a wrong one never is."""

import csv
import dataclasses
import json
from pathlib import Path

import pytest
import torch

from ksopt import baselines
from ksopt.bench import __main__ as command
from ksopt.bench import products
from ksopt.bench.roofline import Roofline
from ksopt.pattern import Pattern

CEILINGS = Roofline("cpu", "float32", 1e10, 1e11, 0, 0, "made up")
PATTERN = Pattern(2, 8, 4, 3)


@pytest.mark.parametrize("layout", ["batch_first", "batch_last"])
def test_every_way_is_timed_or_says_why_not(layout: str) -> None:
    rows = products.compare(PATTERN, 16, torch.float32, layout, CEILINGS)
    assert {row.way for row in rows} == {products.OURS, *baselines.BASELINES}
    for row in rows:
        assert (row.latency is None) == bool(row.reason)
    timed = {row.way for row in rows if row.latency is not None}
    assert {products.OURS, "bmm", "einsum", "dense"} <= timed
    floor_us = CEILINGS.floor_us(PATTERN.bytes(16, "float32"), PATTERN.flops(16))
    assert {row.floor_us for row in rows} == {floor_us}


def test_a_wrong_way_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    einsum = baselines.BASELINES["einsum"]
    wrong = dataclasses.replace(einsum, core=lambda *given: einsum.core(*given) * 1.001)
    patched = {**baselines.BASELINES, "einsum": wrong}
    monkeypatch.setattr(products, "BASELINES", patched)
    rows = products.compare(PATTERN, 16, torch.float32, "batch_first", CEILINGS)
    (row,) = (row for row in rows if row.way == "einsum")
    assert row.latency is None
    assert row.reason.startswith("wrong: error")
    assert row.efficiency is None


def test_the_command_prints_a_line_a_pattern_and_writes_every_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--patterns", "1", "--batch", "8", "--device", "cpu", "--out", str(tmp_path)]
    assert command.main(words) == 0
    assert "(4,128,128,64)" in capsys.readouterr().out
    with (tmp_path / "bench.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    ours = next(row for row in rows if row["way"] == products.OURS)
    assert float(ours["median_us"]) > 0
    assert json.loads((tmp_path / "setting.json").read_text("utf-8"))["batch"] == 8


def test_the_command_refuses_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--device", "toaster"]) == 2
    assert "toaster" in capsys.readouterr().err
