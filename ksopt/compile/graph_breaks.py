"""Graph breaks: lines at which Dynamo stops following a model, so that no backend sees them.

Dynamo reports them only in its log, so they are read from there.
"""

from __future__ import annotations

import linecache
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ksopt.compile.sites import Place, is_author_code

_EXPLAIN_FILE = str(Path(__file__).with_name("explain.py"))
_LOGGER = "torch._dynamo.symbolic_convert.__graph_breaks"
_WHERE = re.compile(r"in user code at (.+):(\d+)$", re.MULTILINE)
_FRAME = re.compile(r'^\s*File "(.+)", line (\d+), in ', re.MULTILINE)


@dataclass(frozen=True)
class GraphBreak:
    """A line that Dynamo could not follow.

    Args:
        place: the line.
        caller: the author's line that called the function it is in; empty where that is unknown.
        reason: Dynamo's message.
    """

    place: Place
    caller: Place
    reason: str

    def __str__(self) -> str:
        code = f" (`{self.place.code}`)" if self.place.code else ""
        called = f", called at {self.caller} (`{self.caller.code}`)" if self.caller.file else ""
        return (
            f"the graph breaks at {self.place}{code}{called}: {self.reason}. No product that is "
            "computed there is seen. If a function there multiplies by weights, ksopt.patch puts "
            'one that can be followed in its place: docs/backend.md, "Code that Dynamo refuses"'
        )

    def to_json(self) -> dict[str, Any]:
        """The graph break as JSON values."""
        return asdict(self)


@contextmanager
def graph_breaks() -> Iterator[list[GraphBreak]]:
    """The graph breaks of whatever is compiled inside the block, each line once."""
    by_line: dict[tuple[str, int], GraphBreak] = {}

    class Reader(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            graph_break = _read(record.getMessage())
            if graph_break is not None:
                by_line.setdefault((graph_break.place.file, graph_break.place.line), graph_break)
                listed[:] = by_line.values()

    listed: list[GraphBreak] = []
    logger, reader = logging.getLogger(_LOGGER), Reader()
    level, propagates = logger.level, logger.propagate
    if not logger.isEnabledFor(logging.DEBUG):
        logger.propagate = False  # no other handler should receive them
        logger.setLevel(logging.DEBUG)
    logger.addHandler(reader)
    try:
        yield listed
    finally:
        logger.removeHandler(reader)
        logger.setLevel(level)
        logger.propagate = propagates


def _read(message: str) -> GraphBreak | None:
    where = _WHERE.search(message)
    if where is None:
        return None
    frames = [(file, int(line)) for file, line in _FRAME.findall(message)]
    callers = [at for at, (file, _) in enumerate(frames) if file == _EXPLAIN_FILE]
    # The callers of ksopt.explain are no part of the model.
    frames = frames[callers[-1] + 1 :] if callers else frames
    places = [_place(file, line) for file, line in frames if is_author_code(file)]
    broken = _place(where[1], int(where[2]))
    if broken in places:
        places = places[: places.index(broken)]
    caller = places[-1] if places else Place()
    return GraphBreak(broken, caller, _reason(message))


def _place(file: str, line: int) -> Place:
    return Place(file, line, linecache.getline(file, line).strip())


def _reason(message: str) -> str:
    """The reason in Dynamo's message: the paragraph after its preface."""
    text = message.partition("Reason: ")[2]
    before, _, after = text.partition("\n\n")
    is_preface = before.startswith(("Encountered graph break", "Failed to handle"))
    lines = (after if is_preface and after else before).strip().splitlines()
    return lines[0].strip().rstrip(".") if lines else "it does not say why"
