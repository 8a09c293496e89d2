"""Setup of every test: private caches, and which tests are slow or need a GPU."""

import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import short_compilation
from brief.changes import CHANGES
from fast_files import FAST

# The machine that runs the tests may be busy: a slow example is not a wrong one.
hypothesis.settings.register_profile("ksopt", deadline=None)
hypothesis.settings.load_profile("ksopt")

_caches: Path | None = None
_building: subprocess.Popen[bytes] | None = None


def pytest_configure(config: pytest.Config) -> None:
    """Use separate caches for the run, so that no old artifact can make a test pass."""
    global _caches, _building
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # Begun in a shell's background: processes that tests stop with Ctrl-C would ignore it too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        _take_one_gpu(config.workerinput["workerid"])
        return  # a process of pytest-xdist shares those of the process that began it
    # What is computed here is small, and more threads than cores wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Inductor's compile workers would start again for each process of a test.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    short_compilation.begin()
    # Each process of a test would compile ksopt's own sources again, which takes 0.7 s.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    _caches = Path(tempfile.mkdtemp(prefix="ksopt-tests-"))
    os.environ["KSOPT_CACHE_DIR"] = str(_caches / "ksopt")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(_caches / "inductor")
    if getattr(config.option, "numprocesses", None):
        # 20 s of compilation, for which several processes would wait: begun while they collect.
        command = [sys.executable, "-c", "from ksopt.jit import host; host.build()"]
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        _building = subprocess.Popen(command, **silent)


def _take_one_gpu(worker: str) -> None:
    """Let the processes of pytest-xdist take the machine's GPUs in turns, one each.

    Before any test module is imported: some ask whether there is a device, and then CUDA has read
    which devices are visible.
    """
    import torch

    count = torch.cuda.device_count()  # asks NVML, which does not initialise CUDA
    if count > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        devices = visible if len(visible) == count else [str(index) for index in range(count)]
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[int(worker.removeprefix("gw")) % count]


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the caches."""
    if _building is not None:
        _building.kill()
        _building.wait()
    if _caches is not None:
        shutil.rmtree(_caches, ignore_errors=True)


def pytest_collection_finish() -> None:
    """Modules and tests live as long as the process: the collector need not look at them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _forget_what_was_compiled() -> Iterator[None]:
    """What the tests of a file leave: compiled code is forgotten, modules stay for good."""
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"]._dynamo.reset()
    pytest_collection_finish()


@pytest.fixture
def deterministic() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A context manager: in its block torch's algorithms are deterministic."""

    @contextlib.contextmanager
    def are_deterministic() -> Iterator[None]:
        import torch

        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)

    return are_deterministic


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by the marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the cases of sweeps that are slow; skip tests of a GPU where there is none."""
    _mark_slow_cases(items)
    if config.rootpath / "tests" in [Path(one).resolve() for one in config.args]:
        left_out = ("slow", "gpu")
        fast = [one for one in items if not any(map(one.get_closest_marker, left_out))]
        config.stash[FAST] = {str(one.path.relative_to(config.rootpath)) for one in fast}
    _skip_without_gpu(items)


def _mark_slow_cases(items: list[pytest.Item]) -> None:
    """Mark the cases of each ``sweep`` as slow, but every twentieth."""
    sweeps = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sweep"):
            sweeps[item.nodeid.partition("[")[0]].append(item)
    for cases in sweeps.values():
        for number, item in enumerate(cases):
            if number % 20:
                item.add_marker(pytest.mark.slow)


def _skip_without_gpu(items: list[pytest.Item]) -> None:
    needing = [item for item in items if item.get_closest_marker("gpu")]
    if not needing:
        return
    import torch

    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason=f"needs a CUDA device; torch {torch.__version__} sees none")
    for item in needing:
        item.add_marker(skip)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Measurements are short, here and in every Python that the test starts."""
    from ksopt.measure import device_types

    # Before the existing entries: ksopt itself may be imported through them.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).with_name("brief")), prepend=os.pathsep)
    for path, value in CHANGES.items():
        monkeypatch.setattr(path, value)
    device_types._timer.cache_clear()
    yield
    device_types._timer.cache_clear()


@pytest.fixture
def quick(brief: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements are short, and finals need no process, which takes seconds to begin."""
    from ksopt.search import finals
    from ksopt.search.objectives import Objective

    def final_in_this_process(
        request: Any, device: Any, chains: Sequence[Any], spare: Any
    ) -> dict[str, Any]:
        return Objective(request, device).final(chains, seconds=0.1)

    monkeypatch.setattr(finals, "final", final_in_this_process)
