"""The keys of a search's results.json that msgspec would write, and its speed beside json's.

    pip install msgspec
    ksopt search --dims 96x128 --budget 25% --trials 20 --out FOLDER
    python docs/experiments/json_costs.py FOLDER

Prints the times to write and read the file, and how many of its keys msgspec would write by itself
from the dataclasses of the search: a key counts as written if any dataclass there has a field of
its name.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ksopt.search import saved_study


def keys_of(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Each key of a document: its place, without numbers in lists, and its name."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield f"{place}.{name}", name
            yield from keys_of(part, f"{place}.{name}")
    elif isinstance(value, list | tuple):
        for part in value:
            yield from keys_of(part, place)


def missing_keys(written: Any, fields: Any) -> tuple[int, list[str]]:
    """The number of keys of a document, and those whose name is nowhere in another."""
    names = {name for _, name in keys_of(fields)}
    places = dict(keys_of(written))
    return len(places), [place for place, name in places.items() if name not in names]


def median_ms(call: Callable[[], object], repeats: int = 50) -> float:
    """The median time of a call."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return 1000 * statistics.median(times)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the measurements."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="the output folder of a search")
    folder = parser.parse_args(arguments).folder
    text = (folder / "results.json").read_text(encoding="utf-8")
    written = json.loads(text)
    fields = msgspec.to_builtins(saved_study.read(str(folder)), enc_hook=_builtin, str_keys=True)
    print(f"results.json: {len(text) / 1000:.0f} kB")
    for name, write, read in (
        ("json", lambda: json.dumps(written, indent=2), lambda: json.loads(text)),
        ("msgspec", lambda: _written(written), lambda: msgspec.json.decode(text)),
    ):
        print(f"{name}: writes in {median_ms(write):.2f} ms, reads in {median_ms(read):.2f} ms")
    count, missing = missing_keys(written, fields)
    print(f"keys: {count}, of which no field of the search's classes holds {len(missing)}:")
    print(*missing, sep="\n")
    return 0


def _builtin(value: Any) -> Any:
    """An object of no dataclass, for msgspec."""
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, Sequence) else str(value)


def _written(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2)


if __name__ == "__main__":
    sys.exit(main())
