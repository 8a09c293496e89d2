"""The C++ host library: built, cached, and done without."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch

from ksopt.errors import CompilationError, UnavailableError
from ksopt.jit import cache, host


@pytest.fixture(autouse=True)
def shared_cache(tmp_path, monkeypatch):
    """Every test has a cache of its own; where that of the whole run is."""
    shared = os.environ["KSOPT_CACHE_DIR"]
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_warned", set())
    host._load.cache_clear()
    monkeypatch.setattr(host, "is_loaded", lambda: False)
    monkeypatch.setattr(host, "_followers", [])  # modules that other tests imported may wait
    yield shared
    host._load.cache_clear()


@pytest.fixture
def compiler():
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler on this machine")


@pytest.mark.slow  # optimised; tests/csrc compiles the same files without
@pytest.mark.usefixtures("compiler")
def test_it_builds_and_is_cached_and_loads_once_a_process(shared_cache, monkeypatch):
    """It loads in a process of its own: two of them crash torch. A run builds it once."""
    monkeypatch.setenv("KSOPT_CACHE_DIR", shared_cache)
    first = host.build()
    assert first.data.startswith(b"\x7fELF")
    monkeypatch.setattr(host, "_compile", lambda *_: pytest.fail("compiled again"))
    assert host.build() == first
    script = """
import os, torch
from ksopt.jit import host
host._compile = None  # what is cached is loaded
assert host.load() is None
plan = torch.ops.ksopt_host.add_plan(1, 8, False, 32, 0, 64, 1, 1, False, -1)
assert torch.ops.ksopt_host.add_plan(1, 8, False, 32, 0, 64, 1, 1, False, -1) == plan + 1
os.environ["KSOPT_CACHE_DIR"] += "-other"
host._load.cache_clear()  # as if the module were imported again
assert host.load() is None
assert torch.ops.ksopt_host.add_plan(1, 8, False, 32, 0, 64, 1, 1, False, -1) == plan + 2
assert not os.path.exists(os.environ["KSOPT_CACHE_DIR"])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("compiler")
def test_environments_with_the_same_torch_share_it(monkeypatch):
    here = host._key("c++", {}, host._flags())
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__file__", "/elsewhere/torch/__init__.py")
        assert host._key("c++", {}, host._flags()) == here
    monkeypatch.setattr(torch.version, "git_version", "another")
    assert host._key("c++", {}, host._flags()) != here


@pytest.mark.usefixtures("compiler")
def test_it_loads_where_the_cache_cannot_keep_it(monkeypatch):
    monkeypatch.setenv("KSOPT_CACHE_DIR", "/proc/ksopt-cache")
    monkeypatch.setattr(host, "_compile", lambda *_: b"built")
    loaded = []
    monkeypatch.setattr(
        torch.ops, "load_library", lambda path: loaded.append(Path(path).read_bytes())
    )
    with pytest.warns(RuntimeWarning, match="cannot be used"):
        assert host.load() is None
    assert loaded == [b"built"]


def test_a_missing_compiler_is_one_warning_and_a_reason(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UnavailableError, match="no-such-compiler"):
        host.build()
    with pytest.warns(RuntimeWarning, match="CXX") as caught:
        reason = host.load()
    assert len(caught) == 1
    assert "no C++ compiler" in reason
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert host.load() == reason


@pytest.mark.usefixtures("compiler")
def test_a_failed_compile_carries_the_compilers_words():
    broken = {"ops.cpp": "int f() { return no_such_name; }"}
    with pytest.raises(CompilationError, match="no_such_name"):
        host._compile("c++", broken, ["-shared", "-fPIC"])


def test_every_source_is_compiled_once():
    sources = host._sources()
    units = host._units(sources)
    alone = [name for name in units if name in sources]
    included = re.findall(r'#include "(.*\.cpp)"', units["with_aten.cpp"])
    assert sorted(alone + included) == [name for name in sources if name.endswith(".cpp")]


def test_a_missing_ninja_is_a_sentence(monkeypatch, tmp_path):
    import ninja

    monkeypatch.setattr(ninja, "BIN_DIR", str(tmp_path))
    monkeypatch.setattr(host.shutil, "which", lambda _: None)
    with pytest.raises(UnavailableError, match="Install the Python package ninja"):
        host.ninja_program()


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("how", ["theirs", "open to all"])
def test_a_library_that_another_user_planted_is_not_loaded(how, tmp_path, monkeypatch):
    if how == "theirs" and os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    with monkeypatch.context() as planting:
        planting.setattr(host, "_compile", lambda *_: b"planted")
        planted = host.build()  # with the right key and the right checksum
    if how == "theirs":
        os.chown(planted.path.parent, 54321, -1)
    else:
        planted.path.parent.chmod(0o777)
    monkeypatch.setattr(host, "_compile", lambda *_: b"our own")
    loaded = []
    monkeypatch.setattr(
        torch.ops, "load_library", lambda path: loaded.append((path, Path(path).read_bytes()))
    )
    with pytest.warns(RuntimeWarning, match=r"another user|other users"):
        assert host.load() is None
    ((path, data),) = loaded
    assert data == b"our own"
    assert not Path(path).is_relative_to(tmp_path / "cache")


def test_where_temporary_files_are_in_others_hands_nothing_is_loaded(tmp_path, monkeypatch):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    monkeypatch.setattr(torch.ops, "load_library", lambda path: pytest.fail(f"loaded {path}"))
    with pytest.warns(RuntimeWarning, match="shared is writable by other users"):
        reason = host.load()
    assert "shared is writable by other users" in reason


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say where a process runs")
def test_nothing_that_a_killed_ninja_has_started_is_left(tmp_path, monkeypatch):
    """A compiler would run on for as long as it takes, half a minute on a busy machine."""
    compiler = tmp_path / "slow-c++"
    compiler.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/number\nexec sleep 100\n")
    compiler.chmod(0o755)
    ended = []

    def build():
        try:
            host._compile(str(compiler), {"one.cpp": ""}, [])
        except CompilationError as error:
            ended.append(error)

    thread = threading.Thread(target=build)
    thread.start()
    number = tmp_path / "number"
    wait_until(lambda: number.exists() and number.read_text().strip())
    sleeping = int(number.read_text())
    os.kill(ninja_above(sleeping), signal.SIGKILL)
    thread.join(20)
    assert len(ended) == 1
    wait_until(lambda: not Path(f"/proc/{sleeping}").exists())


def ninja_above(number):
    """The ninja that has started a process, or what has started it."""
    while number > 1:
        number = int(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1])
        if Path(f"/proc/{number}/comm").read_text().strip() == "ninja":
            return number
    raise AssertionError("no ninja")


def wait_until(is_so):
    end = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)
