"""Random modules for a minute, from a fresh seed: see `tests.fuzz.capture`."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_random_modules_do_compiled_what_they_do_in_eager_mode():
    command = [sys.executable, "-m", "tests.fuzz.capture", "--minutes", "0.8", "--workers", "2"]
    root = Path(__file__).parents[2]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=390)
    print(ended.stdout, ended.stderr)  # the seed first
    # Where torch.compile alone differs from eager mode too, there is nothing to compare with.
    differing = ended.stdout.split("\n# Seed ")[1:]
    own = [one for one in differing if "torch.compile itself:" not in one]
    assert not own, ended.stdout
    assert ended.returncode == (1 if differing else 0), ended.stdout
