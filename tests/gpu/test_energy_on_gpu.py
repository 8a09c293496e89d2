"""Energy on a GPU: read from its counter, an objective of a search, and of a plausible size."""

import json
import os
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from ksopt.cli import main
from ksopt.errors import InvalidInputError
from ksopt.measure import energy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        "PYTEST_XDIST_WORKER" in os.environ,
        reason="the counter is the whole board's, and other tests use it now: run this without -n",
    ),
]
pytest.importorskip("pynvml")

# A board draws at least a few watts while it works, and no GPU as much as two kilowatts.
LEAST_W, MOST_W = 5.0, 2000.0


@pytest.fixture(scope="module")
def meter() -> energy.Meter:
    try:
        return energy.Meter(torch.device("cuda", torch.cuda.current_device()))
    except InvalidInputError as error:  # a virtual GPU, or a driver without the counter
        pytest.skip(str(error))


def test_the_counter_rises_while_the_device_works(meter: energy.Meter) -> None:
    x = torch.randn(4096, 4096, device="cuda")
    calls = {"square": lambda: x @ x, "twice": lambda: x @ x @ x}
    energies = energy.millijoules(calls, meter, energy.TRIAL_SECONDS)
    assert energies["square"] > 0
    # Two products against one: a counter in other units, or shared out wrongly, is far off.
    assert 1.5 < energies["twice"] / energies["square"] < 2.7


def test_a_trial_is_long_beside_the_steps_of_the_counter(meter: energy.Meter) -> None:
    """The docs say that the counter advances a few times in a tenth of a second."""
    x = torch.randn(4096, 4096, device="cuda")
    readings, began = [meter.millijoules()], time.perf_counter()
    while time.perf_counter() - began < 1.0:
        x @ x
        torch.cuda.synchronize()
        readings.append(meter.millijoules())
    steps = sum(later > earlier for earlier, later in pairwise(readings))
    # Fewer would be steps of more than a tenth of a second, or a counter that says it late.
    assert steps >= 8


def test_a_search_has_energy_as_an_objective(
    meter: energy.Meter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["search", "--dims", "768x3072", "--budget", "25%", "--dtype", "bf16", "--energy"]
    words += ["--trials", "4", "--batch", "4096", "--out", str(tmp_path), "--json"]
    assert main.main(words) == 0
    energies = json.loads(capsys.readouterr().out)
    assert energies["request"]["energy"] is True
    (layer,) = energies["layers"]
    assert layer["front"]["metrics"] == ["latency_us", "parameters", "energy_mj"]
    assert layer["front"]["trials"]
    assert layer["finalists"]
    assert [trial["state"] for trial in layer["trials"]] == ["complete"] * 4
    used = [(one["energy_mj"], one["latency"]) for one in layer["finalists"] + layer["trials"]]
    used += [(one["dense_energy_mj"], one["dense"]) for one in layer["finalists"]]
    for energy_mj, latency in used:
        # Energy is taken from warm caches and without a pause, latency from cold ones: the
        # quotient is a power only roughly.
        watts = 1e3 * energy_mj / latency["median_us"]
        assert LEAST_W < watts < MOST_W
    # The trial's half second and the second after the final are of the same chain, whose kernels
    # were chosen with more care meanwhile.
    in_trial = {trial["chain"]: trial["energy_mj"] for trial in layer["trials"]}
    for one in layer["finalists"]:
        assert 0.5 < one["energy_mj"] / in_trial[one["chain"]] < 1.5
    assert "energy" in (tmp_path / "report.md").read_text(encoding="utf-8").lower()
    rows = (tmp_path / "trials.csv").read_text(encoding="utf-8").splitlines()
    assert len(rows) == 5
