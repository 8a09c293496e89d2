"""The operations around a model's layers, read from its graph, and searched with them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ksopt
from ksopt.cli.main import main
from ksopt.conversion.model_call import ModelCall, evaluating
from ksopt.conversion.model_surroundings import surroundings_of_model
from ksopt.errors import InvalidInputError
from ksopt.patterns.surroundings import ALONE, Surroundings
from ksopt.search import Dims, SearchRequest, effect_of, layers_of_model, replay
from ksopt.search.layers import Layers
from ksopt.search.report import comparison, results_json
from ksopt.search.surroundings import most_frequent

BIAS = Surroundings(("bias",))


class Attention(nn.Module):
    """A block of a transformer: q, k, v, their projection, and an MLP."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (
            one(h).view(*x.shape[:2], 2, -1).transpose(1, 2) for one in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = x + self.drop(self.out(mixed))
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)), approximate="tanh")))


class Calls(nn.Module):
    """Layers, and a function that calls them."""

    def __init__(self, forward: Callable[..., Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.function = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.layers)


def read(model: nn.Module, *inputs: Tensor) -> tuple[dict[str, Surroundings], str]:
    with evaluating(model):
        return surroundings_of_model(model, ModelCall(inputs, {}, "test"))


def square(bias: bool = True) -> nn.Linear:
    return nn.Linear(16, 16, bias=bias)


def test_a_block_of_a_transformer() -> None:
    actual, note = read(nn.Sequential(Attention(), Attention()), torch.randn(2, 5, 16))
    assert note == ""
    three, added = Surroundings(("bias",), 3), Surroundings(("bias", "residual"))
    one = {
        **dict.fromkeys("qkv", three),
        "out": added,
        "up": Surroundings(("bias", "gelu_tanh")),
        "down": added,
    }
    assert actual == {f"{at}.{name}": around for at in range(2) for name, around in one.items()}


@pytest.mark.parametrize(
    ("activation", "name"),
    [
        (nn.ReLU(), "relu"),
        (F.relu, "relu"),
        (torch.relu, "relu"),
        (lambda y: y.relu(), "relu"),
        (nn.GELU(), "gelu"),
        (nn.GELU("tanh"), "gelu_tanh"),
        (F.gelu, "gelu"),
        (nn.SiLU(), "silu"),
        (F.silu, "silu"),
        (lambda y: y * torch.sigmoid(y), "silu"),  # spelled out
        (torch.tanh, None),
        (nn.LeakyReLU(), None),
    ],
)
@pytest.mark.parametrize("bias", [True, False])
def test_an_activation_is_recognised_however_it_is_written(
    activation: Callable[[Tensor], Tensor], name: str | None, bias: bool
) -> None:
    model = Calls(lambda x, layer: activation(layer(x)), square(bias))
    actual, _ = read(model, torch.randn(3, 16))
    steps = (*(("bias",) if bias else ()), *((name,) if name else ()))
    assert actual == {"layers.0": Surroundings(steps)}


@pytest.mark.parametrize(
    ("forward", "steps"),
    [
        (lambda x, layer: x + layer(x), ("bias", "residual")),
        (lambda x, layer: layer(x).relu() + x, ("bias", "relu", "residual")),
        (lambda x, layer: (x + layer(x)).relu(), ("bias", "residual")),  # not in an epilogue
        (lambda x, layer: layer(x) + x[:1], ("bias",)),  # broadcast
        (lambda x, layer: layer(x) + 1.0, ("bias",)),
        (lambda x, layer: (y := layer(x)) + F.gelu(y), ("bias",)),  # two readers
        (lambda x, layer: layer(x).double() + x.double(), ("bias",)),
    ],
)
def test_what_only_its_reader_does_follows_a_layer(
    forward: Callable[..., Tensor], steps: tuple[str, ...]
) -> None:
    actual, _ = read(Calls(forward, square()), torch.randn(3, 16))
    assert actual == {"layers.0": Surroundings(steps)}


def test_siblings_are_of_one_size_one_input_and_alike() -> None:
    def forward(x: Tensor, *layers: nn.Module) -> Tensor:
        a, b, plain, wide, last = layers
        y = a(x).sin() + b(x).cos() + plain(x).tan() + wide(x)[:, :16].exp()
        return last(y).sin()

    model = Calls(forward, square(), square(), square(bias=False), nn.Linear(16, 32), square())
    actual, _ = read(model, torch.randn(3, 16))
    assert [actual[f"layers.{at}"] for at in range(5)] == [
        *(Surroundings(("bias",), 2), Surroundings(("bias",), 2)),
        *(ALONE, BIAS, BIAS),
    ]


def test_a_sibling_that_an_attribute_transposes() -> None:
    def forward(x: Tensor, q: nn.Module, k: nn.Module, v: nn.Module) -> Tensor:
        return torch.softmax(q(x) @ k(x).mT, -1) @ v(x)

    actual, _ = read(Calls(forward, square(), square(), square()), torch.randn(2, 5, 16))
    assert set(actual.values()) == {Surroundings(("bias",), 3)}


def test_two_layers_that_a_gate_multiplies() -> None:
    gate, up, down = (nn.Linear(*size) for size in ((16, 32), (16, 32), (32, 16)))

    def forward(x: Tensor, gate: nn.Module, up: nn.Module, down: nn.Module) -> Tensor:
        return x + down(F.silu(gate(x)) * up(x))

    actual, note = read(Calls(forward, gate, up, down), torch.randn(3, 16))
    assert note == ""
    both = Surroundings(("bias", "silu_gate"), 2)
    last = Surroundings(("bias", "residual"))
    assert actual == {"layers.0": both, "layers.1": both, "layers.2": last}


def test_five_layers_on_one_input_are_four_and_one() -> None:
    model = Calls(
        lambda x, *layers: sum(layer(x).sin() for layer in layers), *map(square, [False] * 5)
    )
    actual, _ = read(model, torch.randn(3, 16))
    assert [around.siblings for around in actual.values()] == [4, 4, 4, 4, 1]


def test_what_a_break_hides_has_its_bias_alone_and_a_sentence() -> None:
    def forward(x: Tensor, first: nn.Module, hidden: nn.Module, last: nn.Module) -> Tensor:
        x = first(x).relu()
        torch._dynamo.graph_break()
        return last(x).relu()

    model = Calls(forward, square(), square(), square(bias=False))
    actual, note = read(model, torch.randn(3, 16))
    relu = Surroundings(("bias", "relu"))
    assert list(actual.values()) == [relu, BIAS, Surroundings(("relu",))]
    assert note.startswith("What surrounds layers in the model could not be read of layers.1:")
    assert "its graph breaks" in note


def test_a_graph_that_writes_in_place_is_not_read() -> None:
    def forward(x: Tensor, layer: nn.Module) -> Tensor:
        y = layer(x).relu()
        y[0] = 0
        return y

    actual, note = read(Calls(forward, square()), torch.randn(3, 16))
    assert actual == {"layers.0": BIAS}
    assert "all layers: its graph writes tensors in place" in note


def test_a_model_that_dynamo_refuses_is_searched_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise RuntimeError("no frames today\nand more")

    monkeypatch.setattr(torch, "compile", refuse)
    actual, note = read(Calls(lambda x, layer: layer(x).relu(), square()), torch.randn(3, 16))
    assert actual == {"layers.0": BIAS}
    assert "its graph could not be read: RuntimeError: no frames today." in note


def test_reading_again_and_again_and_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.ReLU())
    before, state = {n: b.clone() for n, b in model.named_buffers()}, torch.get_rng_state()
    for _ in range(12):  # more often than Dynamo compiles one code
        actual, note = read(model, torch.randn(3, 16, generator=torch.Generator()))
        assert (actual, note) == ({"0": BIAS}, "")
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training


