"""A layer searched with the operations around it: values, layouts, other structures, reports."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jsonschema
import pytest
import torch
from torch.nn import functional as F

from ksopt.cli.main import main
from ksopt.errors import InvalidInputError
from ksopt.operators.registry import operator_of
from ksopt.patterns.chain import Chain
from ksopt.search.layer_pass import LayerPass
from ksopt.search.layer_request import LayerRequest
from ksopt.search.objectives import Objective
from ksopt.search.product_check import ProductCheck, WrongResultError
from ksopt.search.report import results_json

CHAIN = Chain.parse("(1,4,2,3)*(3,2,4,1)")  # 12 -> 12


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


@pytest.mark.parametrize("layout", ["batch_first", "batch_last"])
@pytest.mark.parametrize("epilogue", [(), ("bias",), ("bias", "gelu", "residual"), ("silu",)])
@pytest.mark.parametrize("siblings", [1, 3])
def test_a_chain_and_the_dense_layer_compute_the_same_of_the_same_matrices(
    layout: str, epilogue: tuple[str, ...], siblings: int
) -> None:
    request = LayerRequest(
        "12x12", batch=5, layout=layout, epilogue=epilogue, siblings=siblings, dtype="float32"
    )
    layer, operator = LayerPass(request, drawn), operator_of(CHAIN)
    shapes = list(operator.parameter_shapes()) * siblings
    weights = [drawn(*shape) for shape in shapes]
    matrices = [
        operator.reference(torch.eye(12), weights[at : at + 2]).T
        for at in range(0, len(weights), 2)
    ]
    x = drawn(5, 12) if layout == "batch_first" else drawn(12, 5)
    y = layer.bind(operator)(weights)(x)
    torch.testing.assert_close(y, layer.bind_dense([torch.cat(matrices)])(x))
    expected = F.linear(x if layout == "batch_first" else x.T, torch.cat(matrices))
    around = layer.around
    if around.bias is not None:
        expected = expected + around.bias
    if around.activation != "none":
        expected = {"gelu": F.gelu, "silu": F.silu}[around.activation](expected)
    expected = expected if layout == "batch_first" else expected.T
    if around.residual is not None:
        expected = expected + around.residual
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("layout", ["batch_first", "batch_last"])
@pytest.mark.parametrize("epilogue", [("bias", "silu_gate", "residual"), ("gelu_tanh_gate",)])
def test_a_gate_multiplies_both_siblings(layout: str, epilogue: tuple[str, ...]) -> None:
    request = LayerRequest("12x12", batch=5, layout=layout, epilogue=epilogue, siblings=2)
    layer, operator = LayerPass(request, drawn), operator_of(CHAIN)
    weights = [drawn(*shape) for shape in list(operator.parameter_shapes()) * 2]
    matrices = [
        operator.reference(torch.eye(12), weights[at : at + 2]).T
        for at in range(0, len(weights), 2)
    ]
    x = drawn(5, 12) if layout == "batch_first" else drawn(12, 5)
    y = layer.bind(operator)(weights)(x)
    near = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4 * y.abs().max().item())
    near(y, layer.bind_dense([torch.cat(matrices)])(x))
    near(y, layer._of_operator(operator, weights)(x))
    rows = x if layout == "batch_first" else x.T
    around, biases = layer.around, [0.0, 0.0]
    if around.bias is not None:
        biases = list(around.bias.chunk(2))
    a, b = (F.linear(rows, w) + bias for w, bias in zip(matrices, biases, strict=True))
    functions = {
        "silu_gate": F.silu,
        "gelu_tanh_gate": lambda a: F.gelu(a, approximate="tanh"),
    }
    expected = functions[around.activation](a) * b
    expected = expected if layout == "batch_first" else expected.T
    if around.residual is not None:
        expected = expected + around.residual
    near(y, expected)
    outcome = Objective(request, torch.device("cpu")).measure(CHAIN)
    assert outcome.error < 1e-5


def test_another_structure_is_surrounded_by_the_same() -> None:
    request = LayerRequest("12x12", batch=5, epilogue=("bias", "relu"), siblings=2)
    layer, operator = LayerPass(request, drawn), operator_of(CHAIN)
    weights = [drawn(*shape) for shape in list(operator.parameter_shapes()) * 2]
    x = drawn(5, 12)
    torch.testing.assert_close(
        layer._of_operator(operator, weights)(x), layer.bind(operator)(weights)(x)
    )


def test_a_wrong_epilogue_is_noticed() -> None:
    request = LayerRequest("12x12", batch=5, epilogue=("bias", "gelu"))
    layer, operator = LayerPass(request, drawn), operator_of(CHAIN)
    x, weights = drawn(5, 12), [drawn(*shape) for shape in operator.parameter_shapes()]
    check = ProductCheck(operator, x, weights, request, layer)
    assert check.errors().relative < 1e-5
    check._bind = lambda weights: lambda x: operator.bind(weights, "batch_first")(x)
    with pytest.raises(WrongResultError, match="relative error"):
        check.errors()


def test_an_objective_times_all_siblings() -> None:
    request = LayerRequest("12x12", batch=5, epilogue=("bias", "gelu"), siblings=3)
    outcome = Objective(request, torch.device("cpu")).measure(CHAIN)
    assert outcome.error < 1e-5
    assert outcome.latency.median_us > 0
    assert outcome.dense.median_us > 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"epilogue": ("gelu", "relu")}, "at most one activation"),
        ({"epilogue": ("bias", "bias")}, "each step once"),
        ({"epilogue": "tanh"}, "epilogue 'tanh' is unknown: it can be bias, relu"),
        ({"epilogue": ("silu", "silu_gate"), "siblings": 2}, "at most one activation"),
        ({"epilogue": "silu_gate"}, "silu_gate multiplies the results of 2 layers .* it must be 2"),
        ({"epilogue": "silu_gate", "siblings": 3}, "and siblings is 3: it must be 2"),
        ({"siblings": 5}, "siblings 5: at most 4 layers"),
        ({"siblings": 0}, "siblings must be at least 1"),
        ({"train": True, "siblings": 2}, "train times a step of the layer alone"),
    ],
    ids=str,
)
def test_refusals(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(InvalidInputError, match=sentence):
        LayerRequest("12x12", **options)  # type: ignore[arg-type]


def test_steps_have_one_order() -> None:
    request = LayerRequest("12x12", epilogue=("residual", "gelu", "bias"))
    assert request.epilogue == ("bias", "gelu", "residual")
    assert LayerRequest.from_json(request.to_json()) == request


def test_a_search_says_what_surrounds_its_layers(
    quick: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layer = ("--dims", "16x16", "--budget", "60%", "--batch", "4", "--device", "cpu")
    around = ("--epilogue", "bias", "gelu", "--siblings", "3", "--trials", "2")
    out = tmp_path / "out"
    assert main(["search", *layer, *around, "--out", str(out)]) == 0
    sentence = "All times are of 3 layers on one input, followed by a bias and a GELU."
    assert sentence in capsys.readouterr().out
    results = json.loads((out / "results.json").read_text())
    jsonschema.validate(results, results_json.results_schema())
    request = results["request"]
    assert (request["epilogue"], request["siblings"]) == (["bias", "gelu"], 3)
    assert "--epilogue bias gelu --siblings 3" in request["command"]
    report = (out / "report.md").read_text()
    assert "3 times on one input," in report
    assert "followed by a bias and a GELU" in report
    # Another surrounding is another search.
    assert main(["search", *layer, "--trials", "2", "--out", str(out)]) == 2
