"""Drawings as files of their own: for programs that know no style sheets, and as pictures."""

import sys
from xml.etree import ElementTree

import pytest

from ksopt.errors import UnavailableError
from ksopt.report import drawing_style, svg
from ksopt.report.svg import Tip

PARTS = [
    '<path class="dense" d="M0 5H90"/>',
    '<path class="line s2" d="M0 9H90"/>',
    '<circle class="dot s0" cx="5" cy="5" r="4"/>',
    svg.text(40, 30, "words", "middle", "dense-text"),
]


def drawn(words: str = "words") -> str:
    parts = [*PARTS, svg.text(4, 50, words, "start"), *svg.hover([Tip(5, 5, ("tip",))], 90, 60)]
    return drawing_style.standalone(svg.svg(parts, 90, 60, "a drawing"))


def test_a_file_of_its_own_needs_no_style_sheet() -> None:
    text = drawn()
    assert "class=" not in text
    assert "var(" not in text
    root = ElementTree.fromstring(text)
    assert (root.get("width"), root.get("height")) == ("90", "60")
    strokes = [one.get("stroke") for one in root.iter() if one.tag.endswith("path")]
    assert strokes == [drawing_style.COLOURS["dense"][0], drawing_style.COLOURS["third"][0]]
    assert root[0].get("fill") == "#ffffff"  # slides may be dark


def test_a_name_may_hold_anything() -> None:
    """Names of a model's layers come from files of others."""
    text = drawn("a\x01 <b> & \ud800 é")
    assert "a? <b> & ? é" in "".join(ElementTree.fromstring(text).itertext())


def test_what_is_shown_on_hover_is_left_out() -> None:
    assert "tip" not in drawn()
    assert "words" in drawn()


def test_every_colour_is_one_of_the_table() -> None:
    known = {colour for pair in drawing_style.COLOURS.values() for colour in pair}
    root = ElementTree.fromstring(drawn())
    used = {one.get(name) for one in root.iter() for name in ("fill", "stroke")}
    assert used - {None, "none"} <= known


def test_a_picture_has_the_letters() -> None:
    picture = drawing_style.png(drawn())
    assert picture.startswith(b"\x89PNG")
    assert int.from_bytes(picture[16:20], "big") == 1600
    assert picture != drawing_style.png(drawn("other"))


def test_without_the_library_a_sentence_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    drawing_style._has_font.cache_clear()
    with pytest.raises(UnavailableError, match=r"ksopt\[plots\]"):
        drawing_style.png(drawn())
    drawing_style._has_font.cache_clear()
