"""The elements of the drawings in reports."""

import pytest

from ksopt.report.svg import linear_ticks, log_ticks


@pytest.mark.parametrize(("low", "high"), [(1.0, 1.5), (900, 1350), (0.5, 3e5), (7, 70)])
def test_axes_have_ticks(low: float, high: float) -> None:
    ticks = log_ticks(low, high)
    assert 2 <= len(ticks) <= 20
    assert all(low <= tick <= high for tick in ticks)
    linear = linear_ticks(low * 1000, high * 1000, 5)
    assert 2 <= len(linear) <= 8
