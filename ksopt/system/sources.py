"""A digest of source files: what was measured by other code is not believed."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable

_ENDINGS = (".py", ".cuh", ".hpp", ".cpp")


@functools.cache
def digest(*names: str) -> str:
    """Sixteen hexadecimal digits over sources of ksopt.

    Rather than a commit, which misses edits that are not committed, is unknown in an installed
    package, and changes with every document.

    Args:
        names: Packages, with all that is in them ("ksopt.kernels"), and modules ("ksopt.ops").
    """
    total = hashlib.sha256()
    for name in sorted(set(names)):
        for path, file in sorted(_files(name), key=lambda one: one[0]):
            total.update(path.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()[:16]


def _files(name: str) -> Iterator[tuple[str, Traversable]]:
    parent, _, own = name.rpartition(".")
    if parent:
        module = resources.files(parent) / f"{own}.py"
        if module.is_file():
            yield f"{name}.py", module
            return
    yield from _within(name, resources.files(name))


def _within(path: str, folder: Traversable) -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        own = f"{path}/{entry.name}"
        if entry.is_dir():
            yield from _within(own, entry)
        elif entry.name.endswith(_ENDINGS):
            yield own, entry
