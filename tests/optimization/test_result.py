"""The description of an optimized model."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from ksopt.measure.timing import Measurement
from ksopt.optimization.result import Optimized
from ksopt.optimization.speed import Speed


@pytest.mark.parametrize(("p80", "is_busy"), [(105.0, False), (300.0, True)])
def test_a_busy_machine_is_named_where_the_model_is_unchanged(p80: float, is_busy: bool) -> None:
    dense, chains = Measurement(100.0, 95.0, p80, 20), Measurement(100.0, 95.0, 105.0, 20)
    unread: Any = None
    done = Optimized(
        model=nn.Linear(2, 2),
        plan=unread,
        report=Path("report.html"),
        mode="inference",
        reason="it was not measurably faster.",
        speed=Speed(dense, chains),
        conversion=None,
        dense={},
        search=unread,
        seconds=1.0,
    )
    assert ("when the machine is idle" in str(done)) is is_busy
