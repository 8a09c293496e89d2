"""docs/convert.md runs as it stands, prints what it says, and names every key and option."""

import doctest
import json
import re
from pathlib import Path

import ksopt
from ksopt import Chain

PAGE = Path(__file__).parents[2] / "docs" / "convert.md"


def test_the_page_runs_as_it_stands() -> None:
    text = PAGE.read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL))
    test = doctest.DocTestParser().get_doctest(code, {}, PAGE.name, str(PAGE), 0)
    assert len(test.examples) >= 40
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert not said, "".join(said)


def test_every_key_of_the_config_is_named(tmp_path: Path) -> None:
    from torch import nn

    done = ksopt.convert(nn.Sequential(nn.Linear(8, 8)), {"0": Chain.monarch(8, 8, p=2)})
    folder = ksopt.save_converted(done, tmp_path / "out")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    row = next(line for line in PAGE.read_text("utf-8").splitlines() if "`config.json`" in line)
    named = set(re.findall(r"`([a-z_]+)`", row))
    assert set(config) | set(config["layers"][0]) <= named | {"ksopt", "torch"}  # the versions