def layers_of_blocks() -> Layers:
    model = nn.Sequential(Attention(), Attention())
    call = ModelCall((torch.randn(2, 5, 16),), {}, "test")
    return layers_of_model(model, call=call)


def test_a_size_is_timed_with_the_surroundings_of_most_of_its_layers() -> None:
    layers = layers_of_blocks()
    assert layers.around(Dims(16, 16)) == Surroundings(("bias",), 3)
    assert Layers.from_json(json.loads(json.dumps(layers.to_json()))) == layers
    request = SearchRequest(layers, budgets=("50%",), device="cpu")
    requested = {str(one.size): (one.epilogue, one.siblings) for one in request.layers}
    assert requested == {
        "16x16": (("bias",), 3),
        "16x32": (("bias", "gelu_tanh"), 1),
        "32x16": (("bias", "residual"), 1),
    }
    (mixed,) = [note for note in request.notes if note.startswith("16x16")]
    assert "as most of them are in the model, 3 on one input, followed by a bias" in mixed
    assert "out is followed by a bias and a residual" in mixed
    assert SearchRequest.from_json(json.loads(json.dumps(request.to_json()))) == request


def test_groups_without_surroundings_are_of_an_older_search() -> None:
    value = layers_of_model(nn.Sequential(Attention())).to_json()
    for group in value["groups"]:
        del group["epilogue"], group["siblings"]
    assert all(group.around == ALONE for group in Layers.from_json(value).groups)


