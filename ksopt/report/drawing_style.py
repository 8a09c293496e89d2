"""The style of drawings: one table of colours and marks, for pages and for separate files."""

from __future__ import annotations

import functools
from xml.etree import ElementTree

from ksopt.errors import UnavailableError

COLOURS = {
    "ink": ("#1c2024", "#e7eaee"),
    "soft": ("#5b6470", "#a3adb8"),
    "line": ("#d9dee4", "#39414a"),
    "back": ("#ffffff", "#14171a"),
    "panel": ("#f5f7f9", "#1e2328"),
    "accent": ("#0b63c4", "#6cb2ff"),
    "dense": ("#b4400c", "#ff9a62"),
    "third": ("#1f7a3d", "#7bd49a"),
    "fourth": ("#7a3fb0", "#c9a2ff"),
}
"""The colours by name: on a light page, on a dark page."""

_SERIES = ("accent", "dense", "third", "fourth", "ink", "soft")


_MARK = "mark"  # the colour of an element's series
MARKS = {
    "grid": {"stroke": "line", "stroke-width": "0.5"},
    "axis": {"stroke": "soft"},
    "budget": {"stroke": "soft", "stroke-dasharray": "3 4"},
    "dense": {"stroke": "dense", "stroke-width": "2", "stroke-dasharray": "8 4"},
    "dense-text": {"fill": "dense", "font-weight": "600", "stroke": "back", "stroke-width": "3"},
    "chosen-text": {"fill": "ink", "font-weight": "600", "stroke": "back", "stroke-width": "3"},
    "front": {"stroke": "accent", "stroke-width": "1.5"},
    "point": {"fill": "accent", "fill-opacity": "0.6", "stroke": "back", "stroke-width": "0.75"},
    "chosen": {"fill": "none", "stroke": "ink", "stroke-width": "2"},
    "line": {"stroke": _MARK, "stroke-width": "2"},
    "box": {"fill": _MARK, "fill-opacity": "0.2", "stroke": _MARK, "stroke-width": "1.5"},
    "whisker": {"stroke": _MARK},
    "middle": {"stroke": "ink", "stroke-width": "2.5"},
    "dot": {"fill": _MARK, "fill-opacity": "0.6", "stroke": "back", "stroke-width": "0.75"},
    "label": {"fill": _MARK, "font-weight": "600"},
    "cell": {"fill": "accent"},
    "first": {"fill": "dense"},
    "outline": {"fill": "none", "stroke": "soft"},
}
"""The style of each class of a drawing's elements; a colour's name as a value is that colour."""

_HOVER = {
    "hit": {"fill": "transparent"},
    "tip-box": {"fill": "panel", "stroke": "soft"},
    "tip-text": {"fill": "ink"},
}
_FONTS = "DejaVu Sans, Liberation Sans, Arial, Helvetica, sans-serif"
_NAMESPACE = "http://www.w3.org/2000/svg"


def css() -> str:
    """The CSS rules of a page's drawings, in an element of the class ``ksopt``."""
    colours = "".join(
        f" --{name}: light-dark({light}, {dark});" for name, (light, dark) in COLOURS.items()
    )
    rules = [f".ksopt {{{colours} }}"]
    rules += [f".ksopt .s{i} {{ --{_MARK}: var(--{name}); }}" for i, name in enumerate(_SERIES)]
    for kind, look in {**MARKS, **_HOVER}.items():
        declarations = "; ".join(f"{key}: {_as_css(value)}" for key, value in look.items())
        rules.append(f".ksopt svg .{kind} {{ {declarations}; }}")
    return "\n".join(rules) + "\n"


def _as_css(value: str) -> str:
    return f"var(--{value})" if value in COLOURS or value == _MARK else value


def standalone(drawing: str) -> str:
    """A drawing as a separate file, on white, for programs without style sheets.

    Args:
        drawing: An ``<svg>`` element of a page. Its hover texts are omitted.
    """
    ElementTree.register_namespace("", _NAMESPACE)
    root = ElementTree.fromstring(drawing.replace("<svg ", f'<svg xmlns="{_NAMESPACE}" ', 1))
    _, _, width, height = root.get("viewBox", "0 0 0 0").split()
    root.set("width", width)
    root.set("height", height)
    root.set("font-family", _FONTS)
    for parent in list(root.iter()):
        for one in list(parent):
            if one.get("class") == "hover":
                parent.remove(one)
    for one in root.iter():
        for key, value in _attributes(one).items():
            one.set(key, value)
        one.attrib.pop("class", None)
    white = {"width": width, "height": height, "fill": COLOURS["back"][0]}
    root.insert(0, ElementTree.Element(f"{{{_NAMESPACE}}}rect", white))
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _attributes(one: ElementTree.Element) -> dict[str, str]:
    """The style of an element, as attributes."""
    kinds = one.get("class", "").split()
    series = [int(kind[1:]) for kind in kinds if kind[:1] == "s" and kind[1:].isdigit()]
    look: dict[str, str] = {}
    if one.tag.endswith("}path"):
        look["fill"] = "none"
    if one.tag.endswith("}text"):
        look["fill"] = "soft"
    for kind in kinds:
        look |= MARKS.get(kind, {})
    if one.tag.endswith("}text") and "stroke" in look:
        look["paint-order"] = "stroke"
    mark = _SERIES[series[0]] if series else "accent"
    named = {key: mark if value == _MARK else value for key, value in look.items()}
    return {key: COLOURS[v][0] if v in COLOURS else v for key, v in named.items()}


def png(drawing: str, width: int = 1600) -> bytes:
    """A drawing as a PNG picture for slides.

    Args:
        drawing: The result of `standalone`.
        width: In pixels.

    Raises:
        UnavailableError: resvg-py is not installed, or the machine has no font that it can use.
    """
    if not _has_font():
        raise UnavailableError(
            "a picture needs a font: install DejaVu Sans (Debian: fonts-dejavu-core)"
        )
    return _drawn(drawing, width)


def _drawn(drawing: str, width: int) -> bytes:
    try:
        import resvg_py
    except ImportError:
        raise UnavailableError(
            "a picture needs resvg-py: pip install 'ksopt[plots]', or use the SVG"
        ) from None
    return bytes(resvg_py.svg_to_bytes(svg_string=drawing, width=width))


@functools.cache
def _has_font() -> bool:
    """Whether the machine has a usable font: without one, drawing a letter changes no pixel."""
    head = f'<svg xmlns="{_NAMESPACE}" viewBox="0 0 20 20" font-family="{_FONTS}">'
    return _drawn(f'{head}<text y="15">M</text></svg>', 40) != _drawn(f"{head}</svg>", 40)
