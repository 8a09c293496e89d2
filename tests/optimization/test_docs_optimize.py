"""docs/optimize.md runs as it stands, and names every argument and field."""

import inspect
from dataclasses import fields
from pathlib import Path

import pages
import pytest

import ksopt

PAGE = pages.DOCS / "optimize.md"


@pytest.mark.slow  # Inductor compiles a model twice
def test_the_page_runs_as_it_stands(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert pages.faults(PAGE) == []


def test_every_argument_and_field_is_named() -> None:
    text = PAGE.read_text("utf-8")
    arguments = set(inspect.signature(ksopt.optimize).parameters) - {"model", "options"}
    named = arguments | {one.name for one in fields(ksopt.Optimized)} - {"mode", "seconds"}
    assert [name for name in sorted(named) if f"`{name}`" not in text] == []
