"""Searches limited to some chains: their candidates, reports, studies and errors."""

import json
import shlex
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ksopt.cli.main import _parser, main
from ksopt.errors import InvalidInputError
from ksopt.patterns.chain import Chain
from ksopt.search import (
    LayerRequest,
    SearchRequest,
    SearchResult,
    layers_of_model,
    replay,
    run_search,
)
from ksopt.search.space import space as spaces
from ksopt.search.space.listing import listing
from ksopt.search.space.named_families import families
from ksopt.search.space.smallest import no_chain
from ksopt.search.space.space import build
from ksopt.system import option_fields

from layer_models import tiny  # isort: skip

Search = Callable[..., SearchResult]
LIMITS: dict[str, Any] = {"block_sizes": "multiple:4", "chainable": True, "aligned": True}


def keeps_to(request: LayerRequest, chain: Chain) -> bool:
    sizes = [size for pattern in chain for size in (pattern.b, pattern.c)]
    return (
        chain.is_chainable
        and all(size % 4 == 0 for size in sizes)
        and all(p.b % 8 == 0 and p.c * p.d % 4 == 0 for p in chain)
        and request.size.in_features == chain.in_features
    )


def test_counts_are_exact_and_lists_are_of_what_was_counted() -> None:
    request = LayerRequest("48x32", budgets=("100%",), min_rank=16, **LIMITS)
    free = LayerRequest("48x32", budgets=("100%",), min_rank=16)
    every = listing(free, limit=100_000, visits=10**7)
    actual = listing(request, limit=100_000)
    assert every.exact
    assert actual.exact
    assert set(actual.chains) == {chain for chain in every.chains if keeps_to(request, chain)}
    assert actual.total == len(actual.chains) > 10
    assert "with every b and c a multiple of 4, chainable, aligned (b is a mul" in actual.sentence


@pytest.mark.slow
def test_a_vast_space_is_cut_early_and_needs_no_memory() -> None:
    """Without limits so many choices count two factors only."""
    request = LayerRequest("4096x16384", budgets=("25%",), block_sizes="64,128")
    tracemalloc.start()
    actual = listing(request, limit=5, visits=100_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert actual.exact
    assert actual.counts[2].chains > 0
    assert not listing(replace(request, block_sizes=None), limit=5, visits=100_000).exact
    assert peak < 10e6


def test_random_descents_keep_to_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spaces, "_MOST_VISITS", 100)
    monkeypatch.setattr(spaces, "_MOST_PER_STRATUM", 40)
    request = LayerRequest("96x192", budgets=("25%", "50%"), **LIMITS)
    space = build(request)
    assert not space.exact
    assert len(space.candidates) > 40
    assert all(keeps_to(request, chain) for chain in space.candidates)
    assert {len(chain) for chain in space.candidates} == {2, 3}


def test_named_families_come_though_they_could_be_merged() -> None:
    request = LayerRequest(
        "64x64", budgets=("100%",), families="monarch,block_butterfly", min_use=0.0
    )
    assert [str(chain) for chain in build(request).candidates] == [
        "(1,8,8,8)*(8,8,8,1)",
        "(1,16,16,4)*(4,16,16,1)",
        "(1,16,16,4)*(2,16,16,2)*(4,16,16,1)",
        "(1,32,32,2)*(2,32,32,1)",
        "(1,64,64,1)",
    ]
    names = {name for name, _ in families(request)}
    assert names == {"Monarch", "block butterfly", "dense"}  # the last is a block butterfly too
    # The mirrored order is no member, by the definition.
    assert all(chain[0].a == 1 for _, chain in families(request))


