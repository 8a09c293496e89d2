"""The description of a template in families/chain_mma.py: support, tiles, predicted times."""

import csv
import statistics
from pathlib import Path

from checks import H200

from ksopt.bench import random_subjects
from ksopt.kernels.families.base import family_of
from ksopt.kernels.families.common.chain_mma_tile import Config
from ksopt.kernels.problem import SHARED_LIMIT, Epilogue, Problem, SecondLayer
from ksopt.patterns.chain import Chain

family = family_of("chain_mma")
MEASURED = Path(__file__).parents[3] / "docs" / "data" / "chain-mma-h200.csv"


def measured():
    """Time over prediction of each tile that was timed, with the random chains' empty epilogue."""
    ratios = []
    with MEASURED.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            if not row["bm"]:
                continue
            fields = (int(row[name]) for name in ("bm", "warps", "mt", "nt", "groups", "blocks"))
            last = row["layout"] == "batch_last"
            problem = Problem(Chain.parse(row["chain"]), row["dtype"], last)
            us = family.predicted_us(problem, Config(*fields), int(row["rows"]), H200)
            ratios.append(float(row["us"]) / us)
    return sorted(ratios)


def test_times_are_predicted_nearly_as_they_were_measured():
    ratios = measured()
    assert len(ratios) > 150
    tenth = len(ratios) // 10
    assert 0.84 <= ratios[tenth] <= ratios[-tenth] <= 1.2
    assert 0.97 <= statistics.median(ratios) <= 1.03


def test_every_tile_of_random_chains_fits():
    tried = 0
    for chain, _ in random_subjects.draw(40, seed=12):
        problem = Problem(chain, "bfloat16", False, epilogue=Epilogue(True, "gelu"))
        if family.unsupported_reason(problem, H200) is not None:
            continue
        for tile in family.configs(problem, H200):
            stages = family.stages(problem, tile)
            assert tile.shared_bytes(stages) * tile.blocks <= SHARED_LIMIT
            assert all(pattern.a % tile.groups == 0 for pattern in chain)
            assert tile.bm % (16 * tile.mt) == 0
            tried += 1
    assert tried > 500


def test_what_it_leaves_to_others():
    def reason(text, **what):
        return family.unsupported_reason(Problem(Chain.parse(text), "float32", False, **what), H200)

    two = "(1,32,48,2)*(2,48,32,1)"
    assert reason(two) is None
    assert "other kernels" in reason("(1,32,48,2)")
    assert reason("(1,32,48,2)", epilogue=Epilogue(True)) is None
    assert reason(two, siblings=4) is None
    assert "at most 4 siblings" in reason(two, siblings=5)
    assert "36 bytes" in reason("(1,3,48,3)*(3,48,32,1)", siblings=2)
    assert "at most 4 factors" in reason("*".join(["(1,4,4,1)"] * 5))
    assert "shared memory" in reason("(1,64,96,96)*(96,96,64,1)")
    second = SecondLayer(Chain.parse("(1,48,32,1)"))
    assert "a launch each" in reason("(1,32,48,1)", second=second)
    tf32 = Problem(Chain.parse("(1,32,48,1)"), "float32", False, exact=False, second=second)
    assert family.unsupported_reason(tf32, H200) is None
