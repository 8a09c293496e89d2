"""Whole training steps, the optimizer's too, in one CUDA graph that the user records."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ksopt

pytestmark = pytest.mark.gpu


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = ksopt.KSLinear(384, 768, "(1,384,96,2)*(2,96,192,1)")
        self.down = ksopt.KSLinear(768, 384, "(1,192,96,2)*(2,96,384,1)")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


@pytest.mark.parametrize("rows", [64, 4096])
@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_recorded_step_trains(
    rows: int, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replays read the weights that the replay before them has updated."""
    monkeypatch.setenv("KSOPT_TUNE", "model")
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Block().cuda().bfloat16()
    twin = copy.deepcopy(model).double()
    batches = [torch.randn(rows, 384, device="cuda").bfloat16() for _ in range(6)]
    x = batches[0].clone()
    run = torch.compile(model, backend="ksopt") if is_compiled else model
    optimizer, of_twin = (torch.optim.SGD(one.parameters(), lr=4.0) for one in (model, twin))

    def step(
        function: Callable[[Tensor], Tensor], of_step: torch.optim.Optimizer, x: Tensor
    ) -> Tensor:
        of_step.zero_grad(set_to_none=True)
        loss = (function(x) - 1).square().mean()
        loss.backward()
        of_step.step()
        return loss

    before = copy.deepcopy(model.state_dict())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(run, optimizer, x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(run, optimizer, x)
    with torch.no_grad():  # as if nothing had been trained
        for name, one in model.state_dict().items():
            one.copy_(before[name])
    losses = []
    for batch in batches:
        x.copy_(batch)
        graph.replay()
        losses.append(loss.item())
    truth = [step(twin, of_twin, batch.double()).item() for batch in batches]
    assert truth[-1] < 0.9 * truth[0]
    assert losses == pytest.approx(truth, rel=0.05)
