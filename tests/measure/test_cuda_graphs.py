"""The number of calls in the graphs of ``--graph``."""

import types

import pytest
import torch

from ksopt.measure import cuda_graphs

MIB = 1 << 20


@pytest.mark.parametrize(
    ("weights", "copies"),
    [
        (1, 256),  # bytes: L2 is not filled, but nothing is read twice without being emptied
        (4 * MIB, 120),  # eight times 60 MiB
        (90 * MIB, 32),
        (256 * MIB, 16),  # 4 GiB
        (2048 * MIB, 8),
    ],
)
def test_the_copies_fill_l2_eight_times(monkeypatch, weights, copies):
    h200 = types.SimpleNamespace(L2_cache_size=60 * MIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h200)
    assert cuda_graphs.copies(weights, torch.device("cuda")) == copies
