"""Queries, keys and values in compiled training: a launch each for both passes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ksopt
from ksopt.kernels import gradient_autotuner, plan_autotuner
from tests.gpu.trained_steps import kernels_of_step

pytestmark = pytest.mark.gpu

CHAIN = "(1,192,64,2)*(2,64,192,1)"
OF_KERNELS = "bfloat16_192_64_2_2_64_192"


class Attention(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (ksopt.KSLinear(384, 384, CHAIN, bias=bias) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        heads = (one(x).unflatten(-1, (6, 64)).transpose(1, 2) for one in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("bias", [True, False])
def test_a_compiled_step(monkeypatch: pytest.MonkeyPatch, bias: bool) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are for compute capability 9.0")
    monkeypatch.setenv("KSOPT_TUNE", "model")
    plan_autotuner.forget()
    gradient_autotuner.forget()
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Attention(bias).cuda().bfloat16()
    names = kernels_of_step(model, torch.randn(32, 197, 384, device="cuda").bfloat16())
    assert f"ksopt_chain_wgmma16_{OF_KERNELS}_x3_z" in names
    assert f"ksopt_input_grad_wgmma16_{OF_KERNELS}_x3" in names
    assert f"ksopt_chain_wgmma16_{OF_KERNELS}_z" not in names
