"""The report as a browser shows it: on a desk and on a telephone, by day and by night."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from browser import Browser, browser, program

from ksopt.measure.timing import Measurement
from ksopt.search import SearchResult
from ksopt.search.report import headline
from ksopt.search.report.export import write

from one_layer import with_layer  # isort: skip

Search = Callable[..., SearchResult]

# Texts whose colour is too near to what is behind them: less than 4.5 to 1 (WCAG 2.1, level AA).
FAINT = """(() => {
  const numbers = text => text.match(/[\\d.]+/g).map(Number);
  const light = rgb => rgb.slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = one => {
    for (; one; one = one.parentElement) {
      const rgb = numbers(getComputedStyle(one).backgroundColor);
      if (rgb.length < 4 || rgb[3] > 0) return rgb;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const one of document.querySelectorAll("h1, h2, p, th, td, code, svg text")) {
    if (!one.getClientRects().length || !one.textContent.trim()) continue;
    const style = getComputedStyle(one);
    const ink = numbers(one instanceof SVGElement ? style.fill : style.color);
    const [a, b] = [light(ink), light(behind(one))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) found.push(one.textContent + " " + style.color);
  }
  return found;
})()"""
UNFOLD = "document.querySelectorAll('details').forEach(one => { one.open = true; })"
# Tables that one has to scroll sideways.
SCROLLING = """[...document.querySelectorAll(".table")]
  .filter(one => one.scrollWidth > one.clientWidth).map(one => one.textContent)"""
# Letters of a drawing that are cut off at its edge.
CUT = """[...document.querySelectorAll("svg text")].filter(one => one.getClientRects().length)
  .filter(one => {
    const box = one.getBoundingClientRect(), whole = one.ownerSVGElement.getBoundingClientRect();
    return box.left < whole.left - 1 || box.right > whole.right + 1
      || box.top < whole.top - 1 || box.bottom > whole.bottom + 1;
  }).map(one => one.textContent)"""
# Letters of a drawing that lie on each other.
OVERLAPPING = """[...document.querySelectorAll("svg")].filter(one => one.getClientRects().length)
  .flatMap(drawing => {
    const boxes = [...drawing.querySelectorAll("text")]
      .map(one => [one.textContent, one.getBoundingClientRect()]);
    return boxes.flatMap(([text, a], i) => boxes.slice(i + 1)
      .filter(([, b]) => a.left < b.right - 1 && b.left < a.right - 1
        && a.top < b.bottom - 3 && b.top < a.bottom - 3)
      .map(([other]) => text + " on " + other));
  })"""
# Letters smaller than a person can read.
TINY = """[...document.querySelectorAll("p, td, th, code, svg text")]
  .filter(one => one.getClientRects().length && one.textContent.trim())
  .filter(one => {
    const svg = one.ownerSVGElement;
    const scale = svg ? svg.getBoundingClientRect().width / svg.viewBox.baseVal.width : 1;
    return parseFloat(getComputedStyle(one).fontSize) * scale < 10;
  }).map(one => one.textContent)"""


def steady(us: float) -> Measurement:
    return Measurement(us, 0.99 * us, 1.01 * us, 20)


@pytest.fixture
def chromium() -> Iterator[Browser]:
    actual = program()
    if actual is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
    with browser(actual) as page:
        yield page


@pytest.fixture
def report(search: Search) -> Path:
    """The report of a search with all that makes tables wide."""
    result = search(dims="768x3072", budgets=("10%", "25%"), trials=6)
    # Chains of 3 us to a second, beside a dense layer as slow as the slowest of them.
    times = [3.0, 20.0, 400.0, 7000.0, 3e4, 1e6]
    dense = steady(1e6)
    result = with_layer(
        result,
        request=replace(result.layers[0].request, energy=True),
        trials=tuple(
            replace(
                trial,
                latency=steady(us),
                dense=dense,
                values={"weight_error": us / 2e6, "energy_mj": us / 3},
            )
            for trial, us in zip(result.layers[0].trials, times, strict=True)
        ),
        finalists=tuple(
            replace(
                finalist,
                dense=dense,
                values={"weight_error": 0.5, "score": -1234.5, "energy_mj": 12.345},
                dense_values={"energy_mj": 20.0},
            )
            for finalist in result.layers[0].finalists
        ),
        recommendations=tuple(
            replace(
                answer,
                chosen=answer.chosen and replace(answer.chosen, values={"energy_mj": 1234.5}),
            )
            for answer in result.layers[0].recommendations
        ),
    )
    write(result, result.folder)
    return result.folder / "report.html"


def test_it_fits_and_can_be_read(report: Path, chromium: Browser) -> None:
    pictures = report.parent
    for width in (1280, 390):
        for scheme in ("light", "dark"):
            chromium.open(report, width, scheme)
            where = f"{width} pixels, {scheme}"
            assert chromium.ask("innerWidth") == width
            chromium.ask(UNFOLD)
            root = "document.scrollingElement"
            assert chromium.ask(f"{root}.scrollWidth <= {root}.clientWidth"), where
            if width == 1280:
                assert chromium.ask(SCROLLING) == [], where
            assert chromium.ask(FAINT) == [], where
            assert chromium.ask(CUT) == [], where
            assert chromium.ask(OVERLAPPING) == [], where
            assert chromium.ask(TINY) == [], where
            back = chromium.ask("getComputedStyle(document.body).backgroundColor")
            assert (back == "rgb(255, 255, 255)") == (scheme == "light"), where
            drawn = (
                "[...document.querySelectorAll('svg')].filter(one => one.getClientRects().length)"
            )
            assert chromium.ask(f"{drawn}.length") >= 3, where
            chromium.picture(pictures / f"{width}-{scheme}.png")
            assert (pictures / f"{width}-{scheme}.png").stat().st_size > 10_000
    assert chromium.errors == []


@pytest.mark.slow
@pytest.mark.parametrize("is_doubtful", [False, True])
def test_the_first_screen_answers(
    is_doubtful: bool, search: Search, chromium: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What to use, the numbers and the whole plot, without scrolling; the rest is folded away."""
    monkeypatch.setattr(headline, "_doubt", lambda *_: is_doubtful)
    page = search(dims="768x3072", budgets=("25%",), trials=4).folder / "report.html"
    chromium.open(page, 1280, "light")
    # Where the answer is to measure again, the command for that comes first.
    again = "[...document.querySelectorAll('.answer ~ .command')].map(one => one.offsetHeight + 32)"
    screen = 900 + sum(chromium.ask(again))
    for what in (".answer", ".fact", ".wide svg"):
        end = f"document.querySelector('{what}').getBoundingClientRect().bottom"
        assert 0 < chromium.ask(end) < screen, what
    assert chromium.ask("[...document.querySelectorAll('details')].some(one => one.open)") is False
    assert chromium.ask("document.scrollingElement.scrollHeight") < 3 * screen


@pytest.mark.slow
def test_a_pointer_on_a_chain_tells_of_it(report: Path, chromium: Browser) -> None:
    chromium.open(report, 1280, "light")
    shown = (
        "[...document.querySelectorAll('.tip')].filter(one => one.getClientRects().length)"
        ".map(one => one.textContent)"
    )
    assert chromium.ask(shown) == []
    at = "JSON.stringify(document.querySelector('.wide .hit').getBoundingClientRect())"
    chromium.ask("document.querySelector('.wide .hit').scrollIntoView({block: 'center'})")
    box = json.loads(chromium.ask(at))
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    chromium.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    (tip,) = chromium.ask(shown)
    for words in ("(", "weights", "us", "dense"):
        assert words in tip


@pytest.mark.slow
def test_what_is_folded_away_is_printed(report: Path, chromium: Browser) -> None:
    chromium.open(report, 1280, "light")
    shown = "[...document.querySelectorAll('details table')].map(one => one.checkVisibility())"
    assert set(chromium.ask(shown)) == {False}
    chromium.call("Emulation.setEmulatedMedia", media="print")
    assert set(chromium.ask(shown)) == {True}


def test_the_browser_would_see_a_fault(tmp_path: Path, chromium: Browser) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        "<!doctype html><meta name=viewport content='width=device-width'>"
        "<div style='width:2000px'>x</div><p style='color:#bbb'>faint</p>"
        "<svg viewBox='0 0 90 20' width=90 font-size=12>"
        "<text x=80 y=9>long text</text><text x=80 y=9>here</text></svg>"
        "<p style='font-size:6px'>tiny</p><script>console.error('no')</script>"
    )
    chromium.open(page, 1280, "light")
    assert chromium.ask("document.scrollingElement.scrollWidth") > 1280
    assert len(chromium.ask(FAINT)) == 1
    assert chromium.ask(CUT) == ["long text", "here"]
    assert len(chromium.ask(OVERLAPPING)) == 1
    assert chromium.ask(TINY) == ["tiny"]
    assert len(chromium.errors) == 1
