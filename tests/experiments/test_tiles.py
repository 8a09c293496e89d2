"""`python docs/experiments/tiles.py`, with a family that is played on the CPU."""

import csv
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tiles
from ksopt.errors import KsoptError
from ksopt.measure.roofline import Roofline, measure_roofline
from ksopt.patterns.chain import Pattern
from ksopt.reference import ks_reference

PATTERN = Pattern(2, 8, 8, 4)


@dataclass(frozen=True)
class Config:
    rank: int


@pytest.fixture
def roofline(monkeypatch: pytest.MonkeyPatch) -> Roofline:
    monkeypatch.setattr(tiles, "_compile_ahead", lambda sources: None)
    monkeypatch.setattr(tiles, "_multiprocessors", lambda device: 132)
    return measure_roofline(torch.device("cpu"), "float32")


def family(wrong: int | None = None) -> SimpleNamespace:
    def launcher(problem, config, device):
        layout = "batch_last" if problem.batch_last else "batch_first"

        def launch(x, weight):
            return ks_reference(x, weight, layout) * (2 if config.rank == wrong else 1)

        return launch

    return SimpleNamespace(
        configs=lambda problem, multiprocessors: [Config(rank) for rank in (3, 1, 2, 0)],
        predicted_us=lambda pattern, config, batch, multiprocessors: 10.0 + config.rank,
        source=lambda problem, config: "",
        launcher=launcher,
    )


@pytest.mark.parametrize("name", ["mma_tf32x3", "batch_last_mma_tf32x3"])
def test_tiles_are_timed_and_written(name: str, roofline: Roofline, tmp_path: Path) -> None:
    problem = tiles.problem_of(name, PATTERN)
    assert problem.batch_last == (name == "batch_last_mma_tf32x3")
    rows = tiles.time_tiles(family(), problem, 1, 40, roofline)
    assert {row.config.rank for row in rows} >= {0, 1, 2}  # the best predicted are among them
    assert all(row.latency_us > 0 and row.bmm_us > 0 and row.floor_us > 0 for row in rows)
    table = tiles.summary(name, {PATTERN: rows}).plain()
    assert str(PATTERN) in table
    tiles.write(tmp_path / "tiles.csv", {PATTERN: rows})
    with (tmp_path / "tiles.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [int(row["rank"]) for row in written] == [row.config.rank for row in rows]
    assert float(written[0]["predicted_us"]) == rows[0].predicted_us


def test_a_family_without_a_model_is_drawn_at_random(roofline: Roofline, tmp_path: Path) -> None:
    plain = family()
    del plain.predicted_us
    rows = tiles.time_tiles(plain, tiles.problem_of("mma_tf32x3", PATTERN), 2, 40, roofline)
    assert len(rows) == 2
    assert "%" not in tiles.summary("mma_tf32x3", {PATTERN: rows}).plain()
    tiles.write(tmp_path / "tiles.csv", {PATTERN: rows})


def test_a_wrong_tile_gets_no_time(roofline: Roofline) -> None:
    with pytest.raises(KsoptError, match=r"Config\(rank=1\): error"):
        tiles.time_tiles(family(wrong=1), tiles.problem_of("mma_tf32x3", PATTERN), 4, 40, roofline)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device to measure on")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert tiles.main(["mma16"]) == 2
    assert "device 'cuda' is not available" in capsys.readouterr().err


@pytest.mark.parametrize("name", tiles.FAMILIES)
def test_every_family_has_what_is_asked_of_it(name: str) -> None:
    import importlib

    module = importlib.import_module(f"ksopt.kernels.families.{name}")
    problem = tiles.problem_of(name, Pattern.parse(tiles.PATTERNS[0]))
    assert module.supports(problem) is None
    config = next(iter(module.configs(problem, 132)))
    assert problem.dtype in ("float16", "float32")
    assert "__global__" in module.source(problem, config)
