"""The cost model's ranking of the chains that were measured on an H200 (docs/data)."""

import csv
from pathlib import Path

import pytest

from ksopt.kernels import registry
from ksopt.kernels.families import expanded_bmm, mma16, wgmma16
from ksopt.kernels.families.base import families
from ksopt.kernels.problem import DeviceSpec, Epilogue
from ksopt.patterns.chain import Chain, Pattern
from ksopt.search.samplers.cost_model import CostModel
from regret.tables import spearman

DATA = Path(__file__).parents[3] / "docs" / "data" / "search-regret-chains.csv"
H200 = DeviceSpec((9, 0), 132, 227 * 1024)
ROWS = [
    (row["dims"], row["budget"], row["chain"], float(row["latency_us"]) / float(row["dense_us"]))
    for row in csv.DictReader(DATA.open(encoding="utf-8"))
    if row["stage"] == "uniform" and row["latency_us"]
]


@pytest.mark.sweep
@pytest.mark.parametrize("dims", sorted({dims for dims, *_ in ROWS}))
def test_chains_drawn_uniformly_are_ranked_as_they_were_measured(
    dims: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spearman's coefficient is 0.9 or more for the size and in each of its budgets."""
    # They were measured before some families existed, which make some chains twice as fast, and
    # when matrices with zeros were tried of at most 16 times a weight, and tiles computed no
    # outputs that are none of a factor's.
    newer = ("wgmma16_streamed", "gather_mma", "gather_mma_packed", "lane_fma")
    then = tuple(family for family in families() if family.name not in newer)
    monkeypatch.setattr(registry, "families", lambda: then)
    monkeypatch.setattr(expanded_bmm, "_MOST_TIMES", 16)
    for family in (mma16, wgmma16):
        monkeypatch.setattr(family, "may_cover", lambda b, outputs: b % outputs == 0)
    monkeypatch.setattr(registry, "_fitting", registry._fitting.__wrapped__)  # without a cache
    model = CostModel(H200, "bfloat16", 8192, False)
    times: dict[Pattern, float | None] = {}

    def predicted(text: str) -> float:
        total = 0.0
        for pattern in Chain.parse(text):
            if pattern not in times:
                times[pattern] = model.predicted_us(Chain((pattern,)))
            us = times[pattern]
            assert us is not None
            total += us
        return total

    pairs = [(budget, predicted(text), ratio) for size, budget, text, ratio in ROWS if size == dims]
    assert len(pairs) > 180
    for chosen in ("10%", "25%", "50%", None):
        actual = spearman([(us, ratio) for budget, us, ratio in pairs if chosen in (None, budget)])
        assert actual is not None
        assert actual >= 0.9, (chosen, actual)


def test_a_plan_of_one_launch_is_predicted_with_what_surrounds_it() -> None:
    chain = Chain.parse("(1,192,48,2)*(2,48,192,1)")
    surrounded = CostModel(
        H200, "bfloat16", 25_088, False, after=Epilogue(bias=True, activation="gelu"), siblings=3
    )
    whole, apart = surrounded.whole_us(chain), surrounded.apart_us(chain)
    assert whole is not None
    assert apart is not None
    assert surrounded.predicted_us(chain) == whole < apart
    alone = CostModel(H200, "bfloat16", 25_088, False).apart_us(chain)
    assert alone is not None
    assert apart > 3 * alone
    # No kernel takes a whole chain in float32.
    exact = CostModel(H200, "float32", 25_088, False)
    assert exact.whole_us(chain) is None
    assert exact.predicted_us(chain) == exact.apart_us(chain)
