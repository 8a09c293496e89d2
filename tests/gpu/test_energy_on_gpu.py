"""Energy of finalists on a GPU: read from its counter, in the report, and of a plausible size."""

import json
from pathlib import Path

import pytest
import torch

from ksopt import cli
from ksopt.errors import InvalidInputError
from ksopt.search import energy

pytestmark = pytest.mark.gpu
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
    found = energy.millijoules(
        {"square": lambda: x @ x, "twice": lambda: x @ x @ x}, meter, torch.cuda.synchronize
    )
    assert found["square"] > 0
    # Two products against one: a counter in other units, or shared out wrongly, is far off.
    assert 1.5 < found["twice"] / found["square"] < 2.7


def test_a_search_reports_the_energy_of_its_finalists(
    meter: energy.Meter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["search", "--dims", "768x3072", "--budget", "25%", "--dtype", "bf16", "--energy"]
    words += ["--trials", "4", "--batch", "4096", "--out", str(tmp_path), "--json"]
    assert cli.main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["request"]["energy"] is True
    assert found["finalists"]
    for one in found["finalists"]:
        for energy_mj, latency in (
            (one["energy_mj"], one["latency"]),
            (one["dense_energy_mj"], one["dense"]),
        ):
            # Energy is taken from warm caches and without a pause, latency from cold ones: the
            # quotient is a power only roughly.
            watts = 1e3 * energy_mj / latency["median_us"]
            assert LEAST_W < watts < MOST_W
    assert "energy" in (tmp_path / "report.md").read_text(encoding="utf-8").lower()
    rows = (tmp_path / "trials.csv").read_text(encoding="utf-8").splitlines()
    assert len(rows) == 5
