"""The layers that are not searched."""

import pytest
import torch
from torch import nn

from ksopt.optimization.selection import slight_layers

from optimization_models import Optimize  # isort: skip


def test_a_small_head_is_not_searched() -> None:
    model = nn.Sequential(nn.Linear(256, 1024), nn.Linear(1024, 256), nn.Linear(256, 10))
    slight = slight_layers(model, {"0": 128, "1": 128, "2": 128})
    assert list(slight) == ["2"]
    assert "layers of its size do 0.98% of the work of those of 256x1024" in slight["2"]


def test_the_work_of_a_size_is_that_of_all_its_layers_and_rows() -> None:
    small = [nn.Linear(32, 32) for _ in range(20)]
    model = nn.Sequential(nn.Linear(512, 512), *small)
    rows = {str(at): 64 for at in range(21)}
    assert slight_layers(model, rows) == {}
    assert "1" in slight_layers(model, rows | {"0": 64 * 8})


@pytest.mark.slow
def test_such_a_layer_stays_dense_unless_it_is_named(optimize: Optimize) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 1)).eval()
    done = optimize(model, torch.randn(16, 128), "60%")
    assert "0.78% of the work of those of 128x128" in done.dense["1"]
    assert [str(layer.size) for layer in done.search.layers] == ["128x128"]
    named = optimize(model, torch.randn(16, 128), "60%", include=["0", "1"])
    assert "of the work" not in named.dense.get("1", "")
