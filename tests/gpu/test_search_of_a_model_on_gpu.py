"""A search of a model on a GPU: its layers are timed with what surrounds them in its graph."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ksopt

pytestmark = pytest.mark.gpu


class Block(nn.Module):
    """Attention and an MLP, of a width whose chains one launch computes."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            one(x).unflatten(-1, (4, -1)).transpose(1, 2) for one in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(x)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layers_are_timed_as_the_graph_has_them(dtype: torch.dtype, tmp_path: Path) -> None:
    model = Block().to("cuda", dtype)
    x = torch.randn(4, 130, 256, device="cuda", dtype=dtype)
    result = ksopt.search(
        *(model, "50%"), example_inputs=x, trials=9, out=tmp_path / "out", quiet=True
    )
    timed = {str(one.size): (one.request.epilogue, one.request.siblings) for one in result.layers}
    assert timed == {
        "256x256": (("bias",), 3),
        "256x1024": (("bias", "gelu"), 1),
        "1024x256": (("bias", "residual"), 1),
    }
    assert result.request.batch == 520
    states = [trial.state for one in result.layers for trial in one.trials]
    assert "failed" not in states  # each was checked against float64, with what surrounds it