@pytest.mark.parametrize(
    "options", [{"train": True}, {"epilogue": "relu"}, {"siblings": 2}, {"epilogue": ("bias",)}]
)
def test_the_request_comes_before_the_graph(options: dict[str, Any]) -> None:
    request = SearchRequest(layers_of_blocks(), budgets=("50%",), device="cpu", **options)
    assert {(one.epilogue, one.siblings) for one in request.layers} == {
        (request.epilogue, request.siblings)
    }
    assert request.notes == ()


def test_of_as_many_the_first_counts() -> None:
    assert most_frequent([(BIAS, 1), (ALONE, 2), (BIAS, 1)]) == BIAS
    assert most_frequent([]) == ALONE


OPTIONS: dict[str, Any] = {"trials": 6, "quiet": True}


def test_a_search_of_a_model_times_layers_as_its_graph_has_them(
    quick: None, tmp_path: Path
) -> None:
    model, x = Attention(), torch.randn(2, 5, 16)
    result = ksopt.search(model, "60%", example_inputs=x, out=tmp_path / "a", **OPTIONS)
    assert {str(one.size): one.request.siblings for one in result.layers} == {
        "16x16": 3, "16x32": 1, "32x16": 1,
    }  # fmt: skip
    written = json.loads((tmp_path / "a" / "results.json").read_text("utf-8"))
    jsonschema.validate(written, results_json.results_schema())
    by_role = {group["role"]: group for group in written["plan"]["groups"]}
    assert (by_role["q"]["epilogue"], by_role["q"]["siblings"]) == (["bias"], 3)
    of_size = {one["request"]["dims"]: one["request"] for one in written["layers"]}
    assert of_size["16x32"]["epilogue"] == ["bias", "gelu_tanh"]
    page = (tmp_path / "a" / "report.md").read_text("utf-8")
    assert "All times are of 3 layers on one input, followed by a bias." in page
    assert "16x32: its layers are timed as in the model, followed by a bias and a GELU" in page
    # Of siblings that are timed together the effect counts each one's share.
    effect, layer = effect_of(result), result.of(Dims(16, 16))
    assert effect is not None
    assert layer is not None
    planned = next(one for one in effect.groups if one.group.role == "q")
    dense = layer.finalists[0] if planned.answer is None else planned.answer.chosen
    assert dense is not None
    assert planned.dense_us == dense.dense.median_us / 3
    assert replay(tmp_path / "a").request.layers == result.request.layers
    # Bare products are another study.
    with pytest.raises(InvalidInputError, match="epilogue"):
        ksopt.search(
            *(model, "60%"), example_inputs=x, epilogue="none", out=tmp_path / "a", **OPTIONS
        )


def test_none_asks_for_bare_products_and_a_comparison_says_so(quick: None, tmp_path: Path) -> None:
    model, x = Attention(), torch.randn(2, 5, 16)
    requested = {"example_inputs": x, "include": "up", "trials": 2, "quiet": True}
    bare = ksopt.search(model, "60%", epilogue="none", out=tmp_path / "bare", **requested)
    assert [(one.request.epilogue, one.request.siblings) for one in bare.layers] == [((), 1)]
    assert bare.request.notes == ()
    surrounded = ksopt.search(model, "60%", out=tmp_path / "surrounded", **requested)
    actual = comparison.differences({"bare": bare, "surrounded": surrounded})
    assert actual == {"epilogue": ["", "16x32: followed by a bias and a GELU (tanh)"]}


MODEL = """
import torch
from torch import nn
def build():
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
def inputs():
    return torch.ones(8, 16)
"""


@pytest.mark.parametrize(("words", "steps"), [((), ["bias", "gelu"]), (("none",), [])])
def test_the_command_line_reads_the_graph_of_a_model_with_inputs(
    quick: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    steps: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "surrounded.py").write_text(MODEL)
    model = ("--model", "surrounded:build", "--measure-model", "surrounded:inputs")
    limits = ("--budget", "60%", "--batch", "8", "--device", "cpu", "--trials", "2")
    requested = ("--epilogue", *words) if words else ()
    assert main(["search", *model, *limits, *requested, "--out", "out"]) == 0
    written = json.loads((tmp_path / "out" / "results.json").read_text("utf-8"))
    of_size = {one["request"]["dims"]: one["request"]["epilogue"] for one in written["layers"]}
    assert of_size["16x32"] == steps
    assert ("--epilogue none" in written["request"]["command"]) == bool(words)
