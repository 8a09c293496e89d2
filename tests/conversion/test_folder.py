"""A converted model on disk: whole or not at all, and back again."""

import json
import re
from pathlib import Path

import pytest
import torch
from conversion_models import DOWN, UP, Tiny, tiny
from safetensors.torch import load_file, save_file
from torch import nn

import ksopt
from ksopt import InvalidInputError
from ksopt.conversion.weights import load_weights

PLAN = {"blocks.*.up": UP, "32x8": DOWN, "head": None}
TOKENS = torch.arange(12).reshape(2, 6)


@pytest.fixture
def done() -> ksopt.Conversion:
    return ksopt.convert(tiny(), PLAN)


def test_round_trip(done: ksopt.Conversion, tmp_path: Path) -> None:
    folder = ksopt.save_converted(done, tmp_path / "a" / "b", source="mine:build")
    assert folder == tmp_path / "a" / "b"
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "report.md",
    ]
    assert [path.name for path in folder.parent.iterdir()] == ["b"]  # nothing beside it
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}
    other = Tiny().eval()
    assert ksopt.load_converted(folder, other) is other
    assert torch.equal(other(TOKENS), done.model(TOKENS))
    assert other.head.weight is other.embed.weight
    assert {n: p.shape for n, p in other.named_parameters()} == {
        n: p.shape for n, p in done.model.named_parameters()
    }


def test_the_config_is_what_its_schema_says(done: ksopt.Conversion, tmp_path: Path) -> None:
    folder = ksopt.save_converted(done, tmp_path / "out", source="mine:build")
    config = json.loads((folder / "config.json").read_text())
    assert list(config) == [
        "schema",
        "ksopt",
        "torch",
        "model",
        "parameters",
        "dense_parameters",
        "bytes",
        "layers",
        "dense",
        "aliases",
    ]
    assert config["schema"] == "ksopt.model/1"
    assert config["parameters"] == done.parameters
    assert config["bytes"] == 4 * done.parameters
    assert config["aliases"] == {"head.weight": "embed.weight"}
    unmatched = dict.fromkeys(["blocks.0.qkv", "blocks.1.qkv"], "no rule of the plan matches it")
    assert config["dense"] == {"head": "the plan keeps it dense"} | unmatched
    assert config["layers"][0] == {
        "names": ["blocks.0.up"],
        "kind": "Linear",
        "in_features": 8,
        "out_features": 32,
        "chains": [UP],
        "dense_parameters": 256,
        "parameters": done.layers[0].parameters,
        "relative_error": done.layers[0].relative_error,
        "lower_bound": done.layers[0].lower_bound,
        "notes": [],
    }
    assert set(load_file(folder / "model.safetensors")) == set(done.model.state_dict()) - {
        "head.weight"
    }
    report = (folder / "report.md").read_text()
    for layer in done.layers:
        assert f"{layer.relative_error:.4f}" in report
    assert "# Converted model mine:build" in report
    assert "the plan keeps it dense" in report


def test_shared_weights_and_views_are_saved_once(tmp_path: Path) -> None:
    def build() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(8, 32), nn.Linear(8, 32))
        model[1].weight = model[0].weight
        return model

    done = ksopt.convert(build(), {"8x32": UP})
    base = torch.arange(6.0)
    done.model.register_buffer("one", base[:4])
    done.model.register_buffer("two", base[2:])
    folder = ksopt.save_converted(done, tmp_path / "out")
    other = build()
    other.register_buffer("one", torch.zeros(4))
    other.register_buffer("two", torch.zeros(4))
    ksopt.load_converted(folder, other)
    assert other[0].weights[1] is other[1].weights[1]
    assert torch.equal(other[0].weights[1], done.model[0].weights[1])
    assert other.one.tolist() == [0, 1, 2, 3]
    assert other.two.tolist() == [2, 3, 4, 5]


