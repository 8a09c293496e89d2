"""A digest of the code that is executed: measurements by other code are not reused.

Of Python, the syntax tree counts, without comments and docstrings; of other sources, all bytes.
Parsing takes some 0.3 s for the kernels and what times them. The digest is therefore stored in the
cache under the digest of the files' bytes, so that one process parses after an edit, and the others
only read the files: some 10 ms.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import json
import os
import re
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable

from ksopt.jit import cache
from ksopt.system import temporary_files

_ENDINGS = (".py", ".cuh", ".hpp", ".cpp")
_FORM = 1  # another way to read the syntax tree needs another number


@functools.cache
def digest(*names: str) -> str:
    """Sixteen hexadecimal digits over sources of ksopt; comments and docstrings do not count.

    A commit would not do: it misses edits that are not committed, is unknown in an installed
    package, and changes with every document.

    Args:
        names: Packages, with all that is in them ("ksopt.kernels"), and modules ("ksopt.ops").
    """
    files = {path: file.read_bytes() for name in names for path, file in _files(name)}
    of_bytes = _total(files)
    stored = _stored(of_bytes)
    if stored is not None:
        return stored
    executed = {
        path: executed_code(content) if path.endswith(".py") else content
        for path, content in files.items()
    }
    of_code = _total(executed)
    _store(of_bytes, of_code)
    return of_code


def executed_code(source: bytes) -> bytes:
    """The syntax tree of a Python file without comments, docstrings and positions.

    A file that does not parse is returned as it is.

    Example:
        >>> executed_code(b"x = 1  # rows") == executed_code(b"x = (1)")
        True
        >>> executed_code(b"x = 1") == executed_code(b"x = 2")
        False
    """
    try:
        parts: list[str] = []
        _add_node(ast.parse(source), parts)
        return "\n".join(parts).encode("utf-8", "surrogatepass")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return source


def _add_node(node: ast.AST, parts: list[str]) -> None:
    """Add a node and all below it; `ast.dump` takes longer, and shows docstrings."""
    parts.append(type(node).__name__)
    for field in node._fields:
        value = getattr(node, field, None)
        if isinstance(value, list):
            value = [item for item in value if not _is_docstring(item)]
        if value is None or value == []:
            continue  # later versions of Python have more fields, mostly without a value
        parts.append(field)
        if isinstance(value, list):
            for item in value:
                if isinstance(item, ast.AST):
                    _add_node(item, parts)
                else:
                    parts.append(repr(item))
            parts.append("]")
        elif isinstance(value, ast.AST):
            _add_node(value, parts)
        else:
            parts.append(repr(value))


def _is_docstring(node: object) -> bool:
    """Whether a node is a constant as a statement: a docstring, of an attribute too, or ``...``."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _total(files: dict[str, bytes]) -> str:
    total = hashlib.sha256(b"%d" % _FORM)
    for path, content in sorted(files.items()):
        total.update(path.encode() + b"\0" + hashlib.sha256(content).digest())
    return total.hexdigest()[:16]


def _stored(of_bytes: str) -> str | None:
    """The stored digest of files; None if there is none that can be trusted."""
    try:
        text = json.loads(cache.read_private(cache.store_root() / "code" / f"{of_bytes}.json"))
    except (OSError, ValueError, cache.CacheUnusable):
        return None
    return text if isinstance(text, str) and re.fullmatch("[0-9a-f]{16}", text) else None


def _store(of_bytes: str, of_code: str) -> None:
    """Write a file into place in one step, if possible; the tuning cache warns if it is not."""
    folder = cache.store_root() / "code"
    with contextlib.suppress(OSError, cache.CacheUnusable):
        cache.make_private(folder)
        with temporary_files.new_file(folder, ".aside-") as (handle, aside):
            os.write(handle, json.dumps(of_code).encode())
            aside.replace(folder / f"{of_bytes}.json")


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
