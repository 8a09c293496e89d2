"""End-to-end times of a model, compiled by Inductor alone and by ksopt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ksopt.measure.timing import Comparison, Measurement, compare, measure

_SECONDS = 2.0


@dataclass(frozen=True)
class EndToEnd:
    """Times of one call of the model.

    Args:
        inductor: compiled by Inductor alone.
        ksopt: compiled by the backend "ksopt".
    """

    inductor: Measurement
    ksopt: Measurement

    @property
    def speedup(self) -> float:
        """Speedup of the model by ksopt."""
        return self.inductor.median_us / self.ksopt.median_us

    @property
    def sentence(self) -> str:
        """The comparison as a sentence.

        Example:
            >>> fast, slow = Measurement(50.0, 49.0, 51.0, 9), Measurement(100.0, 99.0, 101.0, 9)
            >>> EndToEnd(slow, fast).sentence
            'With ksopt the model is 2.00 times as fast: a call takes 50.0 us in place of 100.0 us.'
        """
        both = f"a call takes {self.ksopt.median_us:.1f} us in place of "
        both += f"{self.inductor.median_us:.1f} us"
        if compare(self.ksopt, self.inductor) is Comparison.WITHIN_NOISE:
            return f"With ksopt the model is as fast as without, within noise: {both}."
        return f"With ksopt the model is {self.speedup:.2f} times as fast: {both}."

    def to_json(self) -> dict[str, Any]:
        """The times as JSON values."""
        return {
            "inductor_us": self.inductor.median_us,
            "ksopt_us": self.ksopt.median_us,
            "speedup": self.speedup,
            "comparison": compare(self.ksopt, self.inductor).value,
        }


def measured(
    model: Callable[..., Any],
    inputs: tuple[Any, ...],
    named: dict[str, Any],
    tune: Any,
    dynamic: bool | None,
) -> EndToEnd:
    """Compile a model both ways, and time calls of each in turns, without gradients."""
    device = next((value.device for value in inputs if isinstance(value, Tensor)), None)
    ours = torch.compile(model, backend="ksopt", dynamic=dynamic, options={"tune": tune})
    plain = torch.compile(model, backend="inductor", dynamic=dynamic)
    with restored(model), torch.no_grad():
        times = measure(
            {
                "inductor": lambda: plain(*inputs, **named),
                "ksopt": lambda: ours(*inputs, **named),
            },
            device or torch.device("cpu"),
            max_seconds=_SECONDS,
        )
    return EndToEnd(times["inductor"], times["ksopt"])


@contextmanager
def restored(model: Callable[..., Any]) -> Iterator[None]:
    """Restore a model's buffers, and the random state, afterwards."""
    buffers: dict[str, Tensor] = {}
    if isinstance(model, nn.Module):
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        with torch.random.fork_rng():
            yield
    finally:
        if isinstance(model, nn.Module):
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    if not torch.equal(buffer, buffers[name]):
                        buffer.copy_(buffers[name])
