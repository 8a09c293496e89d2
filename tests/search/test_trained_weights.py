"""A search for a trained layer: the error of its weights is reported, and may be limited."""

import csv
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ksopt
from ksopt import Chain, InvalidInputError
from ksopt.cli.main import main
from ksopt.patterns.size import Dims
from ksopt.projection.products import product
from ksopt.search import LayerRequest, SearchRequest, SearchResult, run_search
from ksopt.search.hf_config import layers_of_config
from ksopt.search.results import Verdict
from ksopt.search.trained_weights import TrainedWeights

from layer_models import tiny  # isort: skip

Search = Callable[..., SearchResult]
CHAIN = Chain.parse("(1,8,4,8)*(4,8,8,1)")  # 32 inputs, 64 outputs


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A file with a product of CHAIN, another tensor of its shape, and one of another."""
    torch.manual_seed(0)
    exact = product([torch.randn(p.weight_shape) for p in CHAIN])
    path = tmp_path / "w.safetensors"
    save_file({"up": exact, "other": torch.randn(64, 32), "down": torch.randn(32, 64)}, path)
    return path


def test_each_trial_has_its_error(search: Search, weights: Path) -> None:
    result = search(weights=f"{weights}:up", trials=5)
    arguments = TrainedWeights.of(result.layers[0].request, torch.device("cpu"))
    assert arguments is not None
    for trial in result.layers[0].trials:
        projection = ksopt.project(
            arguments.matrices[0], trial.facts.chain, iterations=4
        ).relative_error
        assert trial.values["weight_error"] == pytest.approx(projection, rel=1e-6)
        # What a conversion then makes of it is no worse.
        nearest = ksopt.project(arguments.matrices[0], trial.facts.chain).relative_error
        assert nearest <= trial.values["weight_error"] * (1 + 1e-9)
    projection = json.loads((result.folder / "results.json").read_text())
    assert [t["weight_error"] for t in projection["layers"][0]["trials"]] == [
        t.values["weight_error"] for t in result.layers[0].trials
    ]
    assert projection["request"]["weights"] == f"{weights}:up"
    rows = list(csv.DictReader(io.StringIO((result.folder / "trials.csv").read_text())))
    assert float(rows[0]["weight_error"]) == result.layers[0].trials[0].values["weight_error"]
    text = (result.folder / "report.md").read_text()
    assert "weight error" in text
    chosen = result.layers[0].recommendations[0].chosen
    assert (
        f"relative error of {chosen.values['weight_error']:.3f}"
        in result.layers[0].recommendations[0].sentence
    )


def test_only_chains_near_enough_are_recommended(search: Search, weights: Path) -> None:
    again = {"budgets": ("25%",), "max_factors": 2, "min_use": 1.0, "trials": 9}
    again |= {"weights": f"{weights}:up"}
    free = search(**again)
    errors = sorted(trial.values["weight_error"] for trial in free.layers[0].trials)
    assert errors[0] < 1e-5  # the chain itself is in the space, and all of it was measured
    assert CHAIN in [trial.facts.chain for trial in free.layers[0].trials]
    near = search(max_error=1e-4, **again)  # the same study: nothing is measured again
    (answer,) = near.layers[0].recommendations
    assert len(near.layers[0].trials) == len(free.layers[0].trials)
    assert len(near.layers[0].finalists) < len(free.layers[0].trials)
    assert all(finalist.values["weight_error"] <= 1e-4 for finalist in near.layers[0].finalists)
    assert answer.chosen.facts.chain == CHAIN
    none = search(max_error=0.0, **again)
    (layer,) = none.layers
    (answer,) = layer.recommendations
    assert (answer.verdict, answer.chosen, layer.finalists) == (Verdict.KEEP_DENSE, None, ())
    message = "within a relative error of 0 of the given weights"
    assert f"{message}: keep the dense layer." in answer.sentence
    text = (none.folder / "report.md").read_text()
    assert f"{message}, so there is none." in text.partition("## Finalists")[2]
    assert "nothing was measured" not in text
    assert "No chain was measured" not in text
    with pytest.raises(InvalidInputError, match=r"weights .* there and .* here"):
        search(**{**again, "weights": f"{weights}:other"})


def test_the_tensor_is_matched_by_shape_where_that_is_enough(weights: Path) -> None:
    def of(text: str, dims: str) -> TrainedWeights | None:
        request = LayerRequest(Dims.parse(dims), weights=text)
        return TrainedWeights.of(request, torch.device("cpu"))

    assert of(str(weights), "64x32").matrices[0].shape == (32, 64)
    assert of(f"{weights}:up", "32x64").digest != of(f"{weights}:other", "32x64").digest
    assert TrainedWeights.of(LayerRequest("32x64"), torch.device("cpu")) is None
    for text, dims, message in [
        (str(weights), "32x64", "name the tensor, as in .*; of shape .* are"),
        (str(weights), "8x8", r"none of its tensors has shape \[8, 8\]"),
        (f"{weights}:none", "32x64", "there is no tensor 'none' in it"),
        (f"{weights}:down", "32x64", r"down has shape \[32, 64\], but a layer of in_features=32"),
        ("none.safetensors", "32x64", "there is no file none.safetensors"),
    ]:
        with pytest.raises(InvalidInputError, match=message):
            of(text, dims)


def test_weights_that_are_not_finite_are_refused(search: Search, tmp_path: Path) -> None:
    path = tmp_path / "broken.safetensors"
    save_file({"up": torch.full((64, 32), float("nan"))}, path)
    with pytest.raises(InvalidInputError, match=r"broken\.safetensors: up has values that are not"):
        search(weights=str(path))


def of(text: str, dims: str = "32x64") -> TrainedWeights:
    request = LayerRequest(Dims.parse(dims), weights=text)
    actual = TrainedWeights.of(request, torch.device("cpu"))
    assert actual is not None
    return actual


def together(matrices: list[torch.Tensor], chain: Chain) -> float:
    """The relative error of several matrices as if they were one."""
    missed = [
        torch.linalg.matrix_norm(ksopt.project(one, chain, iterations=4).to_dense() - one)
        for one in matrices
    ]
    whole = [torch.linalg.matrix_norm(one) for one in matrices]
    return float(torch.tensor(missed).norm() / torch.tensor(whole).norm())


def test_several_matrices_have_one_error(weights: Path) -> None:
    both = of(f"{weights}:up,other")
    assert [both.names, both.available] == [("up", "other"), 2]
    tensors = load_file(weights)
    chain = Chain.monarch(32, 64, p=4)
    expected = together([tensors["up"], tensors["other"]], chain)
    assert both.error(chain) == pytest.approx(expected, rel=1e-4)
    assert of(f"{weights}:up").error(CHAIN) < 1e-5 < both.error(CHAIN) < 1
    assert "that of 2 matrices together" in both.sentence
    assert of(f"{weights}:up").sentence == ""
    # A pattern takes those of the layer's shape, and names of other shapes are of other sizes.
    assert of(f"{weights}:*").names == ("other", "up")
    assert of(f"{weights}:up,down").names == ("up",)
    assert of(f"{weights}:up,down", "64x32").names == ("down",)


def test_of_many_matrices_some_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "many.safetensors"
    save_file({f"{n:02}.weight": torch.randn(8, 8) for n in range(10)}, path)
    actual = of(f"{path}:*.weight", "8x8")
    assert actual.names == ("00.weight", "03.weight", "06.weight", "09.weight")
    assert "4 of 10 matrices together: 00.weight, 03.weight" in actual.sentence


def test_a_weight_that_is_stored_the_other_way_round(tmp_path: Path) -> None:
    path = tmp_path / "conv1d.safetensors"
    matrix = torch.randn(64, 32)
    save_file({"c_fc.weight": matrix.T.contiguous()}, path)
    assert torch.equal(of(f"{path}:c_fc.weight^T").matrices[0], matrix)
    assert torch.equal(of(f"{path}:c_*^T").matrices[0], matrix)
    with pytest.raises(InvalidInputError, match=r"stored as \[in, out\], write c_fc.weight\^T"):
        of(f"{path}:c_fc.weight")
    with pytest.raises(InvalidInputError, match=r"none of x\* is a tensor of a 32x64 layer"):
        of(f"{path}:x*")


@pytest.mark.slow
def test_several_sizes_take_what_is_of_their_shape(
    quick: None, weights: Path, tmp_path: Path
) -> None:
    request = SearchRequest(
        ("32x64", "64x32"),
        budgets=("50%",),
        batch=16,
        device="cpu",
        trials=6,
        weights=str(weights),
        out=tmp_path / "found",
    )
    result = run_search(request)
    tensors = load_file(weights)
    for one, names in zip(result.layers, (["up", "other"], ["down"]), strict=True):
        for trial in one.trials:
            matrices = [tensors[name] for name in names]
            expected = together(matrices, trial.facts.chain)
            assert trial.values["weight_error"] == pytest.approx(expected, rel=1e-4)
        chosen = one.recommendations[0].chosen
        assert chosen is not None
        assert f"{chosen.values['weight_error']:.3f}" in one.recommendations[0].sentence
    assert f"--weights {weights}" in request.command
    save_file({**tensors, "down": 2 * tensors["up"].T.contiguous()}, weights)
    with pytest.raises(InvalidInputError, match=r"weights .* there and .* here"):
        run_search(request)


@pytest.mark.slow
@pytest.mark.usefixtures("brief")
def test_a_models_layers_are_matched_by_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two processes measure, so that the weights in their tasks are tested too."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(Path(__file__).with_name("layer_models.py"), tmp_path / "weighedmodel.py")
    monkeypatch.syspath_prepend(tmp_path)
    torch.manual_seed(0)
    state = {name: torch.randn_like(value) for name, value in tiny().state_dict().items()}
    del state["head.weight"]  # the embedding's
    save_file(state, tmp_path / "tiny.safetensors")
    command = ["search", "--model", "weighedmodel:tiny", "--budget", "60%", "--batch", "16"]
    command += ["--device", "cpu", "--trials", "9", "--workers", "2", "--out", "out"]
    command += ["--weights", "tiny.safetensors", "--max-error", "0.99"]
    assert main(command) == 0
    assert "error of a 16x48 chain is that of 2 matrices together" in capsys.readouterr().err
    actual = json.loads((tmp_path / "out" / "results.json").read_text())
    assert len(actual["layers"]) == 3
    for one in actual["layers"]:
        (layer,) = [
            layer
            for layer, size in {"qkv": (16, 48), "up": (16, 32), "down": (32, 16)}.items()
            if size == (one["in_features"], one["out_features"])
        ]
        matrices = [state[f"blocks.{block}.{layer}.weight"] for block in (0, 1)]
        for trial in one["trials"]:
            expected = together(matrices, Chain.parse(trial["chain"]))
            assert trial["weight_error"] == pytest.approx(expected, rel=1e-4)
    assert "weight error" in (tmp_path / "out" / "report.md").read_text()
    wrong = {name.replace("blocks.", "layers."): value for name, value in state.items()}
    save_file(wrong, tmp_path / "tiny.safetensors")
    assert main([*command, "--out", "other"]) == 2
    assert "none of blocks.*.qkv.weight is a tensor of a 16x48 layer" in capsys.readouterr().err


def test_a_described_models_layers_are_matched_by_their_names(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 50}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    file = tmp_path / "gpt2.safetensors"
    square = torch.randn(16, 16)  # its transpose fits as well, and would be another matrix
    save_file({f"h.{n}.attn.c_proj.weight": square.clone() for n in (0, 1)}, file)
    request = SearchRequest(layers_of_config(path), weights=str(file), device="cpu")
    (one,) = [one for one in request.layers if str(one.size) == "16x16"]
    actual = TrainedWeights.of(one, torch.device("cpu"))
    assert actual is not None
    assert actual.names == tuple(f"h.{n}.attn.c_proj.weight^T" for n in (0, 1))
    assert all(torch.equal(matrix, square.T) for matrix in actual.matrices)


def test_max_error_needs_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "--dims", "32x64", "--max-error", "0.1"]) == 2
    assert "needs weights" in capsys.readouterr().err
    with pytest.raises(InvalidInputError, match=r"max_error 0\.1 needs weights"):
        SearchRequest("32x64", max_error=0.1)
    with pytest.raises(InvalidInputError, match=r"max_error -1: give a number from 0"):
        SearchRequest("32x64", max_error=-1, weights="w.safetensors")
    request = SearchRequest("32x64", weights="my w.safetensors:up", max_error=0.25)
    assert "--weights 'my w.safetensors:up' --max-error 0.25" in request.command
