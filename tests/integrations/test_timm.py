"""timm's models are converted by one line."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("timm_models.py")


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stderr}\n`make test` installs timm into .venv/timm"
    return json.loads(done.stdout)


def test_a_vision_transformer_becomes_chains(models: dict[str, Any]) -> None:
    vit = models["vit_tiny_patch16_224"]
    layers = ["attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"]
    assert vit["converted"] == [f"blocks.0.{name}" for name in layers]
    assert vit["shape"] == [2, 10]


def test_a_hierarchical_transformer_becomes_chains(models: dict[str, Any]) -> None:
    swin = models["swin_tiny_patch4_window7_224"]
    assert len(swin["converted"]) == 9  # all but the head
    assert set(swin["converted"]) < set(swin["called"])
    assert swin["shape"] == [2, 10]


def test_a_layer_whose_weight_is_read_is_seen_as_such(models: dict[str, Any]) -> None:
    beit = models["beit_base_patch16_224"]
    assert "blocks.0.attn.qkv" not in beit["called"]
    assert "blocks.0.attn.proj" in beit["converted"]
    assert beit["shape"] == [2, 10]
