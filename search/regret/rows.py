"""What was measured, one JSON line each, appended as it comes: a run goes on where one stopped."""

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
    """A chain that was measured.

    Args:
        dims: INxOUT.
        budget: Text of the step that it belongs to.
        stage: "search": a trial of the search in question. Of the reference: "uniform" (drawn
            uniformly) or "guided" (of what was left, estimated to be fastest). "final": timed in
            turns with the best of all stages.
        chain: The chain's text.
        parameters: Its weights.
        rho, d_rho: As the search has them.
        latency_us: Median; None if it failed.
        p20_us, p80_us: The band.
        dense_us: The dense layer's median, in turns with it.
        repeats: Samples.
        predicted_us: By the cost model; None without one.
        factors_us: What the choice of each factor's kernel measured; None where it was not known.
        reason: Why it failed, or was given up after its first repeats.
        seconds: For how long it held the device.
        device: torch's name of it.
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
    reason: str | None = None
    seconds: float = 0.0
    device: str = ""

    @property
    def ratio(self) -> float | None:
        """Latency over the dense layer's."""
        if self.latency_us is None or self.dense_us is None:
            return None
        return self.latency_us / self.dense_us


@dataclass(frozen=True)
class Searched:
    """A search that ended.

    Args:
        dims: INxOUT.
        chosen: The fastest chain of each step by the step's text; None where there was none.
        trials: Chains that it measured.
        device_seconds: For how long it held the device: its trials and its final.
        seconds: From its start to its report.
        device_name: Such as "NVIDIA H200".
        versions: Of ksopt and torch, for the record.
    """

    dims: str
    chosen: dict[str, str | None]
    trials: int
    device_seconds: float
    seconds: float
    device_name: str
    versions: dict[str, str | None]


@dataclass
class Book:
    """All rows of a file.

    Args:
        path: The file; made if it is not there.
        settings: What was measured; a file of other settings is refused.
    """

    path: Path
    settings: dict[str, Any]
    measured: list[Measured] = field(default_factory=list)
    searched: dict[str, Searched] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def open(cls, path: Path, settings: dict[str, Any]) -> Book:
        """The file's rows.

        Raises:
            InvalidInputError: It cannot be used, or holds rows of other settings.
        """
        book = cls(path, settings)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            for line in lines:
                book._read(line)
            if not lines:
                book._write({"kind": "settings", **settings})
            elif not path.read_bytes().endswith(b"\n"):
                with path.open("a", encoding="utf-8") as file:
                    file.write("\n")  # so that the next row is a line of its own
        except OSError as error:
            raise InvalidInputError(f"out {path}: {error.strerror}") from None
        return book

    def _read(self, line: str) -> None:
        try:
            row = json.loads(line)
            kind = row.pop("kind")
        except (ValueError, KeyError, AttributeError):
            return  # cut off when the process was killed: it is measured again
        if kind == "settings" and row != self.settings:
            other = ", ".join(
                f"{name} {row.get(name)} there and {value} here"
                for name, value in self.settings.items()
                if row.get(name) != value
            )
            raise InvalidInputError(f"out {self.path} holds other measurements ({other})")
        if kind == "measured":
            self.measured.append(Measured(**{**row, "factors_us": tuple(row["factors_us"])}))
        elif kind == "searched":
            self.searched[row["dims"]] = Searched(**row)

    def add(self, rows: Iterable[Measured], searched: Searched | None = None) -> None:
        """Keep rows, and then the search that they belong to."""
        with self._lock:
            for row in rows:
                self.measured.append(row)
                self._write({"kind": "measured", **asdict(row)})
            if searched is not None:
                self.searched[searched.dims] = searched
                self._write({"kind": "searched", **asdict(searched)})

    def of(self, dims: str, *stages: Stage) -> list[Measured]:
        """Rows of some stages of one size."""
        return [row for row in self.measured if row.dims == dims and row.stage in stages]

    def _write(self, value: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(value) + "\n")
