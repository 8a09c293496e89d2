"""docs/convert.md runs, prints the documented output, and names every key and option."""

import json
import re
from pathlib import Path

import pages

import ksopt
from ksopt import Chain

PAGE = pages.DOCS / "convert.md"


def test_the_page_runs_as_it_stands() -> None:
    assert pages.faults(PAGE) == []


def test_every_key_of_the_config_is_named(tmp_path: Path) -> None:
    from torch import nn

    done = ksopt.convert(nn.Sequential(nn.Linear(8, 8)), {"0": Chain.monarch(8, 8, p=2)})
    folder = ksopt.save_converted(done, tmp_path / "out")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    row = next(line for line in PAGE.read_text("utf-8").splitlines() if "`config.json`" in line)
    named = set(re.findall(r"`([a-z_]+)`", row))
    assert set(config) | set(config["layers"][0]) <= named | {"ksopt", "torch"}  # the versions
