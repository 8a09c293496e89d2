"""`python docs/experiments/tiles.py`, with a family that is played on the CPU."""

import csv
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import tiles
from ksopt.errors import KsoptError
from ksopt.kernels.families.base import family_of
from ksopt.kernels.problem import DeviceSpec
from ksopt.measure.roofline import Roofline, measure_roofline
from ksopt.patterns.chain import Pattern
from ksopt.reference import ks_reference

PATTERN = Pattern(2, 8, 8, 4)
H200 = DeviceSpec((9, 0), multiprocessors=132, shared_bytes=228 * 1024)


@dataclass(frozen=True)
class Config:
    rank: int


@pytest.fixture
def roofline(monkeypatch: pytest.MonkeyPatch) -> Roofline:
    monkeypatch.setattr(tiles, "compile_ahead", lambda sources: None)
    return measure_roofline(torch.device("cpu"), "float32")


class Played:
    """A family whose launcher calls PyTorch."""

    def __init__(self, name: str, wrong: int | None = None) -> None:
        self.dtypes, self.layout = family_of(name).dtypes, family_of(name).layout
        self.wrong = wrong

    def configs(self, problem, device):
        return [Config(rank) for rank in (3, 1, 2, 0)]

    def predicted_us(self, problem, config, batch, device):
        return 10.0 + config.rank

    def sources(self, problem, config):
        return []

    def launcher(self, problem, config, device_index):
        layout = "batch_last" if problem.batch_last else "batch_first"

        def launch(x, weight):
            return ks_reference(x, weight, layout) * (2 if config.rank == self.wrong else 1)

        return launch


@pytest.mark.parametrize("name", ["mma_tf32x3", "batch_last_mma_tf32x3"])
def test_tiles_are_timed_and_written(name: str, roofline: Roofline, tmp_path: Path) -> None:
    family = Played(name)
    problem = tiles.problem_of(family, PATTERN)
    assert problem.batch_last == (name == "batch_last_mma_tf32x3")
    rows = tiles.time_tiles(family, problem, 1, 40, roofline, H200)
    assert {row.config.rank for row in rows} >= {0, 1, 2}  # the best predicted are among them
    assert all(row.latency_us > 0 and row.bmm_us > 0 and row.floor_us > 0 for row in rows)
    table = tiles.summary(name, {PATTERN: rows}).plain()
    assert str(PATTERN) in table
    tiles.write(tmp_path / "tiles.csv", {PATTERN: rows})
    with (tmp_path / "tiles.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [int(row["rank"]) for row in written] == [row.config.rank for row in rows]
    assert float(written[0]["predicted_us"]) == rows[0].predicted_us
    assert {row["batch"] for row in written} == {"40"}


def test_a_wrong_tile_gets_no_time(roofline: Roofline) -> None:
    family = Played("mma_tf32x3", wrong=1)
    with pytest.raises(KsoptError, match=r"Config\(rank=1\): relative error"):
        tiles.time_tiles(family, tiles.problem_of(family, PATTERN), 4, 40, roofline, H200)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device to measure on")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert tiles.main(["mma16"]) == 2
    assert "device 'cuda' is not available" in capsys.readouterr().err


@pytest.mark.parametrize("name", tiles.names())
def test_every_family_has_the_methods_that_are_used(name: str) -> None:
    family = family_of(name)
    several = [tiles.problem_of(family, Pattern.parse(text)) for text in tiles.PATTERNS]
    problem = next(one for one in several if family.unsupported_reason(one, H200) is None)
    config = next(iter(family.configs(problem, H200)))
    assert problem.dtype in ("float16", "float32")
    assert "__global__" in family.source(problem, config)


def test_random_problems_are_factors_of_what_the_benchmark_draws() -> None:
    several = tiles.random_problems(30, seed=5, fewest=600)
    assert several == tiles.random_problems(30, seed=5, fewest=600)
    assert several
    assert min(rows for _, rows in several) >= 600
    assert {type(pattern) for pattern, _ in several} == {Pattern}
