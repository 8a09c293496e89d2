"""The measurements of one process: each subject's ways prepared, checked, and timed in turns."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from ksopt import precision
from ksopt.bench import implementations
from ksopt.bench.prepared_implementations import Key, PreparedImplementations
from ksopt.bench.request import INDUCTOR, PRODUCT_ONLY, BenchRequest, Subject
from ksopt.bench.results import FAILED, OURS, WRONG, Row
from ksopt.errors import KsoptError, first_line
from ksopt.kernels.autotuner import products_in_series
from ksopt.kernels.cuda_graph_weights import prepared_weights
from ksopt.measure import cuda_graphs
from ksopt.measure.accuracy import AccuracyCheck, Around
from ksopt.measure.device_health import DeviceLostError, raise_if_lost
from ksopt.measure.roofline import Roofline, measure_roofline
from ksopt.measure.timed_call import TimedCall
from ksopt.measure.timing import Measurement, measure
from ksopt.reference import LAYOUTS, is_batch_last

# Medians to 1 %, which a quiet GPU gives after the fewest repeats.
_PRECISION = 0.01
_FEWEST, _MOST = 7, 200
_SECONDS = 0.2
# The least of many medians is too small by chance. Unless ksopt is faster by the second, it and
# those of PyTorch's ways that are within the first of the fastest are timed again, with care, and
# this counts: samples of 5 us are often of two kinds, a microsecond apart.
_ALIKE, _NEAR = 1.05, 1.03
_CAREFUL_PRECISION, _CAREFUL_MOST, _CAREFUL_SECONDS = 0.003, 1000, 0.5
# PyTorch's ways that are this many times as slow as its fastest are recorded and timed no longer.
_HOPELESS = 2.0
# A way is far behind only if its call takes so long; what loading a kernel takes is little of it.
_LONG_US = 50_000.0
# A way whose multiplications by zero alone take this many times the floor, at the best rate that
# was measured, is not tried: the best of PyTorch in one layout took at most 12 on an H200.
_MOST_FLOORS = 15.0
# The share of the device's memory that a weight with its zeros may take: x, the result and the
# other weights need the rest.
_MOST_MEMORY = 0.125
# The largest block, by bytes of an element. PyTorch's Triton kernel unrolls a whole block, in
# float64 for float32: on an H200's host 128 x 128 compiled within 1 s (float16) and 21 s (float32);
# 256 x 256 in float32 and 512 x 512 in float16 were not compiled after 6 minutes.
_MOST_BSR_BLOCK = {2: 128 * 128, 4: 64 * 64, 8: 64 * 64}
_LARGE = ("dense", "sparse", PRODUCT_ONLY)
_NO_RIVALS = (OURS, PRODUCT_ONLY, *INDUCTOR)


class Bench:
    """The state of a process between subjects: the roofline and one buffer of random numbers.

    Args:
        request: what is measured.
        device: the device of this process; None takes the request's.

    Raises:
        InvalidInputError: the device is not there.
    """

    def __init__(self, request: BenchRequest, device: str | None = None) -> None:
        self.request = request
        self.device = torch.device(device or request.device)
        self.roofline: Roofline = measure_roofline(self.device, request.dtype)
        self._generator = torch.Generator(self.device).manual_seed(request.seed)
        self._buffer = torch.empty(0, dtype=request.torch_dtype, device=self.device)

    def measure(self, subject: Subject) -> list[Row]:
        """Check and time every way on one subject; ksopt's row comes first.

        A way that computes something wrong, or cannot compute, gets a row without a time.

        Raises:
            DeviceLostError: the device no longer works.
        """
        ready = PreparedImplementations()
        try:
            with self.prepared(subject, ready):
                times = self._timed(ready)
        except DeviceLostError as error:
            key = (OURS, self.request.layouts[0])
            ready.reasons.setdefault(key, f"not timed: {error}")
            error.rows = self._rows(subject, {}, ready)
            raise
        return self._rows(subject, times, ready)

    @contextlib.contextmanager
    def prepared(self, subject: Subject, ready: PreparedImplementations) -> Iterator[None]:
        """A scope in which the ways of a subject, checked, can be called.

        Args:
            subject: what is multiplied by.
            ready: gets the calls, and the reasons where there are none.

        Raises:
            DeviceLostError: the device no longer works.
        """
        here = self.request.layouts[0]
        try:
            with torch.no_grad(), self._scope():
                patterns = [*subject.chain] * subject.around.siblings
                weights = [self._random_weight(p.weight_shape) for p in patterns]
                layouts = sorted(LAYOUTS, key=lambda layout: layout != here)
                keys = [(name, layout) for layout in layouts for name in self._names(layout)]
                if subject not in self.request.compiled:
                    keys = [key for key in keys if key[0] not in INDUCTOR]
                inputs = {layout: self._input(subject, layout) for _, layout in keys}
                arounds = {layout: self._around(subject, layout) for layout in inputs}
                checks = {
                    key: AccuracyCheck(x, weights, key, around=arounds[key])
                    for key, x in inputs.items()
                }
                # What keeps most memory comes last: it is what there may be too little for.
                for name, layout in sorted(keys, key=lambda key: key[0] in _LARGE):
                    x, check = inputs[layout], checks[layout]
                    around = arounds[layout]
                    self._prepare((name, layout), subject, x, weights, around, check, ready)
                    if name == OURS and (OURS, layout) in ready.calls:
                        ready.chosen[layout] = implementations.chosen(x, weights, layout, around)
                yield
        finally:
            ready.calls.clear()
            if self.device.type == "cuda":
                with contextlib.suppress(RuntimeError):  # a device that is lost
                    torch.cuda.empty_cache()

    @contextlib.contextmanager
    def _scope(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(precision.fp32_products(self.request.fp32_products))
            if self.device.type == "cuda":
                stack.enter_context(torch.cuda.device(self.device))
            yield

    def _names(self, layout: str) -> list[str]:
        """The ways in a layout; PyTorch's alone where ksopt is timed in the other one only: the
        best in any layout is sought, of what is not compiled."""
        if layout not in self.request.layouts:
            return [name for name in self.request.against if name not in INDUCTOR]
        return [OURS, *self.request.against]

    def _prepare(
        self,
        key: Key,
        subject: Subject,
        x: Tensor,
        weights: Sequence[Tensor],
        around: Around,
        check: AccuracyCheck,
        ready: PreparedImplementations,
    ) -> None:
        """Bind a way, check it, and put it down as a call to time or as a reason not to."""
        name, layout = key
        where = (x.dtype, self.device.type, layout, self._most_elements, around)
        why = implementations.why_not(name, subject.chain, *where)
        why = why or self._why_hopeless(name, subject) or self._why_not_compiled(name, subject)
        if why:
            ready.reasons[key] = why
            return
        try:
            if name == PRODUCT_ONLY:
                call, whole = implementations.product_only(weights[0], x, layout)
                way: implementations.Implementation = lambda _: whole()  # noqa: E731
            else:
                way = implementations.bind(name, weights, layout, around)
                call = partial(way, x)
            if name == "dense" and not subject.is_pattern:
                # A layer of its own: its weights are the product's, rounded.
                chains = implementations.chains_of(weights, around)
                dense = [implementations.dense_weight(one) for one in chains]
                check = AccuracyCheck(x, dense, layout, around=around)
            checked = TimedCall(way, self.device)
            fault = check.fault_of(checked)
            is_rival = fault is None and name not in _NO_RIVALS
            if is_rival and ready.is_far_behind(checked.us, 2 * _HOPELESS, _LONG_US):
                checked(x)  # without what the first call compiled or loaded
            if fault is not None:
                ready.reasons[key] = WRONG + fault
            elif is_rival and ready.is_far_behind(checked.us, 2 * _HOPELESS, _LONG_US):
                ready.times[key] = Measurement.of([checked.us], given_up=True)
            elif self.request.graph:
                ready.calls[key], ready.shares[key] = self._graph(
                    name, layout, way, x, weights, around
                )
            else:
                count = self._products_in_sample(subject, name)
                copies = self._copies(name, layout, weights, around, count - 1)
                calls: list[Callable[[], object]] = [call, *(partial(copy, x) for copy in copies)]
                ready.calls[key] = partial(_in_series, calls) if copies else call
                ready.shares[key] = count
            if is_rival:
                ready.checked_us.append(checked.us)
        except torch.OutOfMemoryError:
            ready.reasons[key] = (FAILED if name == OURS else "") + "out of memory"
        except (RuntimeError, KsoptError) as error:
            ready.reasons[key] = FAILED + first_line(error)
            raise_if_lost(self.device, f"{name} on {subject}")

    def _why_hopeless(self, name: str, subject: Subject) -> str:
        """Why a way's arithmetic alone makes it too slow to try; empty if it does not."""
        # A chain is compared with the dense layer whatever it takes.
        if not subject.is_pattern or self.request.every_way:
            return ""
        elements = implementations.written_elements(name, subject.chain[0])
        flops = 2 * elements * subject.batch * subject.around.siblings
        least_us = self.roofline.floor_us(0, flops)
        floor_us = subject.floor_us(self.roofline)
        if least_us <= _MOST_FLOORS * floor_us:
            return ""
        return (
            f"not tried: with the zeros it takes at least {least_us:.0f} us, "
            f"{least_us / floor_us:.0f} times the floor"
        )

    def _why_not_compiled(self, name: str, subject: Subject) -> str:
        """Why PyTorch's kernel of a way is not compiled; empty if it is, or if there is none."""
        if name != "bsr" or self.device.type != "cuda" or not subject.is_pattern:
            return ""
        _, b, c, _ = subject.chain[0].weight_shape
        takes_triton = all(n >= 16 and n.bit_count() == 1 for n in (b, c))
        most = _MOST_BSR_BLOCK[self.request.torch_dtype.itemsize]
        if not takes_triton or subject.batch % b or b * c <= most:
            return ""
        return (
            f"not tried: PyTorch multiplies blocks of {b} x {c} by a Triton kernel that takes "
            "minutes to compile"
        )

    @property
    def _most_elements(self) -> int:
        """Elements that a way may write out, zeros included."""
        if not self.request.every_way or self.device.type != "cuda":
            return implementations.MOST_ELEMENTS
        memory = torch.cuda.get_device_properties(self.device).total_memory
        return int(memory * _MOST_MEMORY) // self.request.torch_dtype.itemsize

    def _graph(
        self,
        name: str,
        layout: str,
        way: implementations.Implementation,
        x: Tensor,
        weights: Sequence[Tensor],
        around: Around,
    ) -> tuple[Callable[[], object], int]:
        size = sum(weight.nbytes for weight in weights)
        # The dense product reads the zeros as well, so fewer copies fill the cache.
        if name == "dense":
            last = is_batch_last(layout)
            outputs = math.prod(weights[0].shape) // weights[0].shape[2]
            size = x.shape[0 if last else 1] * outputs * around.siblings * x.element_size()
        count = cuda_graphs.copies(size, self.device)
        bound = [way, *self._copies(name, layout, weights, around, count - 1)]
        with prepared_weights():  # as they stay in a served model
            return cuda_graphs.Replay(bound, x), count

    def _copies(
        self, name: str, layout: str, weights: Sequence[Tensor], around: Around, count: int
    ) -> list[implementations.Implementation]:
        """The same way with copies of the weights: memory that no other call has read."""
        return [
            implementations.bind(name, [_stored(one.clone()) for one in weights], layout, around)
            for _ in range(count)
        ]

    def _products_in_sample(self, subject: Subject, name: str) -> int:
        """Several products if x has few rows, on CUDA, as the autotuner times them."""
        if self.device.type != "cuda" or name == PRODUCT_ONLY:
            return 1
        bytes_each = self.request.torch_dtype.itemsize * subject.around.siblings
        return products_in_series([subject.chain], subject.batch, bytes_each)

    def _timed(self, ready: PreparedImplementations) -> dict[Key, Measurement]:
        if not ready.calls:
            return ready.times
        names = {f"{way} {layout}": (way, layout) for way, layout in ready.calls}
        theirs = [n for n, (way, _) in names.items() if way not in _NO_RIVALS]
        try:
            times = self._raced({name: ready.calls[key] for name, key in names.items()}, theirs)
            times.update(self._timed_again(ready, names, times))
        except torch.OutOfMemoryError:
            # Ways that keep much memory leave it to the others.
            large = [key for key in ready.calls if key[0] in _LARGE]
            if large:
                for key in large:
                    del ready.calls[key]
                    ready.reasons[key] = "out of memory"
                torch.cuda.empty_cache()
                return self._timed(ready)
            ready.reasons.update(dict.fromkeys(ready.calls, f"{FAILED}out of memory"))
            return ready.times
        except RuntimeError as error:
            reason = f"{FAILED}while the ways were timed in turns: {first_line(error)}"
            ready.reasons.update(dict.fromkeys(ready.calls, reason))
            raise_if_lost(self.device, "timing")
            return ready.times
        raced = {key: times[name].each_of(ready.shares.get(key, 1)) for name, key in names.items()}
        return raced | ready.times

    def _timed_again(
        self,
        ready: PreparedImplementations,
        names: Mapping[str, Key],
        times: Mapping[str, Measurement],
    ) -> dict[str, Measurement]:
        """ksopt and its fastest rivals in a layout, unless it is clearly faster than they are."""
        again: dict[str, Measurement] = {}
        for ours, (way, layout) in names.items():
            rivals = {
                name: times[name].median_us
                for name, key in names.items()
                if key[1] == layout and key[0] not in _NO_RIVALS
            }
            best_us = min(rivals.values(), default=math.inf)
            if way != OURS or times[ours].median_us * _NEAR < best_us or not rivals:
                continue
            alike = [name for name, us in rivals.items() if us <= _ALIKE * best_us]
            calls = {name: ready.calls[names[name]] for name in (ours, *alike)}
            again |= measure(
                calls,
                self.device,
                max_seconds=_CAREFUL_SECONDS,
                min_repeats=_FEWEST,
                max_repeats=_CAREFUL_MOST,
                warmup_calls=1,
                precision=_CAREFUL_PRECISION,
            )
        return again

    def _raced(
        self, calls: Mapping[str, Callable[[], object]], rivals: Sequence[str]
    ) -> dict[str, Measurement]:
        return measure(
            calls,
            self.device,
            max_seconds=_SECONDS,
            min_repeats=_FEWEST,
            max_repeats=_MOST,
            warmup_calls=1,
            precision=_PRECISION,
            hopeless=_HOPELESS,
            rivals=rivals,
        )

    def _rows(
        self,
        subject: Subject,
        times: dict[Key, Measurement],
        ready: PreparedImplementations,
    ) -> list[Row]:
        keys = sorted({**times, **ready.reasons}, key=lambda key: key[0] != OURS)
        return [
            self._row(
                subject,
                key,
                times.get(key),
                ready.reasons.get(key, ""),
                ready.chosen.get(key[1], "") if key[0] == OURS else "",
            )
            for key in keys
        ]

    def _row(
        self,
        subject: Subject,
        key: Key,
        latency: Measurement | None,
        reason: str,
        chosen: str,
    ) -> Row:
        way, layout = key
        dtype = self.request.dtype
        if latency is not None and latency.given_up:
            reason = (
                f"timed {_times(latency.repeats)} only: another of PyTorch's ways is more than "
                f"{_HOPELESS:g} times as fast"
            )
        elif latency is not None and latency.is_host_late:
            reason = "the host was late for the samples: the time holds a part of the host's"
        return Row(
            subject=subject,
            way=way,
            layout=layout,
            bytes_moved=subject.bytes_moved(dtype),
            flops=subject.flops(),
            floor_us=subject.floor_us(self.roofline),
            latency=latency,
            reason=reason,
            chosen=chosen,
            predicted_us=implementations.predicted_us(way, subject, dtype, self.device, layout),
        )

    def _random_weight(self, shape: tuple[int, int, int, int]) -> Tensor:
        return _stored(self._random(*shape).mul_(shape[2] ** -0.5))

    def _around(self, subject: Subject, layout: str) -> Around:
        """Random operands of what is computed with the product."""
        problem = subject.problem(self.request.torch_name, is_batch_last(layout))
        after, shape = problem.epilogue, (subject.batch, problem.out_features)
        bias = self._random(problem.product_features) if after.bias else None
        shape = shape[::-1] if problem.batch_last else shape
        residual = self._random(*shape) if after.residual else None
        return Around(bias, after.activation, residual, problem.siblings)

    def _random(self, *shape: int) -> Tensor:
        numbers = torch.empty(shape, dtype=self.request.torch_dtype, device=self.device)
        return numbers.normal_(generator=self._generator)

    def _input(self, subject: Subject, layout: str) -> Tensor:
        """Random x as a view of the buffer, which grows to the largest x and is filled once."""
        features, batch = subject.chain.in_features, subject.batch
        if self._buffer.numel() < features * batch:
            self._buffer = self._buffer.new_empty(0)
            grown = self._buffer.new_empty(features * batch)
            self._buffer = grown.normal_(generator=self._generator)
        x = self._buffer[: features * batch]
        return x.view(features, batch) if is_batch_last(layout) else x.view(batch, features)


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _in_series(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _stored(weight: Tensor) -> Tensor:
    """The weight as a layer's parameter, whose prepared forms may be cached."""
    return torch.nn.Parameter(weight, requires_grad=False)
