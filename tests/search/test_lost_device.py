"""A device that fails for good: distinguished from a failing chain, and blamed on no later one."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from ksopt.measure import device_health
from ksopt.measure.roofline import Roofline
from ksopt.patterns.chain import Chain
from ksopt.search import study_store
from ksopt.search.layer_request import LayerRequest
from ksopt.search.objectives import Objective
from ksopt.search.request import SearchRequest
from ksopt.search.study import run_search

CHAIN = Chain.monarch(32, 64, p=4)


def lost(device: torch.device, chain: Chain, message: str) -> None:
    text = message.format(failed=chain, device=device, reason="broken")
    raise device_health.DeviceLostError(text)


@pytest.mark.slow
def test_a_search_ends_with_the_device_and_goes_on_without_the_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = SearchRequest(
        "32x64", budgets=("50%",), batch=16, device="cpu", trials=3, out=tmp_path / "found"
    )
    measure, broken = Objective.measure, []

    def breaks(self: Objective, chain: Chain, limit: float | None = None) -> object:
        if not broken:
            broken.append(chain)
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return measure(self, chain, limit)

    monkeypatch.setattr(Objective, "measure", breaks)
    with monkeypatch.context() as patch:
        patch.setattr(device_health, "raise_if_lost", lost)
        with pytest.raises(device_health.DeviceLostError, match=r"since the chain .* \(broken\)"):
            run_search(request)
    result = run_search(request)
    (layer,) = result.layers
    failed = [trial for trial in layer.trials if trial.state == "failed"]
    assert [trial.facts.chain for trial in failed] == broken
    assert "illegal memory access" in str(failed[0].reason)
    others = [trial for trial in layer.trials if trial.state in ("complete", "pruned")]
    assert len(others) == 2
    assert broken[0] not in {trial.facts.chain for trial in others}


@pytest.mark.slow
def test_a_worker_whose_device_is_lost_says_no_error_so_that_another_takes_its_place(
    tmp_path: Path,
) -> None:
    request = LayerRequest(
        "32x64", budgets=("50%",), batch=16, device="cpu", trials=1, out=tmp_path
    )
    storage = study_store.storage_of(request)
    storage.create(request.study, ("minimize", "minimize"))
    script = (
        "from ksopt.measure import device_health\nfrom ksopt.search import worker\n"
        "from ksopt.search.objectives import Objective\n"
        "def fails(*given): raise RuntimeError('broken')\n"
        "def lost(*_): raise device_health.DeviceLostError('the device works no more')\n"
        "Objective.measure, device_health.raise_if_lost = fails, lost\n"
        "raise SystemExit(worker.main())\n"
    )
    task = {
        "task": "trials",
        "device": "cpu",
        "roofline": asdict(Roofline("cpu", "float32", 1e10, 1e11, 2**20, 64, "a GEMM")),
        "seconds": None,
        "workers": 1,
        "shares": [
            {
                "request": request.to_json(),
                "candidates": [str(CHAIN)],
                "steps": [],
                "priors": [["a family", str(CHAIN)]],
                "run": 1,
                "seed": 0,
            }
        ],
    }
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps(task) + "\n")
        process.stdin.flush()
        assert process.wait(60) == 1
        assert process.stdout is not None
        assert process.stderr is not None
        assert "error" not in process.stdout.read()
        assert "the device works no more" in process.stderr.read()
    (trial,) = storage.load(request.study).get_trials()
    assert "broken" in trial.user_attrs["outcome"]["reason"]