def test_an_existing_folder_is_never_touched(done: ksopt.Conversion, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("kept")
    (tmp_path / "file").write_text("kept")
    for name, message in [("full", "is not empty"), ("file", "is not a folder")]:
        with pytest.raises(InvalidInputError, match=message):
            ksopt.save_converted(done, tmp_path / name)
    with pytest.raises(InvalidInputError, match="cannot be made"):
        ksopt.save_converted(done, tmp_path / "file" / "under")
    assert (tmp_path / "full" / "mine").read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full"]
    (tmp_path / "empty").mkdir()
    ksopt.save_converted(done, tmp_path / "empty")
    assert (tmp_path / "empty" / "config.json").exists()


def test_nothing_is_left_of_a_failed_save(
    done: ksopt.Conversion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("ksopt.conversion.folder._report", broken)  # after the weights
    with pytest.raises(KeyboardInterrupt):
        ksopt.save_converted(done, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_state_that_is_no_tensor_is_refused(done: ksopt.Conversion, tmp_path: Path) -> None:
    class Extra(nn.Module):
        def get_extra_state(self) -> int:
            return 3

        def set_extra_state(self, state: int) -> None:
            pass

    done.model.add_module("extra", Extra())
    with pytest.raises(InvalidInputError, match=r"extra\._extra_state .* is of type int"):
        ksopt.save_converted(done, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_folders_that_hold_no_converted_model(done: ksopt.Conversion, tmp_path: Path) -> None:
    def refused(message: str, model: nn.Module | None = None) -> None:
        model = model or tiny()
        modules = list(model.modules())
        with pytest.raises(InvalidInputError, match=message):
            ksopt.load_converted(tmp_path / "out", model)
        assert list(model.modules()) == modules

    refused("there is no config.json")
    folder = ksopt.save_converted(done, tmp_path / "out")
    other = (
        "converted from another model: its layer blocks.0.up .*; in this model there is no linear"
    )
    refused(other, nn.Sequential(nn.Linear(8, 8)))
    bigger = tiny()
    bigger.extra = nn.Linear(3, 3)
    refused("lack extra.weight, extra.bias", bigger)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"more": torch.ones(1)}, folder / "model.safetensors")
    refused("have more, which the model has not")
    save_file(tensors | {"blocks.0.up.bias": torch.ones(3)}, folder / "model.safetensors")
    refused(re.escape("blocks.0.up.bias of shape [3], but the model's has shape [32]"))
    (folder / "model.safetensors").write_bytes(b"short")
    refused("is not a safetensors file")
    (folder / "config.json").write_text(json.dumps(config | {"schema": "ksopt.model/9"}))
    refused("the schema 'ksopt.model/1', got 'ksopt.model/9'")
    (folder / "config.json").write_text("{")
    refused("cannot be read")


class Evil:
    """What a pickle could do, if it were read as code."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("read as code",)


def test_weights_are_read_as_tensors_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {name: 2 * tensor for name, tensor in tiny().state_dict().items()}
    torch.save(state, tmp_path / "weights.pt")
    distinct = {name: tensor.clone() for name, tensor in state.items()}
    save_file(distinct, tmp_path / "weights.safetensors")
    for name in ("weights.pt", "weights.safetensors"):
        model = tiny()
        load_weights(model, tmp_path / name)
        assert torch.equal(model.embed.weight, state["embed.weight"])
    torch.save({"a": Evil()}, tmp_path / "evil.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "text.pt").write_text("no weights")
    for name, message in [
        ("evil.pt", "cannot be read as weights alone"),
        ("text.pt", "cannot be read as weights alone"),
        ("list.pt", "holds no state_dict"),
        ("none.pt", "there is no file"),
        ("text.safetensors", "there is no file"),
    ]:
        with pytest.raises(InvalidInputError, match=message):
            load_weights(tiny(), tmp_path / name)
    assert "read as code" not in capsys.readouterr().out


def test_one_name_of_a_tied_weight_is_enough() -> None:
    state = {name: 2 * tensor for name, tensor in tiny().state_dict().items()}
    tied = state.pop("head.weight")
    model = tiny()
    load_weights(model, state)
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.head.weight, tied)
    model.head.weight = nn.Parameter(tied.clone())  # no longer tied: then it must be there
    with pytest.raises(InvalidInputError, match=r"the weights lack head\.weight"):
        load_weights(model, state)


def test_weights_that_do_not_fit_change_nothing() -> None:
    model = tiny()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = {name: 2 * tensor for name, tensor in before.items()}
    del state["blocks.0.up.bias"]
    with pytest.raises(InvalidInputError, match=r"the weights lack blocks\.0\.up\.bias"):
        ksopt.convert(model, PLAN, weights=state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert type(model.blocks[0].up) is nn.Linear