def test_low_rank_is_of_every_rank_that_fits() -> None:
    request = LayerRequest(
        "24x40", budgets=("50%",), families=("low_rank",), min_rank=3, min_use=0.0
    )
    assert [chain.rank_bound for chain in build(request).candidates] == [3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"block_sizes": "5"},
            "no chain of at most 3 factors and rank bound 64, with every b and c 5, exists for "
            "dims 64x64, whatever the budget. Without block_sizes there is (1,4,4,16)*(4,4,4,4)*"
            "(16,4,4,1) with 768 weights (18.75% of the dense layer)",
        ),
        (
            {"families": "butterfly"},
            "whatever the budget; square_dyadic has 6 factors there, and a search takes at most 3. "
            "Without families there is",
        ),
        ({"families": "low_rank"}, "; with min_rank 1 there is (1,64,1,1)*(1,1,64,1) with 128 w"),
        (
            {"families": "square_dyadic", "chainable": True, "block_sizes": "5"},
            "Not one of these alone helps: without families, without block_sizes, without "
            "chainable=True, with min_rank 1",
        ),
        (
            {"families": "block_butterfly", "budgets": ("50%",)},
            "of block_butterfly, has so few weights for dims 64x64; the smallest budget that works "
            "is 3,072 weights (75% of the dense layer), the chain (1,16,16,4)*(2,16,16,2)*"
            "(4,16,16,1). Without families there is (1,4,4,16)",
        ),
        (
            {"budgets": ("1%",), "chainable": True},
            "the chain (1,4,4,16)*(4,4,4,4)*(16,4,4,1). A smaller min_rank allows smaller chains",
        ),
        (
            {"block_sizes": "4", "max_factors": 2},
            "with max_factors 3 there is (1,4,4,16)*(4,4,4,4)*(16,4,4,1)",
        ),
    ],
)
def test_what_leaves_nothing_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        build(LayerRequest("64x64", **options))
    assert message in str(refused.value)


def test_aligned_is_of_dtype_layout_and_direction() -> None:
    def chains(**options: Any) -> set[Chain]:
        requested = {"budgets": ("50%",), "min_use": 0.0, "max_factors": 2, **options}
        return set(build(LayerRequest("96x96", min_rank=24, aligned=True, **requested)).candidates)

    forward = chains(dtype="fp16")
    assert chains(dtype="fp16", train=True) < forward < chains(dtype="fp32")
    last = chains(dtype="fp16", layout="batch_last")
    assert last
    assert all(p.b % 16 == p.c % 16 == 0 for chain in last for p in chain)
    with pytest.raises(InvalidInputError, match=r"whatever the budget\. Without aligned=True"):
        build(LayerRequest("7x13", budgets=("100%",), aligned=True))


def test_a_limited_search_says_so_everywhere(search: Search, tmp_path: Path) -> None:
    result = search(trials=3, families="monarch,deformable_butterfly", **LIMITS)
    assert all(
        keeps_to(result.layers[0].request, trial.facts.chain) for trial in result.layers[0].trials
    )
    words = "--families monarch,deformable_butterfly --block-sizes multiple:4 --chainable --aligned"
    assert words in result.request.command
    parsed = _parser().parse_args(shlex.split(result.request.command)[1:])
    again = SearchRequest(parsed.dims, **option_fields.values(SearchRequest, parsed))
    assert replace(again, min_rank=None) == result.request
    value = json.loads((result.folder / "results.json").read_text())
    assert {key: value["request"][key] for key in ("families", *LIMITS)} == {
        "families": ["monarch", "deformable_butterfly"],
        **LIMITS,
    }
    sentence = (
        "The search was limited to chains of monarch or deformable_butterfly, with every b and c "
        "a multiple of 4, chainable, aligned (b is a multiple of 8, c\\*d of 4, and d of 4 or one "
        "of 1, 2, 3, 6)."
    )
    page = (result.folder / "report.md").read_text()
    assert sentence.replace("\\", "") in page.replace("\\", "")
    replayed = replay(str(result.folder), out=tmp_path / "again")
    assert replayed.layers[0].request == result.layers[0].request
    assert replayed.request.command == result.request.command.replace(
        str(result.folder), str(result.request.out)
    )


