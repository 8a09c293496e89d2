"""A request's texts become numbers, or the refusal is a sentence."""

import json

import pytest

from ksopt.errors import InvalidInputError
from ksopt.search import Budget, Dims, LayerRequest, SearchRequest

DIMS = Dims(768, 3072)


@pytest.mark.parametrize("text", ["768x3072", "768X3072", " 768 x 3072 ", "768×3072"])
def test_dims(text: str) -> None:
    assert Dims.parse(text) == DIMS
    assert str(DIMS) == "768x3072"


@pytest.mark.parametrize(
    "text", ["", "768", "x", "768x", "axb", "768x-1", "7.5x3", "0x8", "768x3072x2"]
)
def test_malformed_dims(text: str) -> None:
    with pytest.raises(InvalidInputError, match=r"^dims "):
        SearchRequest(text)


@pytest.mark.parametrize(
    ("text", "parameters"),
    [
        ("25%", 589_824),
        ("0.25", 589_824),
        (".25", 589_824),
        ("100%", 2_359_296),
        ("1.0", 2_359_296),
        ("600k", 600_000),
        ("0.6M", 600_000),
        ("600000", 600_000),
        ("2.3m", 2_300_000),
        ("1", 1),
        ("0.1%", 2_359),
    ],
)
def test_budgets(text: str, parameters: int) -> None:
    assert Budget.parse(text, DIMS).parameters == parameters


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0", "allows no weights"),
        ("0%", "allows no weights"),
        ("0.0", "allows no weights"),
        ("300%", "give at most 100%"),
        ("3M", "give at most 100%"),
        ("9" * 400 + "%", "give at most 100%"),
        ("9" * 400 + "k", "give at most 100%"),
        ("1.5", "at most 1.0"),
        ("-5%", "write a share"),
        ("lots", "write a share"),
        ("", "write a share"),
        ("25%%", "write a share"),
        ("nan", "write a share"),
        ("1e3", "write a share"),
        ("0.00000001%", "less than one weight"),
    ],
)
def test_impossible_budgets(text: str, words: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"^budget.*{words}"):
        Budget.parse(text, DIMS)


def test_no_budget_is_the_ladder_and_steps_rise_once_each() -> None:
    assert [step.text for step in LayerRequest(DIMS, budgets=()).steps] == ["10%", "25%", "50%"]
    steps = LayerRequest(DIMS, budgets=("50%", "0.25", "25%")).steps
    assert [step.parameters for step in steps] == [589_824, 1_179_648]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "int8"}, "dtype 'int8' is unknown"),
        ({"layout": "nchw"}, "layout 'nchw' is unknown"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"trials": 0}, "trials must be at least 1"),
        ({"max_factors": 4}, "at most 3"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"seed": 2**32}, r"seed 4294967296: give a whole number from 0 to 4294967295"),
        ({"min_rank": 769}, "at most min\\(in, out\\) = 768"),
        ({"min_use": 1.5}, "from 0 to 1"),
        ({"timeout_s": 0.0}, "more than 0"),
        ({"study": " "}, "give the study a name"),
    ],
)
def test_other_misuse(options: dict, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        SearchRequest(DIMS, **options)


def test_short_dtype_names() -> None:
    assert [SearchRequest(DIMS, dtype=name).dtype for name in ("fp16", "bf16", "fp32")] == [
        "float16",
        "bfloat16",
        "float32",
    ]


def test_one_layer_is_a_list_of_one() -> None:
    one = SearchRequest("64x64", budgets=("25%", "0.25"), min_rank=16, trials=9)
    assert one == SearchRequest([Dims(64, 64)], budgets=("25%", "0.25"), min_rank=16, trials=9)
    (layer,) = one.layers
    assert layer == LayerRequest("64x64", budgets=("25%", "0.25"), min_rank=16, trials=9)
    assert SearchRequest.of_layer(layer).layers[0].steps == layer.steps
    assert SearchRequest.from_json(json.loads(json.dumps(one.to_json()))) == one
    assert LayerRequest.from_json(json.loads(json.dumps(layer.to_json()))).steps == layer.steps
