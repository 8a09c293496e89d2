"""``ksopt space``: correct counts, first chains, small memory, and error messages."""

import itertools
import json
import tracemalloc
from math import inf

import pytest

from ksopt.cli.main import main
from ksopt.patterns.chain import Chain
from ksopt.search.layer_request import LayerRequest
from ksopt.search.space.enumerate import Walk
from ksopt.search.space.listing import listing


def request(dims: str, budget: str = "100%", **options: object) -> LayerRequest:
    return LayerRequest(dims, budgets=(budget,), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("dims", ["8x12", "16x16", "30x7", "1x5"])
def test_the_count_is_of_every_chain(dims: str) -> None:
    requested = request(dims, min_rank=1)
    every = [
        Chain(factors)
        for count in (1, 2, 3)
        for factors in Walk(requested.size, requested.size.dense_parameters, 1).factors(count)
    ]
    actual = listing(requested, limit=10_000)
    assert (actual.total, actual.exact) == (len(every), True)
    assert sorted(actual.chains) == sorted(every)
    assert len(set(every)) == len(every)
    assert [count.chains for count in actual.counts] == [
        sum(len(chain) == factors for chain in every) for factors in (1, 2, 3)
    ]


@pytest.mark.parametrize("order", ["weights", "most-weights", "rho"])
@pytest.mark.parametrize("limit", [1, 7])
def test_the_list_is_the_beginning_of_all(order: str, limit: int) -> None:
    def key(chain: Chain) -> float:
        rho = sum(p.nnz * p.rho for p in chain) / chain.nnz
        return {"weights": chain.nnz, "most-weights": -chain.nnz, "rho": -rho}[order]

    requested = request("32x48", "60%")
    every = listing(requested, limit=100_000, order=order).chains
    first = listing(requested, limit=limit, order=order).chains
    assert len(every) > 1000
    assert list(map(key, every)) == sorted(map(key, every))
    assert first == every[:limit]


def test_a_space_too_large_is_cut_and_needs_no_memory() -> None:
    requested = request("4096x11008", "25%")
    tracemalloc.start()
    actual = listing(requested, limit=5, visits=20_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert not actual.exact
    assert actual.counts[1].exact
    assert not actual.counts[2].exact
    assert actual.counts[2].chains > 5_000
    assert peak < 10e6
    assert "more than" in actual.sentence
    assert len(actual.chains) == 5


def test_the_command_prints_the_count_and_the_chains(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["space", "--dims", "12x8", "--budget", "60%", "--factors", "2"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "in_features=12, out_features=8: 2 chains of at most 2 factors" in printed
    assert "(1,4,4,2)*(4,2,3,1)" in printed
    assert main([*words, "--json"]) == 0
    actual = json.loads(capsys.readouterr().out)
    assert list(actual) == [
        "schema",
        "in_features",
        "out_features",
        "parameters",
        "min_rank",
        "families",
        "block_sizes",
        "chainable",
        "aligned",
        "dtype",
        "layout",
        "train",
        "count",
        "exact",
        "counts",
        "order",
        "chains",
    ]
    assert (actual["schema"], actual["count"], actual["exact"]) == ("ksopt.space/1", 2, True)
    assert actual["chains"][0] == {
        "chain": "(1,4,4,2)*(4,2,3,1)",
        "patterns": [[1, 4, 4, 2], [4, 2, 3, 1]],
        "parameters": 56,
        "share_of_dense": 56 / 96,
        "rho": pytest.approx((32 * 0.5 + 24 * 5 / 6) / 56),
        "rank_bound": 8,
    }
    assert main([*words[:3], "--budget", "5%", "--limit", "0"]) == 0
    assert ": 0 chains" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--limit", "-1"], "limit must be at least 0"),
        (["--limit", "1000000"], "at most 100,000 chains"),
        (["--order", "size"], "order 'size' is unknown"),
        (["--visits", "0"], "visits must be at least 1"),
        (["--factors", "4"], "at most 3"),
        (["--budget", "200%"], "at most 100%"),
        (["--min-rank", "9"], "at most min(in, out) = 8"),
    ],
)
def test_misuse_is_a_sentence(
    capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["space", "--dims", "12x8", *options]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


def test_chains_that_are_alike_share_a_line() -> None:
    listed = listing(request("12x8", "60%", max_factors=2))
    assert [str(chain) for chain in listed.chains] == [
        "(1,4,4,2)*(4,2,3,1)",
        "(2,4,4,1)*(1,2,3,4)",
    ]
    assert [row[:3] for row in listed.table().rows] == [("(1,4,4,2)*(4,2,3,1)", "1", "56")]


def test_lists_are_stable() -> None:
    requested = request("24x24", "80%")
    lists = [listing(requested, limit=limit).chains for limit in (3, 50, 3)]
    assert lists[0] == lists[2] == lists[1][:3]
    for left, right in itertools.pairwise(lists[1]):
        assert left.nnz <= right.nnz < inf
