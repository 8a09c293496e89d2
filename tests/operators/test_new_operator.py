"""A structure is one file: one of a user's own is searched, checked, timed and reported."""

import csv
import io
import json
import pkgutil
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from ksopt.cli.main import main
from ksopt.conversion.folder import load_converted
from ksopt.conversion.plan import Plan
from ksopt.errors import InvalidInputError
from ksopt.operators import registry, structures
from ksopt.operators.linear import StructuredLinear
from ksopt.patterns.chain import Chain
from ksopt.search import SearchRequest, SearchResult, run_search
from ksopt.search.metrics import METRICS
from ksopt.search.report import results_json, sections

PLUGIN = Path(__file__).with_name("toy_structure.py")
SEARCH = ("search", "--dims", "64x64", "--batch", "16", "--device", "cpu", "--out", "report")


@pytest.fixture
def here(brief: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the user's module, which is not imported yet; it is forgotten afterwards."""
    shutil.copy(PLUGIN, tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    if (toy := sys.modules.pop("toy_structure", None)) is not None:
        sections.unregister(toy.ranks)
        registry.unregister_structure("diagonal-plus")
        del METRICS["weight_tensors"]


def searched(here: Path, *options: str) -> dict[str, Any]:
    assert main([*SEARCH, "--plugins", "toy_structure", *options]) == 0
    value = json.loads((here / "report" / "results.json").read_text("utf-8"))
    jsonschema.validate(value, results_json.results_schema())
    (layer,) = value["layers"]
    assert isinstance(layer, dict)
    return layer


@pytest.mark.usefixtures("quick")
def test_it_is_searched_beside_chains(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layer = searched(here, "--structures", "ks,diagonal-plus", "--trials", "12")
    origins = {trial["chain"]: trial["origin"] for trial in layer["trials"]}
    # For each budget, for any draws of the sampler.
    theirs = [f"diagonal-plus(64,{rank})" for rank in (2, 4, 8)]
    assert set(theirs) <= set(origins)
    assert any(text.startswith("(1,") for text in origins)
    assert {trial["state"] for trial in layer["trials"]} <= {"complete", "pruned"}
    for trial in layer["trials"]:
        if trial["chain"] == "diagonal-plus(64,4)":
            assert trial["parameters"] == 576
            assert trial["patterns"] == []
            assert 0 < trial["error"] < 1e-5
            assert trial["weight_tensors"] == 3.0
    rows = csv.DictReader(io.StringIO((here / "report" / "trials.csv").read_text("utf-8")))
    assert {row["chain"] for row in rows} == set(origins)
    plots = (here / "report" / "report.html").read_text("utf-8")
    assert "Diamonds are operators of other structures." in plots
    page = (here / "report" / "report.md").read_text("utf-8")
    assert "--structures ks,diagonal-plus --trials 12 --seed 0 --plugins toy_structure" in page
    assert theirs[0] in page
    ranks = [rank for rank in (1, 2, 4, 8) if f"diagonal-plus(64,{rank})" in origins]
    for report in (plots, page):
        assert f"Tried: {ranks}." in report.partition("Ranks beside the diagonal")[2]
    assert "importing" in capsys.readouterr().err

    shutil.copy(here / "report" / "results.json", here / "before.json")
    assert main(["search", "--replay", "report"]) == 0
    before, after = (json.loads((here / name).read_text("utf-8")) for name in REPLAYED)
    assert after["layers"][0]["trials"] == before["layers"][0]["trials"]


REPLAYED = ("before.json", "report/results.json")


def test_it_alone_has_finalists_and_answers(here: Path) -> None:
    """The final is a separate process, which imports the user's module."""
    layer = searched(here, "--structures", "diagonal-plus")
    budgets = [answer["budget"]["text"] for answer in layer["recommendations"]]
    assert budgets == ["10%", "25%", "50%"]
    assert {one["chain"] for one in layer["finalists"]} == {
        f"diagonal-plus(64,{rank})" for rank in (2, 4, 8)
    }
    assert all(one["retimed"] for one in layer["finalists"])
    page = (here / "report" / "report.md").read_text("utf-8")
    used = [one for one in layer["recommendations"] if one["verdict"] == "use the chain"]
    assert ('layer = StructuredLinear("diagonal-plus(64,' in page) == bool(used)
    (rule,) = Plan.read(here / "report" / "plan.json").rules
    assert rule.text == (used[-1]["chosen"]["chain"] if used else "dense")


@pytest.mark.slow
def test_workers_import_the_users_module(here: Path) -> None:
    layer = searched(here, "--structures", "diagonal-plus", "--workers", "2")
    assert [trial["state"] for trial in layer["trials"]] == ["complete"] * 3
    assert [trial["weight_tensors"] for trial in layer["trials"]] == [3.0] * 3


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("layout", ["batch_first", "batch_last"])
def test_it_is_trained_and_fitted(here: Path, layout: str) -> None:
    torch.manual_seed(1)
    matrix = torch.diag(torch.randn(64)) + torch.randn(64, 1) @ torch.randn(1, 64)
    save_file({"w": matrix}, here / "trained.safetensors")
    options = ("--train", "--weights", "trained.safetensors", "--layout", layout)
    layer = searched(here, "--structures", "diagonal-plus", *options)
    assert [trial["state"] for trial in layer["trials"]] == ["complete"] * 3
    errors = [trial["weight_error"] for trial in layer["trials"]]
    assert all(0 < error < 1 for error in errors)


MODEL = """
import torch
def build():
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
    with torch.no_grad():
        model[0].weight.copy_(torch.diag(torch.arange(64.0)))
    return model
"""


def test_a_model_is_converted_to_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "users_model.py").write_text(MODEL, encoding="utf-8")
    plan = Plan.of({"2": None, "64x64": "(1,64,64,1)"}).to_json()
    (here / "plan.json").write_text(plan.replace("(1,64,64,1)", "diagonal-plus(64,2)"), "utf-8")
    convert = ["convert", "--model", "users_model:build", "--plan", "plan.json", "--out", "new"]
    assert main(convert) == 2
    assert "'diagonal-plus': there is no such structure" in capsys.readouterr().err
    assert main([*convert, "--plugins", "toy_structure"]) == 0
    assert "diagonal-plus(64,2)" in capsys.readouterr().out

    built = sys.modules["users_model"].build()
    x = torch.randn(3, 64)
    expected = built(x)
    model = load_converted(here / "new", sys.modules["users_model"].build())
    assert isinstance(model[0], StructuredLinear)
    assert isinstance(model[2], torch.nn.Linear)
    torch.testing.assert_close(model(x), expected)  # a diagonal is one
    torch.testing.assert_close(model[0].to_dense(), built[0].weight)
    model[0](x).sum().backward()
    assert all(weight.grad is not None for weight in model[0].parameters())
    del sys.modules["users_model"]


@pytest.mark.parametrize("layout", ["batch_first", "batch_last"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_of_it_is_its_matrix(here: Path, layout: str, bias: bool) -> None:
    import_toy()
    layer = StructuredLinear("diagonal-plus(64,4)", bias=bias, layout=layout, dtype=torch.float64)
    x = torch.randn(200, 64, dtype=torch.float64)
    y = layer(x if layout == "batch_first" else x.T)
    expected = torch.nn.functional.linear(x, layer.to_dense(), layer.bias)
    torch.testing.assert_close(y if layout == "batch_first" else y.T, expected)
    assert "diagonal-plus(64,4)" in repr(layer)


Change = Callable[[Tensor], Tensor]


@pytest.mark.parametrize("train", [False, True])
def test_a_wrong_product_gets_no_time(
    here: Path, monkeypatch: pytest.MonkeyPatch, train: bool
) -> None:
    import_toy()
    toy = sys.modules["toy_structure"].DiagonalPlusLowRank
    right = toy.bind

    class WrongGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            return y.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return 1.01 * gradients[0]

    def wrong(self: Any, weights: Any, layout: str) -> Change:
        product = right(self, weights, layout)
        return lambda x: WrongGradient.apply(product(x)) if train else 1.01 * product(x)

    monkeypatch.setattr(toy, "bind", wrong)
    (layer,) = python_search(here, train=train).layers
    assert [trial.state for trial in layer.trials] == ["failed"] * 3
    what = "its input gradient's" if train else "its"
    assert all(f"{what} relative error" in (trial.reason or "") for trial in layer.trials)


def import_toy() -> None:
    from ksopt.system.user_code import import_plugins

    import_plugins(["toy_structure"], sys.stderr)


def python_search(here: Path, **options: Any) -> SearchResult:
    return run_search(
        SearchRequest(
            "64x64",
            structures="diagonal-plus",
            plugins=("toy_structure",),
            batch=16,
            device="cpu",
            out=here / "report",
            **options,
        )
    )


@pytest.mark.usefixtures("quick")
def test_a_study_knows_its_structures(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    searched(here, "--structures", "diagonal-plus")
    assert main([*SEARCH, "--trials", "2"]) == 2
    assert "structures diagonal-plus there and ks here" in capsys.readouterr().err


def test_what_is_not_there_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, sentence in (
        (("--structures", "toeplitz"), "structures 'toeplitz': there is no such structure; "),
        (("--plugins", "nowhere"), "--plugins nowhere: there is no module nowhere"),
        (("--plugins", "a:b"), "--plugins 'a:b': write the name of a module"),
        (
            ("--plugins", "toy_structure", "--structures", "diagonal-plus", "--budget", "1"),
            "diagonal-plus: its smallest operator counts 192 weights, 4.688% of the dense ones",
        ),
    ):
        assert main([*SEARCH, *options]) == 2
        assert sentence in capsys.readouterr().err
    assert not (here / "report").exists()


def test_a_module_of_the_folder_is_a_structure() -> None:
    chains, *others = registry.names()
    assert chains == registry.KRONECKER
    assert others == ["low-rank", "block-diagonal", "two-four", "strassen-tile", "fp8-dense"]
    modules = {
        module.name.replace("_", "-") for module in pkgutil.iter_modules(structures.__path__)
    }
    assert modules == set(others)


def test_a_structure_has_one_name(here: Path) -> None:
    import_toy()
    toy = registry.structure_of("diagonal-plus")
    with pytest.raises(InvalidInputError, match="'diagonal-plus': there is one of that name"):
        registry.register_structure(toy)
    with pytest.raises(InvalidInputError, match=r"'No \(1\)': a name has small letters"):
        registry.register_structure(registry.Structure("No (1)", toy.parse, toy.candidates))
    operator = registry.parse("diagonal-plus(64,4)")
    assert registry.name_of(operator) == "diagonal-plus"
    assert registry.parse(str(operator)) == operator
    assert registry.parse("(1,4,4,2)*(2,4,4,1)") == Chain.monarch(8, 8, 2)
