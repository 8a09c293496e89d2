"""The documents become a site, and none of its links leads nowhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


def build(docs: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-q", "-W", str(docs), str(site)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    done = build(DOCS, tmp_path)
    assert done.returncode == 0, done.stderr
    home = (tmp_path / "index.html").read_text("utf-8")
    api = (tmp_path / "api.html").read_text("utf-8")
    for name in ("optimize", "convert", "distil", "explain"):
        assert f'id="ksopt.{name}"' in api, name
    targets = set(re.findall(r'href="([^"#:?]+)(?:[#?][^"]*)?"', home))
    assert targets
    assert [one for one in targets if not (tmp_path / one).exists()] == []


@pytest.mark.slow
@pytest.mark.parametrize("link", ["nowhere.md", "index.md#nowhere"])
def test_a_link_that_leads_nowhere_fails_the_build(tmp_path: Path, link: str) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "conf.py").write_text((DOCS / "conf.py").read_text("utf-8"), "utf-8")
    (docs / "index.md").write_text(f"# Title\n\n[a link]({link})\n", "utf-8")
    done = build(docs, tmp_path / "site")
    assert done.returncode != 0
    assert "nowhere" in done.stderr
