"""Files of weights, one or several with an index, and their error messages."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ksopt.conversion import weights
from ksopt.errors import InvalidInputError

STATE = {"up": torch.randn(4, 6), "down": torch.randn(6, 4), "bias": torch.randn(4)}


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """The index of a model in two files."""
    parts = {"a.safetensors": ["up", "bias"], "b.safetensors": ["down"]}
    for name, own in parts.items():
        save_file({key: STATE[key] for key in own}, tmp_path / name)
    where = {key: name for name, own in parts.items() for key in own}
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return path


def files(index: Path) -> list[Path]:
    """The same tensors in each kind of file."""
    one, pickled = index.parent / "one.safetensors", index.parent / "state.pt"
    save_file(STATE, one)
    torch.save(STATE, pickled)
    return [index, one, pickled]


def test_every_kind_of_file_holds_the_same(index: Path) -> None:
    for path in files(index):
        state = weights.read(path)
        assert set(state) == set(STATE)
        assert all(torch.equal(state[name], STATE[name]) for name in STATE)
        assert weights.shapes(path) == {name: tuple(t.shape) for name, t in STATE.items()}
        down, up = weights.read_named(path, ["down", "up"])
        assert torch.equal(down, STATE["down"])
        assert torch.equal(up, STATE["up"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not JSON", "is no index of .safetensors files"),
        ('{"weight_map": ["a"]}', "is no index of .safetensors files"),
        ('{"weight_map": {"up": "../a.safetensors"}}', "lie beside it"),
        ('{"weight_map": {"up": "a.pkl"}}', "lie beside it"),
        ('{"weight_map": {"up": "c.safetensors"}}', "there is no such file beside it"),
    ],
)
def test_an_index_that_is_wrong(index: Path, text: str, message: str) -> None:
    index.write_text(text)
    for read in (weights.read, weights.shapes, lambda path: weights.read_named(path, ["up"])):
        with pytest.raises(InvalidInputError, match=message):
            read(index)


def test_a_file_that_is_cut_off(index: Path) -> None:
    whole = (index.parent / "b.safetensors").read_bytes()
    (index.parent / "b.safetensors").write_bytes(whole[:20])
    with pytest.raises(InvalidInputError, match=r"b\.safetensors is not a safetensors file"):
        weights.shapes(index)
    with pytest.raises(InvalidInputError, match="there is no file"):
        weights.shapes(index.parent / "none.safetensors")
