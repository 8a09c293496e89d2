"""The models of these tests are modules of this folder; their random numbers are fixed."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
