"""The measurements, one JSON line each, appended at once so that a run can be continued."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ksopt.errors import InvalidInputError

Stage = Literal["search", "uniform", "guided", "final"]


@dataclass(frozen=True)
class Measured:
    """The measurement of a chain.

    Args:
        dims: INxOUT.
        budget: Text of its step.
        stage: "search": a trial of the search. Of the reference: "uniform" (drawn uniformly) or
            "guided" (estimated to be fastest of the remaining chains). "final": timed in turns with
            the best of all stages.
        chain: The chain's text.
        parameters: Its weights.
        rho, d_rho: As in the search.
        latency_us: Median; None if it failed.
        p20_us, p80_us: The 20th and 80th percentile.
        dense_us: The dense layer's median, timed in turns with it.
        repeats: Number of samples.
        predicted_us: By the cost model; None without one.
        factors_us: The time of each factor when its kernel was chosen; None if unknown.
        predicted_factors_us: The cost model's time of each factor.
        reason: The reason it failed, or was stopped after its first repeats.
        seconds: Time that it held the device.
        device: torch's name of the device.
        after: For a final, the number of the reference's chains measured before it.
    """

    dims: str
    budget: str
    stage: Stage
    chain: str
    parameters: int
    rho: float
    d_rho: float
    latency_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    dense_us: float | None = None
    repeats: int = 0
    predicted_us: float | None = None
    factors_us: tuple[float | None, ...] = ()
    predicted_factors_us: tuple[float | None, ...] = ()
    reason: str | None = None
    seconds: float = 0.0
    device: str = ""
    after: int = 0

    @property
    def ratio(self) -> float | None:
        """The latency over the dense layer's."""
        if self.latency_us is None or self.dense_us is None:
            return None
        return self.latency_us / self.dense_us


@dataclass(frozen=True)
class Searched:
    """A completed search.

    Args:
        dims: INxOUT.
        chosen: The fastest chain of each step by the step's text; None if there is none.
        trials: Number of measured chains.
        device_seconds: Time that its trials and its final held the device.
        seconds: From its start to its report; None if it was stopped and continued.
        device_name: Such as "NVIDIA H200".
        versions: Of ksopt and torch.
        final_seconds: The final's part of device_seconds.
    """

    dims: str
    chosen: dict[str, str | None]
    trials: int
    device_seconds: float
    seconds: float | None
    device_name: str
    versions: dict[str, str | None]
    final_seconds: float | None = None


@dataclass(frozen=True)
class TimedWay:
    """One way of computing a factor, timed when its kernel was chosen; cost models fit these.

    Args:
        pattern: Text of the factor's pattern.
        way: A kernel family with its configuration, or one of PyTorch's ways.
        predicted_us: By the cost model; None if it has none for that way.
        us: Measured.
        chosen: Whether chains run with it.
        device: torch's name of the device.
    """

    pattern: str
    way: str
    predicted_us: float | None
    us: float
    chosen: bool
    device: str


@dataclass
class Book:
    """The rows of a file.

    Args:
        path: The file, created if it does not exist.
        settings: Of the measurements; a file of other settings is refused.
    """

    path: Path
    settings: dict[str, Any]
    measured: list[Measured] = field(default_factory=list)
    searched: dict[str, Searched] = field(default_factory=dict)
    ways: list[TimedWay] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def open(cls, path: Path, settings: dict[str, Any]) -> Book:
        """Open a file for reading and appending.

        Raises:
            InvalidInputError: It cannot be used, or holds rows of other settings.
        """
        book = cls(path, settings)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            content = path.read_bytes() if path.exists() else b""
            book._read_all(content)
            if not content:
                book._append([{"kind": "settings", **settings}])
            elif not content.endswith(b"\n"):
                with path.open("ab") as file:
                    file.write(b"\n")  # so that the next row starts a line
        except OSError as error:
            raise InvalidInputError(f"out {path}: {error.strerror}") from None
        return book

    @classmethod
    def read(cls, path: Path) -> Book:
        """Open a file for reading, with any settings.

        Raises:
            InvalidInputError: It cannot be read, or has no settings.
        """
        try:
            content = path.read_bytes()
            first = json.loads(content.split(b"\n", 1)[0])
            if not isinstance(first, dict) or first.pop("kind", None) != "settings":
                raise ValueError
        except OSError as error:
            raise InvalidInputError(f"report {path}: {error.strerror}") from None
        except ValueError:
            raise InvalidInputError(
                f"report {path}: its first line is not the settings that "
                "python docs/experiments/search_regret.py --out writes"
            ) from None
        book = cls(path, first)
        book._read_all(content)
        return book

    def _read_all(self, content: bytes) -> None:
        for line in content.decode(errors="replace").splitlines():
            self._read(line)

    def _read(self, line: str) -> None:
        try:
            row = json.loads(line)
            kind = row.pop("kind")
        except (ValueError, KeyError, AttributeError):
            return  # cut off when the process was killed; it is measured again
        if kind == "settings" and row != self.settings:
            other = ", ".join(
                f"{name} {row.get(name)} there and {value} here"
                for name, value in self.settings.items()
                if row.get(name) != value
            )
            raise InvalidInputError(f"out {self.path} holds other measurements ({other})")
        if kind == "measured":
            several = {
                name: tuple(row.get(name, ())) for name in ("factors_us", "predicted_factors_us")
            }
            self.measured.append(Measured(**{**row, **several}))
        elif kind == "searched":
            self.searched[row["dims"]] = Searched(**row)
        elif kind == "way":
            self.ways.append(TimedWay(**row))

    def add(
        self,
        rows: Iterable[Measured],
        searched: Searched | None = None,
        ways: Iterable[TimedWay] = (),
    ) -> None:
        """Append rows, and the search that they belong to, in one write."""
        with self._lock:
            rows, ways = list(rows), list(ways)
            written: list[dict[str, Any]] = [{"kind": "way", **asdict(one)} for one in ways]
            written += [{"kind": "measured", **asdict(row)} for row in rows]
            if searched is not None:
                written.append({"kind": "searched", **asdict(searched)})
            if written:
                self._append(written)
            self.measured += rows
            self.ways += ways
            if searched is not None:
                self.searched[searched.dims] = searched

    def of(self, dims: str, *stages: Stage) -> list[Measured]:
        """The rows of some stages of one size."""
        return [row for row in self.measured if row.dims == dims and row.stage in stages]

    def reference(self, dims: str) -> list[Measured]:
        """The rows of the reference of one size."""
        return self.of(dims, "uniform", "guided")

    def final(self, dims: str) -> list[Measured]:
        """The rows of the last final of one size; an early final is repeated later."""
        rows = self.of(dims, "final")
        last = max((row.after for row in rows), default=0)
        return [row for row in rows if row.after == last]

    def _append(self, values: Iterable[dict[str, Any]]) -> None:
        text = "".join(json.dumps(value) + "\n" for value in values)
        with self.path.open("ab", buffering=0) as file:  # one call, which cannot be cut in two
            file.write(text.encode())
