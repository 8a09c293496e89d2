"""Models of chains are trained by two processes as by one: DDP, FSDP2, and what goes with them."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import trained_by_two

CASES = {
    "ddp": {"by": "ddp"},
    "ddp compiled": {"by": "ddp", "compiled": True},
    "ddp compiled, accumulated": {"by": "ddp", "compiled": True, "accumulated": True},
    "ddp compiled, checkpointed": {"by": "ddp", "compiled": True, "checkpointed": True},
    "fsdp": {"by": "fsdp"},
    "fsdp compiled": {"by": "fsdp", "compiled": True},
    "fsdp compiled, accumulated": {"by": "fsdp", "compiled": True, "accumulated": True},
    "fsdp compiled, checkpointed": {"by": "fsdp", "compiled": True, "checkpointed": True},
    "fsdp compiled, bfloat16": {"by": "fsdp", "compiled": True, "bfloat16": True},
}
QUICK = ("fsdp",)

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="this build of torch has no torch.distributed"
)


def by_one() -> dict[str, torch.Tensor]:
    """The weights that one process trains on all rows, without ksopt's backend."""
    model = trained_by_two.Model()
    optimizer = trained_by_two.optimizer_of(model.parameters())
    trained_by_two.train(
        model, optimizer, [trained_by_two.rows()], lambda wait: contextlib.nullcontext()
    )
    return model.state_dict()


def by_two(
    folder: Path, cases: dict[str, dict[str, object]], device: str = "cpu"
) -> dict[str, dict[str, object]]:
    """What two processes train. Once more where they fail: gloo loses one of them now and then."""
    code, printed = together(folder, "first", cases, device)
    if code != 0:
        print(printed)
        code, printed = together(folder, "second", cases, device)
    assert code == 0, printed
    return torch.load(folder / "trained.pt", weights_only=True)


def together(
    folder: Path, store: str, cases: dict[str, dict[str, object]], device: str
) -> tuple[int, str]:
    """Run both processes: the exit code, 0 where both have it, and what they printed."""
    common = {"store": str(folder / store), "out": str(folder / "trained.pt"), "seconds": 240}
    common["device"] = device
    tasks = [{"cases": cases, **common, "rank": rank} for rank in (0, 1)]
    processes = [
        subprocess.Popen(
            [sys.executable, trained_by_two.__file__, json.dumps(one)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for one in tasks
    ]
    try:
        printed = "".join(process.communicate(timeout=300)[0] for process in processes)
    finally:
        for process in processes:
            process.kill()
    return max(abs(process.returncode) for process in processes), printed


@pytest.fixture(scope="module")
def trained(request, tmp_path_factory):
    """What two processes train, of all cases to be run: to begin takes most of the time."""
    items = [one for one in request.session.items if one.path == request.path]
    names = [one.callspec.params["name"] for one in items if hasattr(one, "callspec")]
    return by_two(tmp_path_factory.mktemp("trained"), {name: CASES[name] for name in names})


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=() if one in QUICK else (pytest.mark.slow,)) for one in CASES],
)
def test_two_processes_train_what_one_does(name, trained):
    check(CASES[name], trained[name], 1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_devices_train_what_one_process_does(tmp_path):
    for name, by_both in by_two(tmp_path, CASES, "cuda").items():
        print(name)
        check(CASES[name], by_both, 5e-3)  # of other kernels


def check(case, by_both, tolerance):
    """What two processes trained is what one trains, relative to how far it moved."""
    expected, untrained = by_one(), trained_by_two.Model().state_dict()
    rough = "bfloat16" in case
    for key, value in expected.items():
        moved = float((value - untrained[key]).abs().max())
        assert moved > 1e-4, key
        off = float((by_both["weights"][key] - value).abs().max())
        assert off <= (0.1 if rough else tolerance) * moved, (key, off, moved)
    if case.get("compiled"):
        assert by_both["sites"] >= 1  # of the author's blocks; KSLinear's product is ksopt's own
