"""``ksopt.search(...)``: the search as a function, which is also a package."""

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ksopt
import ksopt.search
from ksopt.errors import InvalidInputError
from ksopt.search import Dims, SearchRequest, SearchResult, one_call

from layer_models import inputs, tiny  # isort: skip


def test_a_size_is_searched(quick: None, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    result = ksopt.search("32x64", "50%", batch=16, device="cpu", trials=2, out=tmp_path / "a")
    assert isinstance(result, SearchResult)
    assert result.of(Dims(32, 64)) is not None
    assert (result.folder / "report.html").exists()
    assert "2 of 2 chains measured" in capsys.readouterr().err
    same = SearchRequest(
        "32x64", budgets=("50%",), batch=16, device="cpu", trials=2, out=tmp_path / "a"
    )
    assert result.request == same


def test_a_model_is_searched_as_its_inputs_go_through_it(
    quick: None, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = tiny().bfloat16()
    result = ksopt.search(
        model,
        ["60%", "90%"],
        example_inputs=inputs(),
        exclude="*.qkv",
        trials=4,
        quiet=True,
    )
    assert (result.request.batch, result.request.dtype) == (20, "bfloat16")
    assert [str(one.size) for one in result.layers] == ["16x32", "32x16"]
    assert result.folder.name == "ksopt-report-Tiny-16x32-32x16-cpu-bfloat16-batch_first-20"
    assert capsys.readouterr().err == ""
    # The model is as it was: in training mode, on its device, dense.
    assert all(module.training for module in model.modules())
    assert next(model.parameters()).dtype is torch.bfloat16
    # A copy was timed whole, where that changes something.
    changes = any(rule.chains for rule in ksopt.search.plan_of(result).rules)
    assert (result.whole is not None) == changes


@pytest.mark.parametrize(
    ("subject", "options", "words"),
    [
        (7, {}, "give a model, or a layer's size such as '768x3072'; got int"),
        ("768", {}, "write INxOUT"),
        ("1000000000x8", {}, "dims '1000000000x8': a size must be below 1,000,000,000"),
        ("8x8", {"budget": "much"}, "budget 'much': write a share"),
        ("8x8", {"budgets": "25%"}, "there is no option 'budgets': did you mean 'budget'?"),
        ("8x8", {"bacth": 3}, "there is no option 'bacth': did you mean 'batch'?"),
        ("8x8", {"qwertz": 3}, "there are batch, dtype"),
        ("8x8", {"include": "x"}, "include is of a model"),
        ("8x8", {"example_inputs": inputs()}, "example_inputs is of a model"),
        (tiny(), {"example_inputs": torch.ones(4, 5)}, "search: the model does not take these"),
        (tiny(), {"exclude": "*"}, "no linear layer is left"),
    ],
)
def test_misuse_is_one_sentence(subject: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError) as refusal:
        ksopt.search(subject, **options)
    assert words in str(refusal.value)


def test_the_package_has_the_functions_signature() -> None:
    assert inspect.signature(ksopt.search) == inspect.signature(one_call.search)
    assert inspect.ismodule(ksopt.search)
    assert ksopt.search.SearchRequest is SearchRequest


def test_the_name_needs_no_import_of_its_own_and_a_refusal_is_quick() -> None:
    code = (
        "import sys, ksopt\n"
        "try:\n    ksopt.search('768', trials=3)\n"
        "except ksopt.InvalidInputError as error:\n    print(error)\n"
        "assert 'optuna' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("dims '768': write INxOUT")
