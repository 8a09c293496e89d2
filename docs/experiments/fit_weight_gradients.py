"""Fits the cost models of weight gradients to measured launches, beside the constants of the code.

    python docs/experiments/fit_weight_gradients.py [FILE]

FILE is an output of weight_gradients.py with ``--ways apart``; the default one is of H100s. For
each kernel, and for PyTorch's way, the least squares of log(predicted / measured) are printed: the
constants, and how predictions spread. The time of a launch, and of memory in the kernels' models,
stay those of the code. Tiles whose warps and runs the code does not have are left out. Last, the
mean of how much slower the launch with the least predicted time is than the fastest in its line.
Needs no GPU.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from unittest import mock

from scipy.optimize import least_squares

from ksopt.kernels.families import weight_grad_mma16, weight_grad_wgmma16
from ksopt.kernels.families.common import pytorch_cost
from ksopt.kernels.families.common.weight_grad import Tile
from ksopt.kernels.problem import DeviceSpec
from ksopt.measure.measurement import quantile
from ksopt.patterns.chain import Pattern

LINES = Path(__file__).parents[1] / "data" / "weight-gradient-tiles-bfloat16-h100.txt"
ROWS = 25_088
H100 = DeviceSpec((9, 0), 132, 233_472)
Constants = dict[str, float]
FITTED: dict[ModuleType, tuple[str, ...]] = {
    weight_grad_mma16: (
        *("TFLOPS", "L2", "SHARED", "SHARES", "OVERLAP", "PIECE_BYTES", "ADDING_US"),
    ),
    weight_grad_wgmma16: ("TFLOPS", "L2", "SHARES", "OVERLAP", "L2_FILLED", "ADDING_US"),
    pytorch_cost: (
        *("_GRAD_US_PER_ROW", "_GRAD_BYTES_PER_US", "_GRAD_FLOPS_PER_US"),
        *("_GRAD_COPY_BYTES_PER_US", "_SLOW_COPY"),
    ),
}


@dataclass(frozen=True)
class Measured:
    """A way to compute a gradient and its time; without a tile it is PyTorch's.

    Attributes:
        model: the module whose constants predict its time.
        pattern: of the factor.
        tile: of a block of the kernel.
        shares: of the rows.
        us: measured microseconds.
    """

    model: ModuleType
    pattern: Pattern
    tile: Tile | None
    shares: int
    us: float

    def predicted_us(self) -> float:
        """Predicted microseconds, by the model's constants as they are now."""
        if self.tile is None:
            return pytorch_cost.weight_gradient_us(self.pattern, ROWS)
        return self.tile.predicted_us(self.pattern, ROWS, self.shares, H100)


def measured(line: str) -> list[Measured]:
    """What a line of the output has measured.

    Example:
        >>> for one in measured("(4,8,8,4): memory alone 2.0; apart 8.0; kernel wgmma16:1x1/3 4"):
        ...     print(one.pattern, one.tile, one.shares, one.us)
        (4,8,8,4) None 1 8.0
        (4,8,8,4) wgmma16:1x1 3 4.0
    """
    p = Pattern.parse(line.partition(":")[0])
    tiles = set()
    if weight_grad_mma16.unsupported(p, "bfloat16", H100) is None:
        # The rows of a stage were other ones in some.
        tiles = {replace(tile, rows=0) for tile in weight_grad_mma16.configs(p)}
    several = [
        Measured(pytorch_cost, p, None, 1, float(us)) for us in re.findall(r"apart ([\d.]+)", line)
    ]
    for name, shares, us in re.findall(r"kernel (\S+)/(\d+) ([\d.]+)", line):
        numbers = [int(number) for number in re.split("[:x]", name.partition(":")[2])]
        if name.startswith("wgmma16"):
            tile: Tile = weight_grad_wgmma16.Config(*numbers)
            several.append(Measured(weight_grad_wgmma16, p, tile, int(shares), float(us)))
            continue
        config = weight_grad_mma16.Config(*numbers)
        if replace(config, rows=0) in tiles:
            several.append(Measured(weight_grad_mma16, p, config, int(shares), float(us)))
    return several


def logs(several: Sequence[Measured]) -> list[float]:
    """The logarithms of predicted over measured."""
    return [math.log(one.predicted_us() / one.us) for one in several]


def fitted(model: ModuleType, several: Sequence[Measured]) -> Constants:
    """The constants of the least squares, from those of the code on."""
    names = FITTED[model]

    def errors(logarithms: Sequence[float]) -> list[float]:
        with mock.patch.dict(vars(model), _values(names, logarithms)):
            return logs(several)

    start = [math.log(getattr(model, name)) for name in names]
    # A constant that the measurements do not determine stays within a factor of ten.
    bounds = ([x - math.log(10) for x in start], [x + math.log(10) for x in start])
    return _values(names, least_squares(errors, start, bounds=bounds).x)


def _values(names: Sequence[str], logarithms: Sequence[float]) -> Constants:
    return {name: math.exp(x) for name, x in zip(names, logarithms, strict=True)}


def spread(several: Sequence[Measured]) -> str:
    """How predicted over measured is distributed."""
    errors = sorted(logs(several))
    low, middle, high = (math.exp(quantile(errors, share)) for share in (0.1, 0.5, 0.9))
    square = math.sqrt(sum(error**2 for error in errors) / len(errors))
    return (
        f"root mean square {100 * square:.0f} %; predicted / measured {middle:.2f} "
        f"(eight of ten within {low:.2f} to {high:.2f})"
    )


def regret(lines: Sequence[Sequence[Measured]]) -> str:
    """The mean of how much slower than the fastest the kernel predicted to be the fastest is."""
    slower = []
    for line in lines:
        kernels = [one for one in line if one.tile is not None]
        if kernels:
            chosen = min(kernels, key=Measured.predicted_us)
            slower.append(chosen.us / min(one.us for one in kernels) - 1)
    return f"{100 * sum(slower) / len(slower):.0f} % (mean of {len(slower)} lines)"


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit each model, and print it beside the code's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("file", nargs="?", type=Path, default=LINES)
    text = parser.parse_args(arguments).file.read_text(encoding="utf-8")
    lines = [measured(line) for line in text.splitlines()]
    code = regret(lines)
    with ExitStack() as stack:
        for model in FITTED:
            several = [one for line in lines for one in line if one.model is model]
            constants = fitted(model, several)
            print(f"{model.__name__.rpartition('.')[2]}: {len(several)} measurements")
            for name, value in constants.items():
                print(f"  {name.strip('_')}: code {getattr(model, name):.4g}, fitted {value:.4g}")
            print(f"  code: {spread(several)}")
            stack.enter_context(mock.patch.dict(vars(model), constants))
            print(f"  fitted: {spread(several)}")
        print(f"Kernel predicted to be the fastest: code {code}, fitted {regret(lines)}")


if __name__ == "__main__":
    main()
