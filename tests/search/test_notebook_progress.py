"""The bar of a search under a notebook's cell."""

import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import ksopt
from ksopt.search.progress import Cell, for_terminal


class Display:
    """IPython's display, which records the contents of a place."""

    def __init__(self):
        self.shown = []

    def display(self, html, display_id):
        assert display_id is True
        self.update(html)
        return self

    def update(self, html):
        self.shown.append(html)

    @staticmethod
    def HTML(text):
        return text


@pytest.fixture
def display(monkeypatch):
    display = Display()
    shell = SimpleNamespace(kernel=object())
    ipython = SimpleNamespace(display=display, get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    return display


def test_the_bar_moves_and_goes(display):
    bar = for_terminal(sys.stderr)
    assert isinstance(bar, Cell)
    bar.note("timing <the dense layer>")
    assert "timing &lt;the dense layer&gt;" in display.shown[-1]
    bar.start(4, 1)
    assert "1/4" in display.shown[-1]
    with mock.patch("ksopt.search.progress._SECONDS_BETWEEN_CELLS", 0.0):
        bar.trial(None, None)
    assert "2/4" in display.shown[-1]
    assert display.shown[-1].startswith("<pre>")
    before = len(display.shown)
    bar.trial(None, None)  # at once again: not worth another picture
    assert len(display.shown) == before
    bar.close()
    assert display.shown[-1] == ""


def test_quiet_shows_nothing(display):
    for_terminal(sys.stderr, quiet=True).note("anything")
    assert display.shown == []


def test_a_terminals_ipython_is_no_notebook(display, monkeypatch, capsys):
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: SimpleNamespace())
    for_terminal(sys.stderr).note("a line")
    assert display.shown == []
    assert capsys.readouterr().err == "a line\n"


@pytest.mark.usefixtures("quick")
def test_a_search_as_one_call_shows_it(display, tmp_path, capsys):
    torch.manual_seed(0)
    ksopt.search("32x64", "50%", batch=16, device="cpu", trials=3, out=tmp_path / "report")
    assert any("/" in shown and "measuring chains" in shown for shown in display.shown)
    assert display.shown[-1] == ""
    assert capsys.readouterr().err == ""
