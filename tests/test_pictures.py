"""The pictures of the documents are those that their script draws from the data."""

import importlib.util
from pathlib import Path

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"


def test_the_pictures_are_as_they_are_drawn() -> None:
    spec = importlib.util.spec_from_file_location("draw", PICTURES / "draw.py")
    assert spec is not None
    assert spec.loader is not None
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    drawn = draw.pictures()
    assert {"chain.svg", "speedup.svg"} <= set(drawn)
    for name, picture in drawn.items():
        assert (PICTURES / name).read_text(encoding="utf-8") == picture, f"run draw.py: {name}"
