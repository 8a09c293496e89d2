"""The emulator, for tests that run device code on the CPU."""

import os
import sys

import pytest
import torch
from built_once import built_once
from cuda_emulator import Emulator, compile_runtime, precompile_headers

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
    runtime = built_once("runtime.o", compile_runtime)
    headers = built_once("headers", precompile_headers)
    # Tests that run side by side share the cores.
    jobs = (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return Emulator(tmp_path_factory.mktemp("emulator"), runtime, headers, max(jobs, 1))
