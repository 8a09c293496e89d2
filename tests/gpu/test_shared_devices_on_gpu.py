"""Processes of pytest-xdist take the GPUs of a machine in turns."""

import os

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="needs pytest -n")
def test_a_process_sees_one_device() -> None:
    # What CUDA itself says: torch.cuda.device_count() reads the variable again.
    assert torch._C._cuda_getDeviceCount() == 1
