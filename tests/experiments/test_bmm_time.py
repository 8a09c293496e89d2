"""The host's times of products, on the driver that is played."""

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "experiments"
QUICKLY = "import bmm_time; bmm_time.ROUNDS, bmm_time.CALLS = 1, 3; bmm_time.main()"


@pytest.mark.slow  # it compiles the library, which torch can register once a process
def test_every_way_is_timed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", QUICKLY], capture_output=True, text=True, cwd=FOLDER, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 8
    assert all("ks_mm_inner.out" in line or "ks_chain_inner" in line for line in lines)
