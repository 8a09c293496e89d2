"""Every example of docs/backend.md runs and prints what the page says."""

import doctest
from pathlib import Path

import torch

PAGE = Path(__file__).parents[2] / "docs" / "backend.md"


def test_the_page_runs():
    torch.manual_seed(0)
    failed, tried = doctest.testfile(
        str(PAGE), module_relative=False, optionflags=doctest.IGNORE_EXCEPTION_DETAIL
    )
    assert failed == 0
    assert tried == PAGE.read_text(encoding="utf-8").count("\n>>> ") > 20
