"""`python docs/experiments/factor_pairs.py`, on a CPU."""

import re

import pytest
import torch

import factor_pairs
from ksopt.patterns.chain import Chain

LAYER = "(1,8,4,2)*(2,4,8,1)"
CPU = torch.device("cpu")


def test_pairs_of_both_factors_race(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "cpu", "--dtype", "float32", "--layers", LAYER, "--rows", "20", "6"]
    settings = ["--candidates", "2", "--seconds", "0.01", "--activation", "relu"]
    assert factor_pairs.main([*arguments, *settings]) == 0
    text = capsys.readouterr().out
    assert "WRONG" not in text
    assert "FAILED" not in text
    for rows in (20, 6):
        times = re.findall(rf"{re.escape(LAYER)}, {rows} rows \| (\S+) then (\S+) \| ", text)
        firsts, seconds = map(set, zip(*times, strict=True))
        assert len(firsts) == len(seconds) == 2
        assert len(set(times)) == len(times) == 4
    assert len(re.findall(r"own choices [\d.]+ us, best pair [\d.]+ us", text)) == 2


def test_layers_are_the_usual_ones_or_the_named_ones() -> None:
    usual = factor_pairs.layers_of([], [])
    assert len(usual) == len(factor_pairs.LAYERS) + 4
    assert all(len(chain) == 2 for chain, _ in usual)
    assert factor_pairs.layers_of([LAYER], [3, 4]) == [
        (Chain.parse(LAYER), 3),
        (Chain.parse(LAYER), 4),
    ]
    assert {rows for _, rows in factor_pairs.layers_of([], [7])} == {7}


def test_what_is_printed_of_a_layer() -> None:
    best = factor_pairs.Result("a layer", 100.0, 90.0, "a then b", (100.0, 95.0), True)
    assert "10.0 % (a then b); again: 100.0 and 95.0 us, 5.0 %, confirmed" in str(best)
    own = factor_pairs.Result("a layer", 100.0, 100.0, "a then b", None, False)
    assert str(own).endswith("the own choices are the best")
