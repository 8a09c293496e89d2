"""A second process loads from torch's caches on disk, but the pass runs again."""

import json
import subprocess
import sys

import pytest
from short_compilation import as_users_have_it

SCRIPT = """
import json
import sys

import torch
from torch import nn
from torch._dynamo.utils import counters


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x):
        y = torch.einsum("...gi,goi->...go", x.unflatten(-1, (4, 8)), self.weight)
        return y.flatten(-2)


def compiled(weights):
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model, x = nn.Sequential(Blocks(), nn.GELU(), Blocks()), torch.randn(5, 32)
    frozen = nn.Linear(32, 32).requires_grad_(False)
    frozen.weight.copy_(torch.block_diag(*torch.ones(4, 8, 8)) if weights == "sparse" else 1.0)
    run = torch.compile(nn.Sequential(model, nn.ReLU(), frozen), backend="ksopt", fullgraph=True)
    loss = run(x).square().sum()
    loss.backward()
    gradients = [parameter.grad.norm().item() for parameter in model.parameters()]
    counts = {name: dict(counters[name]) for name in ("ksopt", "aot_autograd", "inductor")}
    return {"numbers": [loss.item(), *gradients], **counts}


print(json.dumps([compiled(weights) for weights in sys.argv[1:]]))
"""


def run(tmp_path, *weights):
    """What a process computes and counts, of a frozen layer with such weights after another."""
    environment = as_users_have_it() | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *weights],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_second_process_finds_warm_caches(tmp_path):
    (first,) = run(tmp_path, "sparse")
    second, other = run(tmp_path, "sparse", "dense")
    assert first["aot_autograd"]["autograd_cache_miss"] == 1
    assert first["aot_autograd"]["autograd_cache_saved"] == 1
    assert second["aot_autograd"]["autograd_cache_hit"] == 1
    assert second["inductor"]["fxgraph_cache_hit"] >= 1
    for actual in (first, second, other):
        assert not actual["aot_autograd"].get("autograd_cache_bypass")
    assert "autograd_cache_miss" not in second["aot_autograd"]
    assert first["ksopt"].pop("results_planned") > 0
    assert "results_planned" not in second["ksopt"]  # Inductor had it on disk
    assert first["ksopt"] == second["ksopt"]
    assert second["ksopt"]["lowered"] == 3
    assert second["numbers"] == pytest.approx(first["numbers"], rel=1e-5)
    # The same code, but a frozen weight is another: what was found in its values is not cached.
    assert other["ksopt"]["lowered"] == 2
    assert other["aot_autograd"]["autograd_cache_miss"] == 1
    assert other["numbers"][0] > 2 * first["numbers"][0]
