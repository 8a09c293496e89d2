"""Files that take long to make: the processes of a run make each of them once."""

from collections.abc import Callable
from pathlib import Path

from ksopt import settings
from ksopt.system import locks


def built_once(name: str, build: Callable[[Path], None]) -> Path:
    """A file that the processes of a run share.

    Args:
        name: what no other file of the tests is called.
        build: makes it at the path that it is given; what it makes beside it stays there.
    """
    folder = settings.cache_dir() / "built-by-tests"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    with locks.Lock(folder / f"{name}.lock"):
        if not path.exists():
            aside = folder / f"unfinished-{name}"
            build(aside)
            aside.rename(path)
    return path
