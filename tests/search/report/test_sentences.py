"""The sentences of a report are short, whatever was searched."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ksopt.measure.timing import Measurement
from ksopt.search import SearchResult
from ksopt.search.report import answers, glossary
from ksopt.search.report.sections import written

from one_layer import with_layer  # isort: skip

Search = Callable[..., SearchResult]
MOST = 20


def long_sentences(texts: list[str]) -> list[str]:
    # "1.5 times", "ksopt.convert" and "plan.json" have no end of a sentence in them.
    sentences = [part for text in texts for part in re.split(r"(?<=[.?!])\s+", text)]
    return [one for one in sentences if len(one.split()) > MOST]


def texts_of(result: SearchResult) -> list[str]:
    sections = written(result)
    texts = [text for one in sections for text in (*one.lead, *one.warnings, *one.paragraphs)] + [
        fact.detail for one in sections for fact in one.facts
    ]
    return [*texts, *answers.lead(result)]


def test_a_long_sentence_would_be_noticed() -> None:
    assert long_sentences(["One. " + "word " * MOST + "end."]) != []


def test_the_glossary_is_short() -> None:
    assert long_sentences(list(glossary.TERMS.values())) == []


@pytest.mark.parametrize("dense_us", [1e6, 1e-3, None])
def test_of_one_layer(search: Search, tmp_path: Path, dense_us: float | None) -> None:
    """Whether the chains win, lose, or are as they come."""
    file = tmp_path / "w.safetensors"
    save_file({"weight": torch.randn(64, 32)}, str(file))
    result = search(
        trials=6, budgets=("20%", "50%"), weights=str(file), families="monarch,low_rank"
    )
    assert long_sentences(texts_of(result)) == []
    if dense_us is None:
        return
    dense = Measurement(dense_us, 0.2 * dense_us, 2 * dense_us, 20)
    layer = result.layers[0]
    changed = with_layer(
        result, finalists=tuple(replace(one, dense=dense) for one in layer.finalists)
    )
    assert long_sentences(texts_of(changed)) == []


def test_of_training_and_of_what_surrounds_a_layer(search: Search, tmp_path: Path) -> None:
    assert long_sentences(texts_of(search(trials=2, train=True))) == []
    result = search(trials=2, epilogue=("bias", "gelu"), siblings=3, out=tmp_path / "a")
    assert long_sentences(texts_of(result)) == []
    result = search(trials=2, epilogue=("silu_gate",), siblings=2, out=tmp_path / "b")
    assert long_sentences(texts_of(result)) == []


def test_of_several_sizes(search: Search) -> None:
    assert long_sentences(texts_of(search(dims=("32x64", "64x32"), trials=6))) == []
