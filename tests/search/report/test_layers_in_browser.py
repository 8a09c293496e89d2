"""A model's report as a browser shows it: on a desk and on a telephone, by day and by night."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from browser import Browser
from test_report_in_browser import CUT, FAINT, OVERLAPPING, SCROLLING, TINY, UNFOLD, chromium

from ksopt.measure import energy
from ksopt.measure.timing import Measurement
from ksopt.patterns.chain import Chain
from ksopt.patterns.size import Dims
from ksopt.search import SearchRequest, finals, run_search
from ksopt.search.layers import Layer, Layers, grouped

__all__ = ["chromium"]  # pytest finds the fixture by its name here

SIZES = {
    "attention.self.query": Dims(768, 768),
    "attention.output.dense": Dims(768, 768),
    "intermediate.dense": Dims(768, 3072),
    "output.dense": Dims(3072, 768),
}


def final(
    request: object, device: object, chains: Sequence[Chain], spare: object
) -> dict[str, Measurement]:
    """The final of a slow dense layer: the report has everything, warnings and long numbers."""
    times = {str(chain): 12_345.6 + place for place, chain in enumerate(chains)}
    return {
        name: Measurement(us, 0.99 * us, 1.01 * us, 20)
        for name, us in {**times, "dense": 1_234_567.8}.items()
    }


@pytest.fixture
def page(quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(finals, "final", final)
    monkeypatch.setattr(energy, "Meter", lambda device: device)
    monkeypatch.setattr(
        energy, "millijoules", lambda calls, meter, seconds: dict.fromkeys(calls, 12_345.6)
    )
    monkeypatch.setattr(
        finals,
        "energy",
        lambda request, device, chains: {"dense": 123.4} | {str(one): 1_234.5 for one in chains},
    )
    layers = [
        Layer(f"encoder.layer.{i}.{name}", dims, f"{i}.{name}")
        for i in range(12)
        for name, dims in SIZES.items()
    ]
    request = SearchRequest(
        Layers("path/to/config.json (bert)", grouped(layers), {"lm_head": "it is excluded"}, 10**8),
        budgets=("10%", "25%"),
        batch=16,
        device="cpu",
        max_factors=2,
        trials=12,
        energy=True,
        out=tmp_path / "report",
    )
    return run_search(request).folder / "report.html"


@pytest.mark.slow
def test_it_fits_and_can_be_read(page: Path, chromium: Browser) -> None:
    for width in (1280, 390):
        for scheme in ("light", "dark"):
            chromium.open(page, width, scheme)
            where = f"{width} pixels, {scheme}"
            chromium.ask(UNFOLD)
            root = "document.scrollingElement"
            assert chromium.ask(f"{root}.scrollWidth <= {root}.clientWidth"), where
            if width == 1280:
                assert chromium.ask(SCROLLING) == [], where
            assert chromium.ask(FAINT) == [], where
            assert chromium.ask(CUT) == [], where
            assert chromium.ask(OVERLAPPING) == [], where
            assert chromium.ask(TINY) == [], where
            chromium.picture(page.with_name(f"{width}-{scheme}.png"))
    assert chromium.errors == []
