"""The digest of executed code: what changes it, what does not, and where it is stored."""

import ast
import json
import os
from pathlib import Path

import pytest

from ksopt.jit import cache, source_digest

SOURCE = '''"""Rows of a tile."""

# Two warps.
ROWS = 32
"""Of a tile, in rows."""


class Tile:
    """A tile."""

    width: int = 4  # columns

    def area(self, scale=1.5, *, name="a", **rest):
        """Its area."""
        text = f"{name}:{scale:.2f}"
        return {**rest, text: self.width * ROWS, None: b"a"}


def undefined():
    """Nothing."""
'''


def digest_of(source: str) -> bytes:
    return source_digest.executed_code(source.encode())


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("Rows of a tile", "Columns of a tile"),
        ("# Two warps.\n", ""),
        ("Of a tile, in rows.", "Of a tile."),
        ("  # columns", ""),
        ('        """Its area."""\n', ""),
        ('    """A tile."""\n', ""),
        ('"""Nothing."""', "..."),
        ("scale=1.5, *, ", "\n        scale=1.5,\n        *,\n        "),
    ],
)
def test_comments_docstrings_and_layout_do_not_count(before, now):
    assert before in SOURCE
    assert digest_of(SOURCE.replace(before, now)) == digest_of(SOURCE)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("ROWS = 32", "ROWS = 33"),
        ("ROWS = 32", "ROWS = 32.0"),
        ("ROWS = 32", 'ROWS = "32"'),
        ("width: int = 4", "width: int = 4 + 0"),
        ("width: int", "width: float"),
        ("scale=1.5", "scale=1.25"),
        ("*, name", "name"),
        (":.2f", ":.3f"),
        ('b"a"', '"a"'),
        ("**rest, text", "text"),
        ("* ROWS", "+ ROWS"),
        ('"""Nothing."""', 'print("Nothing.")'),
        ('"""Nothing."""', 'f"""{ROWS}"""'),
    ],
)
def test_what_is_executed_counts(before, now):
    assert before in SOURCE
    assert digest_of(SOURCE.replace(before, now)) != digest_of(SOURCE)


@pytest.mark.parametrize(
    "source", [b"def (", b"\xff\xfe", b"x = 1\0", b"x = " + b"-" * 50_000 + b"1"]
)
def test_a_file_that_does_not_parse_counts_as_its_bytes(source):
    assert source_digest.executed_code(source) == source


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path))
    source_digest.digest.cache_clear()
    yield cache.store_root() / "code"
    source_digest.digest.cache_clear()


def parsed(monkeypatch) -> list[bytes]:
    """The sources that are parsed from now on."""
    sources, parse = [], ast.parse
    monkeypatch.setattr(
        source_digest.ast, "parse", lambda source: (sources.append(source), parse(source))[1]
    )
    return sources


def test_files_are_parsed_once_by_all_processes(own_cache, monkeypatch):
    sources = parsed(monkeypatch)
    first = source_digest.digest("ksopt.jit", "ksopt.batched")
    assert len(sources) == 1 + len([*Path(cache.__file__).parent.rglob("*.py")])
    sources.clear()
    source_digest.digest.cache_clear()  # as another process
    assert source_digest.digest("ksopt.batched", "ksopt.jit") == first
    assert sources == []


@pytest.mark.parametrize(
    "content", [b"", b"0123", b"\xff" * 16, b'"0123456789abcdeg"', b'["0123456789abcdef"]']
)
def test_a_stored_digest_that_is_none_is_computed_again(own_cache, content):
    first = source_digest.digest("ksopt.batched")
    (file,) = own_cache.iterdir()
    file.write_bytes(content)
    source_digest.digest.cache_clear()
    assert source_digest.digest("ksopt.batched") == first
    assert json.loads(file.read_text()) == first


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="permissions are those of POSIX")
def test_a_stored_digest_that_others_can_write_is_not_read(own_cache):
    first = source_digest.digest("ksopt.batched")
    (file,) = own_cache.iterdir()
    file.write_text(json.dumps("0" * 16))
    file.chmod(0o666)
    source_digest.digest.cache_clear()
    assert source_digest.digest("ksopt.batched") == first


def test_without_a_cache_the_digest_is_the_same(own_cache, monkeypatch, tmp_path):
    first = source_digest.digest("ksopt.batched")
    (tmp_path / "file").touch()
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path / "file"))
    source_digest.digest.cache_clear()
    assert source_digest.digest("ksopt.batched") == first
