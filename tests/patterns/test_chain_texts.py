"""Chains by the name of a family, for a layer whose size is known."""

import pytest
import torch

import ksopt
from ksopt.errors import InvalidInputError
from ksopt.nn import KSLinear
from ksopt.patterns.chain import Chain
from ksopt.patterns.chain_texts import chain_of


@pytest.mark.parametrize(
    ("text", "size", "chain"),
    [
        ("monarch", (384, 1536), Chain.monarch(384, 1536, p=4)),
        ("monarch:8", (384, 1536), Chain.monarch(384, 1536, p=8)),
        ("monarch", (9, 15), Chain.monarch(9, 15, p=3)),  # no 4 divides both
        ("monarch", (7, 13), Chain.monarch(7, 13, p=1)),
        ("low_rank:3", (8, 6), Chain.low_rank(8, 6, rank=3)),
        ("dense", (8, 6), Chain.dense(8, 6)),
        ("square_dyadic", (16, 16), Chain.square_dyadic(16)),
        ("block_butterfly:4", (16, 16), Chain.block_butterfly(16, block=4)),
        (" (1,6,8,1) ", (8, 6), Chain.dense(8, 6)),
    ],
)
def test_a_name_is_a_chain_of_the_layer(text: str, size: tuple[int, int], chain: Chain) -> None:
    assert chain_of(text, *size) == chain


@pytest.mark.parametrize(
    ("text", "size", "words"),
    [
        ("monrach", (8, 8), "nor one of monarch"),
        ("low_rank", (8, 8), "give its rank"),
        ("dense:3", (8, 8), "'dense:3': dense has no number: leave it out"),
        ("square_dyadic", (8, 16), "for square layers"),
        (
            "monarch:3",
            (8, 8),
            "'monarch:3' is no chain for in_features=8 and out_features=8: p must divide both "
            "in_features and out_features; it can be 1, 2, 4 or 8",
        ),
        (
            "low_rank:9",
            (8, 16),
            "'low_rank:9' is no chain for in_features=8 and out_features=16: rank must be at most",
        ),
        ("square_dyadic", (12, 12), "power of two; the nearest are 8 and 16"),
        ("(1,8", (8, 8), "is not a pattern"),
    ],
)
def test_others_are_refused_in_words(text: str, size: tuple[int, int], words: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        chain_of(text, *size)
    assert words in str(refused.value)


def test_layers_plans_and_projections_take_names() -> None:
    expected = Chain.monarch(64, 512, p=4)
    assert KSLinear(64, 512, "monarch").chain == expected
    assert ksopt.Plan.of({"64x512": "monarch"}).rules[0].chains == (expected,)
    assert ksopt.project(torch.randn(512, 64), "monarch").chain == expected
    with pytest.raises(InvalidInputError, match="write the size for the key"):
        ksopt.Plan.of({"encoder.*": "monarch"})


def test_a_layer_without_a_chain_says_where_to_find_one() -> None:
    with pytest.raises(InvalidInputError, match="ksopt search 64x512"):
        KSLinear(64, 512)
