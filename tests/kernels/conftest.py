"""The emulator, for tests that run device code on the CPU."""

import os
import sys

import pytest
import torch
from cuda_emulator import Emulator

from ksopt import settings
from ksopt.errors import UnavailableError
from ksopt.jit import host


@pytest.fixture(autouse=True)
def one_thread():
    """The references here are tiny: PyTorch's other threads would only keep a core busy waiting."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def emulator(tmp_path_factory):
    if not sys.platform.startswith("linux"):
        pytest.skip(f"the emulator of device code needs Linux, and this is {sys.platform}")
    try:
        host.compiler_version(settings.cxx_compiler())
    except UnavailableError as error:
        pytest.skip(f"device code cannot be emulated: {error}")
    return Emulator(tmp_path_factory.mktemp("emulator"), jobs=os.cpu_count() or 1)
