"""Whole models: built, replaced, compiled, compared with float64, timed, reported."""

import csv
import json
import sys
from dataclasses import replace

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

import whole_models
from ksopt.compile import backend
from ksopt.compile.sites import Place, Report, Site, Verdict
from ksopt.errors import InvalidInputError
from ksopt.measure.timing import Measurement
from models import measuring
from models.build import SIZES, SMALL, build
from models.measuring import EAGER, INDUCTOR, Errors, Way
from models.report import Case, sentences, times_table

transformers = pytest.importorskip("transformers", reason="the models come from transformers")
CPU = torch.device("cpu")


@pytest.fixture
def quick(monkeypatch):
    """Graphs run through AOTAutograd, but eagerly: Inductor takes a minute a model."""
    monkeypatch.setattr(measuring, "_BACKEND", "aot_eager")
    monkeypatch.setattr(backend, "hand_over", lambda gm, inputs, config: aot_eager(gm, inputs))


def run(tmp_path, *words):
    out = tmp_path / "out"
    given = ["--small", "--layers", "1", "--device", "cpu", "--seconds", "0.01", "--out", str(out)]
    return whole_models.main([*given, *words]), out


LAYERS = {"vit": 6, "gpt2": 4, "llama": 7}  # in each block


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "more"), [(list(SIZES), []), (["gpt2"], ["--dynamic"])], ids=["static", "dynamic"]
)
def test_every_layer_is_a_site_and_results_are_right(names, more, quick, tmp_path, capsys):
    words = ["--models", ",".join(names), "--dtypes", "float32", "--tune", "default"]
    code, out = run(tmp_path, *words, *more)
    assert code == 0
    printed = capsys.readouterr().out
    assert "a forward pass takes" in printed
    found = json.loads((out / "models.json").read_text(encoding="utf-8"))
    assert found["device"]["type"] == "cpu"
    assert [case["model"] for case in found["cases"]] == names
    for case in found["cases"]:
        eager, inductor, ours = case["ways"]
        assert case["layers"] == LAYERS[case["model"]]
        for graph in ("forward", "step"):
            assert ours[f"{graph}_lowered"] == LAYERS[case["model"]]
            assert ours[f"{graph}_kept"] == ours[f"{graph}_not_recognised"] == 0
            assert all(way[f"{graph}_us"] > 0 for way in case["ways"])
            assert ours[f"{graph}_pass_s"] > 0
            assert inductor[f"{graph}_lowered"] is None
        assert 0 < ours["gradient_error"] < 1e-5  # float32, against float64
        assert 0 < eager["logits_error"] < 1e-5
        trained = [site["training"] for site in ours["sites"]]
        assert trained == [False] * case["layers"] + [True] * case["layers"]
        assert all(site["chain"].count("*") == 1 for site in ours["sites"])
    with (out / "models.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["way"] for row in rows] == len(names) * [EAGER, INDUCTOR, "ksopt"]
    page = (out / "models.md").read_text(encoding="utf-8")
    assert "## Times" in page
    assert "whole_models.py --small" in page


@pytest.mark.slow
def test_a_wrong_result_is_a_fault_and_not_timed(quick, tmp_path, capsys, monkeypatch):
    hand_over = backend.hand_over

    def wrong(gm, inputs, config):
        run = hand_over(gm, inputs, config)
        return lambda *args: [1.001 * one for one in run(*args)]

    monkeypatch.setattr(backend, "hand_over", wrong)
    words = ["--models", "vit", "--dtypes", "float32", "--tune", "default"]
    code, out = run(tmp_path, *words)
    assert code == 1
    assert "vit float32, ksopt: logits: relative error 0.001, allowed" in capsys.readouterr().out
    ours = json.loads((out / "models.json").read_text(encoding="utf-8"))["cases"][0]["ways"][2]
    assert ours["forward_us"] is None
    assert "gradient" in ours["faults"]


def test_a_missed_site_is_a_fault():
    missed = Site("n", Place("author.py", 3), "bmm", Verdict.MISSED, "At node n: no.")
    lowered = Site("m", Place(), "bmm", Verdict.LOWERED, "")
    faults = measuring._missing("step", Report([lowered, missed], graphs=1), 2)
    assert faults == [
        "step: 1 sites for 2 Kronecker-sparse layers",
        "step: author.py:3 is not recognised: At node n: no.",
    ]
    assert measuring._missing("step", Report([lowered], graphs=1), 1) == []
    left = Report(notes=["a graph was left alone"])
    assert "step: a graph was left alone" in measuring._missing("step", left, 0)


def test_gradients_that_are_nothing_are_not_compared():
    one = measuring._Results(
        torch.ones(2), torch.ones(()), {"w": torch.ones(4), "b": torch.tensor([1e-9])}
    )
    other = measuring._Results(
        torch.ones(2), torch.ones(()), {"w": torch.full((4,), 1.5), "b": torch.tensor([7e-9])}
    )
    found = measuring._errors(other, one)
    assert found == Errors(0.0, 0.0, pytest.approx(0.5), {"w": 0.5})


def test_the_answer_names_the_times():
    ways = (
        Way(EAGER, forward=Measurement(9e3, 8e3, 9e3, 5), step=Measurement(9e3, 8e3, 9e3, 5)),
        Way(INDUCTOR, forward=Measurement(4e3, 4e3, 4e3, 5), step=Measurement(6e3, 5e3, 7e3, 5)),
        Way("ksopt", {}, forward=Measurement(2e3, 2e3, 2e3, 5), step=Measurement(6e3, 5e3, 7e3, 5)),
    )
    case = Case("vit", "float32", 12, 72, (128, 3, 224, 224), False, ways)
    assert sentences([case]) == [
        "vit float32, ksopt: a forward pass takes 2.00 ms, 2.00 times as fast as Inductor's 4.00 ms"
        " (faster); a training step takes 6.00 ms, 1.00 times as fast as Inductor's 6.00 ms"
        " (within noise)."
    ]
    assert times_table([case]).rows[2][3:6] == ("2.00", "2.00-2.00", "2.00")


def test_the_paper_has_these_factors_in_vit_s_16():
    built = build("vit", torch.float32, torch.device("meta"), layers=1)
    shapes = {name: tuple(p.shape) for name, p in built.model.named_parameters()}
    square = [shape for name, shape in shapes.items() if "blocks" in name and "mlp" not in name]
    # (1,192,48,2)*(2,48,192,1), as [p, middle/p, in/p] and [q, out/q, middle/q]
    assert set(square) <= {(2, 48, 192), (2, 192, 48), (6, 64, 64), (2, 768, 192),
                           (6, 64, 256), (2, 192, 192)}  # fmt: skip
    assert {(2, 48, 192), (2, 192, 48)} <= set(square)


def test_models_are_drawn_alike_and_leave_the_random_state():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    one, two = (build("gpt2", torch.float32, CPU, small=True) for _ in range(2))
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(one.inputs, two.inputs)
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_without_the_library_there_is_a_sentence(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, _ = run(tmp_path)
    assert code == 1
    assert "pip install transformers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--models", "bert"], "'bert' is unknown, it must be of vit, gpt2, llama"),
        (["--dtypes", "float64"], "it must be of float32, bfloat16, float16"),
        (["--layers", "0"], "--layers 0: it must be at least 1"),
        (["--seconds", "0"], "must be above 0"),
        (["--tune", "never"], "'never' is unknown"),
    ],
)
def test_arguments_that_are_not_allowed(words, message, capsys, tmp_path):
    assert run(tmp_path, *words)[0] == 2
    assert message in capsys.readouterr().err
    with pytest.raises(InvalidInputError, match="model 'bert' is unknown"):
        build("bert", torch.float32, CPU)


@pytest.mark.slow
def test_under_inductor(tmp_path, monkeypatch):
    # Three of the four layers have one size: Inductor compiles what is measured for each size.
    monkeypatch.setitem(SMALL, "gpt2", replace(SMALL["gpt2"], inner=SMALL["gpt2"].hidden))
    words = ["--models", "gpt2", "--dtypes", "float32", "--tune", "measure"]
    code, out = run(tmp_path, *words)
    assert code == 0
    ours = json.loads((out / "models.json").read_text(encoding="utf-8"))["cases"][0]["ways"][2]
    assert ours["forward_lowered"] + ours["forward_kept"] == LAYERS["gpt2"]
    assert ours["step_lowered"] + ours["step_kept"] == LAYERS["gpt2"]
    assert all(site["measured"] and "under Inductor" in site["reason"] for site in ours["sites"])
    assert ours["step_compile_s"] > ours["step_pass_s"] > 0
    assert ours["forward_deciding_s"] > 0
