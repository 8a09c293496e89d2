"""The cost of libraries for reports and records: import time and size of the output.

    python docs/experiments/library_costs.py plotly altair matplotlib

Each library writes a page with one plot of 72 points that works without a network, with the chains
shown on hover if the library supports it. Libraries that are not installed are named and skipped.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence

from ksopt.report import svg

POINTS = 72


def points() -> list[tuple[float, float, str]]:
    """Weights, microseconds and a chain's text, as a search of 72 trials has them."""
    rng = random.Random(0)
    texts = [f"(1,{96 * n},{24 * n},8)*(8,{48 * n},{96 * n},1)" for n in range(1, POINTS + 1)]
    return [(rng.uniform(1e5, 1e6), rng.uniform(20, 200), text) for text in texts]


def plotly_page() -> str:
    """A page that holds plotly's script."""
    import plotly.graph_objects as go

    xs, ys, texts = zip(*points(), strict=True)
    return str(go.Figure(go.Scatter(x=xs, y=ys, text=texts, mode="markers")).to_html())


def altair_page() -> str:
    """A page that holds Vega's scripts."""
    import altair

    rows = [{"weights": x, "us": y, "chain": text} for x, y, text in points()]
    chart = altair.Chart(altair.Data(values=rows)).mark_point()
    chart = chart.encode(x="weights:Q", y="us:Q", tooltip="chain:N")
    return str(chart.to_html(inline=True))


def matplotlib_page() -> str:
    """An SVG without hover."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    xs, ys, _ = zip(*points(), strict=True)
    _, axes = pyplot.subplots()
    axes.scatter(xs, ys)
    page = io.StringIO()
    pyplot.savefig(page, format="svg")
    return page.getvalue()


def ksopt_page() -> str:
    """An SVG with hover, as `ksopt.report` draws it: twice, for a screen and for a telephone."""
    drawn = []
    for width, height in ((800, 400), (360, 340)):
        parts = [
            f'<circle class="point" cx="{width * x / 1e6:.1f}" cy="{height * y / 200:.1f}" r="4">'
            f"<title>{text}</title></circle>"
            for x, y, text in points()
        ]
        drawn.append(svg.svg(parts, width, height, "latency against weights"))
    return "".join(drawn)


PAGES: dict[str, Callable[[], str]] = {
    "plotly": plotly_page,
    "altair": altair_page,
    "matplotlib": matplotlib_page,
    "ksopt": ksopt_page,
}


def import_s(module: str, repeats: int = 5) -> float:
    """Seconds to import a module in a new process, without Python's own start."""
    code = f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
    command = [sys.executable, "-c", code]
    times = [
        float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        for _ in range(repeats)
    ]
    return statistics.median(times)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line per library."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("libraries", nargs="*", default=[*PAGES, "jinja2", "msgspec", "pandas"])
    for name in parser.parse_args(arguments).libraries:
        module = "ksopt.report.svg" if name == "ksopt" else name
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            print(f"{name}: not installed")
            continue
        text = f"{name}: import {1000 * import_s(module):.0f} ms"
        if name in PAGES:
            try:
                text += f", a plot {len(PAGES[name]()) / 1000:,.0f} kB"
            except (ImportError, ValueError) as error:
                text += f", no plot without more ({str(error).splitlines()[0]})"
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
