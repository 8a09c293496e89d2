"""The places of a drawing's texts."""

from ksopt.search.report.axes import Axes, Box, Scale, beside

AXES = Axes(800, 376, Scale("weights", 0.0, 100.0), Scale("us", 0.0, 100.0))


def place_of(drawn: list[str]) -> str:
    (text,) = drawn
    assert "use this" in text
    return text


def test_a_name_stands_where_it_lies_on_nothing() -> None:
    free = place_of(beside(AXES, 400, 200, "use this", []))
    taken = [Box.of(413, 204, "use this", "start")]
    assert place_of(beside(AXES, 400, 200, "use this", taken)) != free


def test_a_name_is_drawn_where_all_places_are_taken() -> None:
    everywhere = [Box(0, 800, 0, 376)]
    assert place_of(beside(AXES, 400, 200, "use this", everywhere)) == place_of(
        beside(AXES, 400, 200, "use this", [])
    )


def test_a_name_stays_on_the_drawing() -> None:
    assert 'text-anchor="end"' in place_of(beside(AXES, 770, 200, "use this", []))
