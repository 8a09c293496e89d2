"""Random patterns and chains: their distribution, and correct products on a CPU."""

import os
from collections import Counter

import pytest
import torch

from ksopt import ks_linear
from ksopt.bench.random_subjects import draw
from ksopt.reference import chain_reference

MOST_ELEMENTS = 2**19
"""Of an input or an output here; more rows than that are cut off."""


def test_the_draw_is_wide():
    drawn = draw(2000, seed=0)
    chains = [chain for chain, _ in drawn]
    assert 0.2 < sum(len(chain) == 2 for chain in chains) / len(chains) < 0.4
    patterns = [pattern for chain in chains for pattern in chain]
    for name, least, most in (("a", 1, 128), ("b", 1, 1000), ("c", 1, 1000), ("d", 1, 2000)):
        values = [getattr(pattern, name) for pattern in patterns]
        assert min(values) == least
        assert max(values) >= most
        assert len(set(values)) >= 40
    rows = Counter(len(str(rows)) for _, rows in drawn)
    assert all(rows[digits] > 50 for digits in range(1, 6))
    assert all(chain.in_features <= 65_536 and chain.out_features <= 65_536 for chain in chains)


def test_a_seed_gives_the_same_subjects_again():
    assert draw(50, seed=3) == draw(80, seed=3)[:50]
    assert draw(50, seed=3) != draw(50, seed=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["batch_first", "batch_last"])
def test_what_is_drawn_is_multiplied_rightly(layout, dtype):
    """Anew each time: the seed is printed, and pytest shows it of a failure."""
    seed = int.from_bytes(os.urandom(4), "big")
    print(f"seed {seed}")
    last = layout == "batch_last"
    for chain, rows in draw(6, seed):
        widest = max(max(one.in_features, one.out_features) for one in chain)
        rows = max(1, min(rows, MOST_ELEMENTS // widest))
        torch.manual_seed(0)
        x = torch.randn((chain.in_features, rows) if last else (rows, chain.in_features)).to(dtype)
        weights = [(torch.randn(one.weight_shape) / one.c**0.5).to(dtype) for one in chain]
        y = ks_linear(x, weights, layout=layout)
        exact = chain_reference(x.double(), [one.double() for one in weights], layout)
        theirs = chain_reference(x, weights, layout)
        mine, allowed = ((one.double() - exact).norm() for one in (y, theirs))
        assert mine <= 2 * allowed + 1e-6 * exact.norm(), (str(chain), rows, mine, allowed)
