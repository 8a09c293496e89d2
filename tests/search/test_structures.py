"""A search of several structures: measured and excluded ones, and the report on both."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from safetensors.torch import save_file

from ksopt.cli.main import main
from ksopt.measure.timing import Measurement
from ksopt.operators.registry import operator_of, parse
from ksopt.patterns.size import Budget
from ksopt.search.layer_request import LayerRequest
from ksopt.search.recommend import elect
from ksopt.search.report import results_json
from ksopt.search.results import ChainFacts, TrialRecord
from ksopt.search.space.space import Step, build

EVERY = "ks,low-rank,block-diagonal,two-four,strassen-tile,fp8-dense"
HERE = ("ks", "low-rank", "block-diagonal", "strassen-tile")
SEARCH = ("search", "64x32", "--batch", "18", "--device", "cpu", "--out", "report")


def searched(*options: str) -> tuple[dict[str, Any], str]:
    assert main([*SEARCH, *options]) == 0
    value = json.loads(Path("report/results.json").read_text("utf-8"))
    jsonschema.validate(value, results_json.results_schema())
    (layer,) = value["layers"]
    return layer, Path("report/report.md").read_text("utf-8")


@pytest.fixture(autouse=True)
def _here(quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_all_that_run_here_are_ranked_together(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    save_file({"w": torch.randn(32, 64)}, "trained.safetensors")
    options = ("--structures", EVERY, "--budget", "50%", "--trials", "8")
    layer, page = searched(*options, "--weights", "trained.safetensors")
    best = layer["structures"]
    assert {one["structure"] for one in best} == set(HERE)
    assert [one["latency_over_dense"] for one in best] == sorted(
        one["latency_over_dense"] for one in best
    )
    finalists = {one["chain"]: one for one in layer["finalists"]}
    for one in best:
        of_final = finalists[one["chain"]]
        assert one["retimed"]
        assert one["latency"] == of_final["latency"]
        operator = operator_of(parse(one["chain"]))
        assert one["parameters"] == operator.nnz <= 1024
        assert one["flops"] == operator.flops(18)
        assert 0 < one["weight_error"] < 1
        assert one["weight_error"] == of_final["weight_error"]
    assert all(trial["state"] == "complete" for trial in layer["trials"])
    left = layer["space"]["left_out"]
    assert left == {
        "two-four": "it needs a CUDA device of compute capability 8.0, not cpu",
        "fp8-dense": "it needs a CUDA device of compute capability 8.9, not cpu",
    }
    assert page.count("## Other structures at the same budget") == 1
    section = page.partition("## Other structures at the same budget")[2].partition("\n## ")[0]
    for one in best:
        assert one["chain"] in section.replace("\\", "")
        assert f"{one['weight_error']:.4f}" in section
    assert "two-four was left out: it needs a CUDA device" in section
    assert section.count("a token would see those behind it") == 1  # Strassen-Tile's tiles of rows
    assert "results in strassen-tile." in section
    assert "--min-rank" not in page  # the default is of chains alone
    assert "two-four is left out of 64x32: it needs a CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ("--layout", "batch_last", "--siblings", "2", "--epilogue", "bias", "gelu", "residual"),
        pytest.param(("--train",), marks=pytest.mark.slow),
        pytest.param(("--dtype", "bfloat16"), marks=pytest.mark.slow),
    ],
)
def test_they_run_in_every_surrounding(options: tuple[str, ...]) -> None:
    names = "low-rank,block-diagonal,strassen-tile"
    layer, _ = searched("--structures", names, "--budget", "25%", "--trials", "6", *options)
    faults = [trial["reason"] for trial in layer["trials"] if trial["state"] != "complete"]
    assert faults == []
    assert {one["structure"] for one in layer["structures"]} == set(names.split(","))


@pytest.mark.slow
def test_chains_alone_have_no_such_section() -> None:
    layer, page = searched("--budget", "50%", "--trials", "2")
    assert "Other structures" not in page
    assert "--min-rank 32" in page
    assert [one["structure"] for one in layer["structures"]] == ["ks"]


def test_what_meets_no_budget_is_reported() -> None:
    options = ("--structures", "block-diagonal,strassen-tile", "--budget", "1%", "4%")
    layer, page = searched(*options)
    assert [one["budget"] for one in layer["structures"]] == ["4%"]
    assert layer["space"]["left_out"] == {
        "strassen-tile": "its smallest operator counts 160 weights, 7.812% of the dense ones"
    }
    assert "strassen-tile was left out: its smallest" in page


@pytest.mark.parametrize(
    ("words", "sentences"),
    [
        (("--structures", "low-rnak"), ["'low-rnak': there is no", "did you mean 'low-rank'?"]),
        (
            ("--structures", "fp8-dense,two-four", "--dtype", "bf16"),
            ["nothing to choose from", "fp8-dense: it needs a CUDA device", "two-four: it needs a"],
        ),
        (
            ("--structures", "low-rank", "--min-rank", "32"),
            ["low-rank: it has no operator of rank 32 or more"],
        ),
    ],
)
def test_what_cannot_be_is_refused(
    words: tuple[str, ...], sentences: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SEARCH, *words]) == 2
    refusal = capsys.readouterr().err
    for sentence in sentences:
        assert sentence in refusal
    assert not Path("report").exists()


def test_a_requested_rank_holds_for_all() -> None:
    request = LayerRequest("64x32", budgets=("50%",), structures="low-rank", min_rank=9)
    ranks = [chain.rank_bound for chain in build(request).candidates]
    assert ranks == [9, 10]


def test_the_fastest_of_each_structure_is_in_the_final() -> None:
    def trial(number: int, text: str, us: float) -> TrialRecord:
        chain = parse(text)
        facts = ChainFacts(chain, chain.nnz, 0.25, rho=1.0, d_rho=1.0, floor_us=1.0)
        times = (Measurement(us, us, us, 9), Measurement(100, 100, 100, 9))
        return TrialRecord(number, "complete", facts, "TPE", *times, 1e-7, None, 1)

    trials = [trial(rank, f"low-rank(64x32,{rank})", rank) for rank in range(1, 9)]
    trials += [trial(10, "block-diagonal(64x32,4)", 50.0), trial(11, "block-diagonal(64x32,8)", 40)]
    step = Step(Budget("768", 768), 1, 1)
    assert [one.number for one in elect(trials, [step])] == [1, 2, 3, 11]