def test_a_study_is_of_one_set_of_limits(search: Search) -> None:
    any_size: dict[str, Any] = {"min_rank": 8, "min_use": 0.0, "chainable": True}
    search(trials=2, families="low_rank,monarch", **any_size)
    # The same in other words goes on.
    assert len(search(trials=3, families=["monarch", "low_rank"], **any_size).layers[0].trials) == 3
    with pytest.raises(InvalidInputError) as refused:
        search(trials=3, chainable=True, block_sizes="8,4")
    assert str(refused.value) == (
        "the study to resume is limited to other chains (families low_rank,monarch there and any "
        "here, block sizes any there and 4,8 here): its answer would not be of those that are "
        "asked for; another --out folder, --storage or --study starts a new study"
    )
    with pytest.raises(InvalidInputError, match=r"measured something else .*batch 16 there and 8"):
        search(trials=3, batch=8)


@pytest.mark.slow
def test_several_sizes_are_limited_alike(quick: None, tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch": 16, "device": "cpu", "budgets": ("60%",), "trials": 4}
    request = SearchRequest(("32x64", "30x50"), out=tmp_path, **options, **LIMITS)
    result = run_search(request)
    (one,) = result.layers
    assert all(keeps_to(one.request, trial.facts.chain) for trial in one.trials)
    ((dims, why),) = result.unmet.items()
    assert str(dims) == "30x50"
    assert "exists for dims 30x50, whatever the budget" in why
    assert "--block-sizes multiple:4 --chainable --aligned" in result.request.command
    again = replay(str(tmp_path))
    assert again.request.command == result.request.command
    with pytest.raises(InvalidInputError, match="chainable True there and False here"):
        run_search(SearchRequest(("32x64", "30x50"), out=tmp_path, **options))
    with pytest.raises(InvalidInputError, match="dims 13x17, whatever the budget"):
        run_search(SearchRequest(("13x17", "7x13"), out=tmp_path / "b", **options, **LIMITS))


def test_a_models_layers_are_limited_alike(quick: None, tmp_path: Path) -> None:
    request = SearchRequest(
        layers_of_model(tiny()), batch=16, device="cpu", trials=8, families="monarch", out=tmp_path
    )
    result = run_search(request)
    chains = [trial.facts.chain for one in result.layers for trial in one.trials]
    assert chains
    assert all(
        chain == Chain.monarch(chain.in_features, chain.out_features, chain[1].a)
        for chain in chains
    )


@pytest.mark.parametrize("command", ["search", "space"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--families", "toeplitz"], "--families 'toeplitz': there is no such family; there are"),
        (["--families", ""], "--families '': there is no such family"),
        (["--families", "monarch,,"], "there is no such family"),
        (["--block-sizes", "0"], "--block-sizes '0': write the b and c that are allowed"),
        (["--block-sizes", "16-8"], "--block-sizes '16-8': the range is empty"),
        (["--block-sizes", "even"], "(16,32,64), a range (16-256) or multiples (multiple:16)"),
        (["--dtype", "int8"], "dtype 'int8' is unknown"),
        (["--layout", "nchw"], "layout 'nchw' is unknown"),
    ],
)
def test_misuse_is_a_sentence(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([command, "--dims", "16x16", *words]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""
    assert list(tmp_path.iterdir()) == []


def test_an_empty_space_names_the_options_as_they_are_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--dims", "16x16", "--chainable", "--aligned", "--block-sizes", "5"]
    out = tmp_path / "out"
    assert main(["search", *words, "--device", "cpu", "--out", str(out)]) == 2
    message = "Without --block-sizes there is"
    assert message in capsys.readouterr().err
    assert not out.exists()
    assert main(["space", *words]) == 0
    printed = capsys.readouterr().out
    assert ": 0 chains of at most 3 factors" in printed
    assert message in printed


def test_the_space_of_a_search_is_what_space_counts(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--dims", "64x96", "--budget", "50%", "--aligned", "--dtype", "fp16", "--train"]
    assert main(["space", *words, "--json"]) == 0
    actual = json.loads(capsys.readouterr().out)
    request = LayerRequest("64x96", budgets=("50%",), aligned=True, dtype="fp16", train=True)
    assert actual["count"] == build(request).count > 0
    assert (actual["aligned"], actual["dtype"], actual["train"]) == (True, "float16", True)


def test_a_hopeless_request_is_answered_fast() -> None:
    request = LayerRequest("4096x128256", block_sizes="7", aligned=True)
    assert "Without block_sizes there is" in no_chain(request)
