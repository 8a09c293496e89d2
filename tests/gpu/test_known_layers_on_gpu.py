"""Random layers, drawn anew each day: once known, the host library runs each without Python."""

import datetime

import pytest
import torch

from ksopt import ops
from ksopt.bench.random_subjects import draw
from ksopt.jit import host
from ksopt.kernels import host_plans, host_products
from ksopt.patterns.chain import Chain

pytestmark = pytest.mark.gpu

SHARES, COUNT = 6, 12
MOST_ELEMENTS = 2**26


def is_small(chain: Chain, rows: int) -> bool:
    return rows * max(chain.in_features, chain.out_features) <= MOST_ELEMENTS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("batch_last", [False, True])
@pytest.mark.parametrize("share", range(SHARES))
def test_layers_of_the_day(share: int, batch_last: bool, dtype: torch.dtype, monkeypatch) -> None:
    assert host.load() is None
    monkeypatch.setenv("KSOPT_TUNE", "model")
    seed = int(datetime.date.today().strftime("%Y%m%d")) + 10_000 * share
    print(f"seed {seed}")
    layers = [one for one in draw(COUNT, seed) if is_small(*one)]
    assert layers
    for chain, rows in layers:
        weights = [
            torch.nn.Parameter(torch.randn(p.weight_shape, device="cuda").to(dtype), False)
            for p in chain
        ]
        size = (chain.in_features, rows) if batch_last else (rows, chain.in_features)
        x = torch.randn(size, device="cuda").to(dtype)
        first = ops.chain(x, weights, batch_last=batch_last)
        ops.chain(x, weights, batch_last=batch_last)  # with what the first call prepared
        if len(weights) == 1:
            known = host_products.run_known(x, weights[0], batch_last)
        else:
            known = host_plans.run(x, weights, None, None, "none", batch_last, 1)
        assert known is not None, f"{chain}, {rows} rows"
        torch.testing.assert_close(known, first)
