"""Changes that shorten searches: the same code repeats less and waits for no disk."""

import sqlite3
from typing import Any

from optuna.storages import RDBStorage

from ksopt.report import drawing_style

drawn = drawing_style._drawn


class Unsynced(sqlite3.Connection):
    """A file that is lost with the machine alone: a killed process loses nothing."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.execute("PRAGMA synchronous = OFF")


def unsynced(url: str, engine_kwargs: dict[str, Any]) -> RDBStorage:
    """Optuna's storage, whose commits do not wait until a disk has them."""
    if url.startswith("sqlite"):
        connect = engine_kwargs["connect_args"] | {"factory": Unsynced}
        engine_kwargs = engine_kwargs | {"connect_args": connect}
    return RDBStorage(url, engine_kwargs=engine_kwargs)


def drawn_small(drawing: str, width: int) -> bytes:
    """A picture of a tenth of the width, where it is not one of a letter."""
    return drawn(drawing, max(width // 10, 40))


_spaces: dict[tuple[Any, ...], Any] = {}


def listed_once(request: Any) -> Any:
    """The space of a request, cached for the next one that may have the same chains."""
    from ksopt.operators.registry import KRONECKER
    from ksopt.search.space.space import build

    if request.structures != (KRONECKER,):  # the others' classes come and go with a test's module
        return build(request)
    names = ("dims", "dtype", "layout", "budgets", "steps", "min_use", "min_rank", "max_factors")
    names += ("families", "block_sizes", "chainable", "aligned", "train", "seed")
    key = tuple(getattr(request, name) for name in names)
    if key not in _spaces:
        _spaces[key] = build(request)
    return _spaces[key]


CHANGES = {
    "ksopt.search.objectives._TRIAL_SECONDS": 0.02,
    "ksopt.search.objectives.FINAL_SECONDS": 0.1,
    # So short measurements are noisy: a slow moment must not get a chain pruned.
    "ksopt.search.pruning.MARGIN": 1e6,
    # Overwriting a large cache between repeats is most of the time of a tiny layer's trial.
    "ksopt.measure.timers.flush_bytes": lambda cache_bytes: 2**16,
    "ksopt.measure.roofline._CPU_SIDES": (256,),
    "ksopt.search.storage.RDBStorage": unsynced,
    "ksopt.search.study.build": listed_once,
    # The pictures of a report are a sixth of a tiny search.
    "ksopt.report.drawing_style._drawn": drawn_small,
}
