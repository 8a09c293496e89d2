"""Draws the pictures of the README and the documents, as SVG files beside this script.

    python docs/pictures/draw.py

Chains are drawn as by `ksopt show CHAIN --svg FILE`; `speedup.svg` shows the measurements in
docs/data/chain-kernels-bfloat16.csv. It needs only ksopt.
"""

import csv
import sys
from dataclasses import dataclass
from pathlib import Path

from ksopt import drawing
from ksopt.patterns.chain import Chain
from ksopt.report import drawing_style, svg
from ksopt.search.report import phrases

HERE = Path(__file__).parent
DATA = HERE.parent / "data" / "chain-kernels-bfloat16.csv"
CHAINS = {
    "chain": "(1,16,4,2)*(2,4,16,1)",
    "pattern": "(2,3,4,3)",
    "block-diagonal": "(4,6,6,1)",
    "strided": "(1,6,6,4)",
    "low-rank": "(1,24,6,1)*(1,6,24,1)",
    "monarch": "(1,6,6,4)*(4,6,6,1)",
    "butterfly": "(1,2,2,8)*(2,2,2,4)*(4,2,2,2)*(8,2,2,1)",
}
"""The chains to draw, by the name of the file."""
LAYERS = {
    "768": "768 -> 768",
    "1024": "1024 -> 1024",
    "2048": "2048 -> 2048",
    "4096": "4096 -> 4096",
    "qkv 384": "q, k, v of 384",
    "384-1536": "384 -> 1536, GELU",
    "1536-384": "1536 -> 384, residual",
}
WIDTH, ROW, LEFT, BAR = 800, 34, 160.0, 12.0


@dataclass(frozen=True)
class Layer:
    """The fastest tile of a layer's fastest chain that has two classes in one factor.

    Args:
        name: Of the layer.
        us: Its time.
        dense_us: The dense layer's time.
    """

    name: str
    us: float
    dense_us: float


def layers() -> list[Layer]:
    """The layers of the file, without low-rank chains, which reduce the rank."""
    with DATA.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    with_two_classes = [row for row in rows if _keeps_two_classes(row["chain"])]
    best = {}
    for row in sorted(with_two_classes, key=lambda row: -float(row["us"])):
        best[row["case"]] = Layer(LAYERS[row["case"]], float(row["us"]), float(row["dense_us"]))
    return [best[case] for case in LAYERS]


def _keeps_two_classes(text: str) -> bool:
    return max(pattern.d for pattern in Chain.parse(text.removeprefix("3 x "))) == 2


def speedup() -> str:
    """A bar chart of the chains' times beside the dense layers'."""
    drawn, full = layers(), WIDTH - LEFT - 170
    words = "latency beside the dense layer's:"
    parts = [svg.text(LEFT, 16, words, "start")]
    for at, (kind, name) in enumerate((("s1", "dense"), ("s0", "Kronecker-sparse"))):
        left = LEFT + svg.width_of(words) + 70 * at
        parts.append(f'<circle class="dot {kind}" cx="{left:.1f}" cy="12" r="5"/>')
        parts.append(svg.text(left + 10, 16, name, "start"))
    for place, layer in enumerate(drawn):
        top, share = 28.0 + ROW * place, layer.us / layer.dense_us
        parts.append(svg.text(LEFT - 8, top + BAR + 4, layer.name, "end"))
        for at, (kind, wide) in enumerate((("s1", full), ("s0", full * share))):
            box = f'x="{LEFT}" y="{top + at * BAR:.1f}" width="{wide:.1f}" height="{BAR - 1}"'
            parts.append(f'<rect class="dot {kind}" {box}/>')
        times = f"{1 / share:.2f}x: {phrases.microseconds(layer.us)}"
        times += f", dense {phrases.microseconds(layer.dense_us)}"
        parts.append(svg.text(LEFT + full * share + 6, top + 2 * BAR - 2, times, "start"))
    bottom = 28.0 + ROW * len(drawn) + 16
    words = "One NVIDIA H200, bf16, 25,088 rows, with bias; chains of at most 25 % of the weights"
    parts.append(svg.text(LEFT, bottom, words, "start"))
    label = "Latency of Kronecker-sparse layers beside dense ones"
    return svg.svg(parts, WIDTH, int(bottom + 12), label)


def pictures() -> dict[str, str]:
    """The pictures by the names of their files."""
    drawn = {
        name: drawing_style.standalone(drawing.to_svg(Chain.parse(text), width=560))
        for name, text in CHAINS.items()
    }
    drawn["speedup"] = drawing_style.standalone(speedup())
    return {f"{name}.svg": picture for name, picture in drawn.items()}


def main() -> int:
    """Write all pictures."""
    for name, picture in pictures().items():
        (HERE / name).write_text(picture, encoding="utf-8")
        print(f"docs/pictures/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
