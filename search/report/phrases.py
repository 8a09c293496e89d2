"""Formatting of numbers and phrases, shared by all outputs."""

from __future__ import annotations

import math

from ksopt.measure.device import DeviceRecord
from ksopt.measure.timing import Measurement
from ksopt.patterns.size import Dims
from ksopt.patterns.surroundings import in_words
from ksopt.search.layer_request import LayerRequest
from ksopt.search.request import SearchRequest
from ksopt.search.results import ChainFacts
from ksopt.system.plurals import counted

_TRAINING = (
    "All times are of a training step: the product, and the gradients of its input and weights."
)


_EAGER = (
    "torch.compile had no part in it: dense is PyTorch's own product, chains are ksopt's operator."
)


def what_is_timed(request: LayerRequest | SearchRequest) -> list[str]:
    """Sentences on the timed operation and its mode of execution.

    Example:
        >>> from ksopt.search.layer_request import LayerRequest
        >>> what_is_timed(LayerRequest("8x8", epilogue=("bias", "gelu"), siblings=3))[0]
        'All times are of 3 layers on one input, followed by a bias and a GELU.'
    """
    if request.train:
        return [_TRAINING, _EAGER]
    layers = f"{request.siblings} layers on one input" if request.siblings > 1 else "a layer"
    after = in_words(request.epilogue)
    if request.siblings == 1 and not after:
        return [_EAGER]
    return [f"All times are of {layers}{f', followed by {after}' if after else ''}.", _EAGER]


def microseconds(value: float) -> str:
    """Microseconds with three significant digits, without exponent.

    Example:
        >>> microseconds(6.8021), microseconds(812.34), microseconds(1644.9)
        ('6.80 us', '812 us', '1,645 us')
    """
    return f"{value:,.2f} us" if value < 10 else f"{value:,.{1 if value < 100 else 0}f} us"


def rows(request: LayerRequest | SearchRequest) -> str:
    """The rows of the input, once a search has set their number."""
    assert request.batch is not None
    return counted(request.batch, "row")


def millijoules(value: float) -> str:
    """Millijoules with three significant digits, without exponent.

    Example:
        >>> millijoules(0.01234), millijoules(12.345), millijoules(2345.6)
        ('0.0123 mJ', '12.3 mJ', '2,346 mJ')
    """
    if value >= 100:
        return f"{value:,.0f} mJ"
    places = 2 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{value:.{places}f} mJ"


def rate(flops: float) -> str:
    """Operations per second, in TFLOP/s or, as for CPUs, in GFLOP/s.

    Example:
        >>> rate(364.2e12), rate(31.4e9), rate(1.04e9)
        ('364.20 TFLOP/s', '31.4 GFLOP/s', '1.0 GFLOP/s')
    """
    return f"{flops / 1e12:,.2f} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:,.1f} GFLOP/s"


def timed(measurement: Measurement) -> str:
    """A median with its band.

    Example:
        >>> timed(Measurement(812.0, 801.0, 840.0, 40))
        '812 us (p20 to p80: 801 to 840)'
    """
    low = microseconds(measurement.p20_us).removesuffix(" us")
    high = microseconds(measurement.p80_us).removesuffix(" us")
    return f"{microseconds(measurement.median_us)} (p20 to p80: {low} to {high})"


def percent(share: float) -> str:
    """A share as a percentage.

    Example:
        >>> percent(0.20833), percent(0.5)
        ('20.8%', '50%')
    """
    return f"{100 * share:.1f}".removesuffix(".0") + "%"


def times(ratio: float) -> str:
    """A latency ratio chain/dense as a phrase.

    Example:
        >>> times(0.5), times(1.25)
        ('2.00 times as fast as', '0.80 times as fast as')
    """
    return f"{1 / ratio:.2f} times as fast as"


def speed_span(latency: Measurement, dense: Measurement) -> str:
    """The range of speedups within the bands of two times.

    Example:
        >>> speed_span(Measurement(2.0, 1.5, 5.0, 40), Measurement(14.0, 10.0, 18.0, 40))
        '2.0x to 12x'
        >>> speed_span(Measurement(8.0, 7.9, 8.1, 40), Measurement(7.7, 7.6, 7.8, 40))
        '0.94x to 0.99x'
    """
    ends = dense.p20_us / latency.p80_us, dense.p80_us / latency.p20_us
    digits = (2 if end < 1.5 else 1 if end < 10 else 0 for end in ends)
    return " to ".join(f"{end:.{count}f}x" for end, count in zip(ends, digits, strict=True))


def layer(dims: Dims) -> str:
    """A layer's sizes with their names.

    Example:
        >>> layer(Dims(768, 3072))
        'in_features=768, out_features=3072'
    """
    return f"in_features={dims.in_features}, out_features={dims.out_features}"


def replayed(device: DeviceRecord) -> str:
    """Sentence on a report that was written without measuring."""
    return (
        "Nothing was measured for this report. It is written again from the study, which was "
        f"measured on {device.name} ({device.device})."
    )


def weights(facts: ChainFacts) -> str:
    """A chain's weights and their share of the dense layer's."""
    return f"{counted(facts.nnz, 'weight')}, {percent(facts.share)} of the dense layer's"
