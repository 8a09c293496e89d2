"""The artifact cache under the conditions that break caches."""

import errno
import json
import os
import resource
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest

from ksopt.jit import cache
from ksopt.jit.cache import ArtifactKey, get

KEY = ArtifactKey.of("sm_90a", "kernel.cubin", {"source": "code", "flags": "-O3"})


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(folder))
    monkeypatch.setattr(cache, "_warned", set())
    return folder


def never() -> bytes:
    raise AssertionError("built again though the cache holds it")


def only_artifact(folder: Path) -> Path:
    (actual,) = folder.rglob("kernel.cubin")
    return actual


def in_new_process(code: str, **variables: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_second_use_does_not_build():
    first = get(KEY, lambda: b"binary")
    second = get(KEY, never)
    assert first.data == second.data == b"binary"
    assert second.path == first.path
    assert second.path.read_bytes() == b"binary"


def test_key_json_records_the_parts_of_the_artifact(own_cache):
    get(KEY, lambda: b"binary")
    record = json.loads((only_artifact(own_cache).parent / "key.json").read_text())
    assert dict(record["parts"]) == {"source": "code", "flags": "-O3"}
    assert record["arch"] == "sm_90a"


@pytest.mark.parametrize("part", ["source", "flags"])
def test_every_part_of_the_key_counts(part):
    other = ArtifactKey.of("sm_90a", "kernel.cubin", {**dict(KEY.parts), part: "changed"})
    get(KEY, lambda: b"one")
    assert get(other, lambda: b"two").data == b"two"
    assert get(KEY, never).data == b"one"


def test_the_order_of_parts_does_not_count():
    assert KEY == ArtifactKey.of("sm_90a", "kernel.cubin", {"flags": "-O3", "source": "code"})


@pytest.mark.parametrize(
    "damage", ["truncated", "altered", "no key.json", "half a key.json", "emptied"]
)
def test_a_corrupt_artifact_is_rebuilt(own_cache, damage):
    get(KEY, lambda: b"binary")
    artifact = only_artifact(own_cache)
    record = artifact.parent / "key.json"
    if damage == "truncated":
        artifact.write_bytes(b"bin")
    elif damage == "altered":
        artifact.write_bytes(b"binarY")
    elif damage == "no key.json":
        record.unlink()
    elif damage == "half a key.json":
        record.write_text(record.read_text()[:20])
    else:
        artifact.unlink()
        record.unlink()
    assert get(KEY, lambda: b"binary again").data == b"binary again"
    assert get(KEY, never).data == b"binary again"


def test_a_failed_build_leaves_nothing_and_is_tried_again(own_cache):
    with pytest.raises(ValueError, match="no"):
        get(KEY, lambda: (_ for _ in ()).throw(ValueError("no")))
    assert not list(own_cache.rglob("kernel.cubin"))
    assert get(KEY, lambda: b"binary").data == b"binary"


def test_the_cache_is_private_to_the_user(own_cache):
    get(KEY, lambda: b"binary")
    assert own_cache.stat().st_mode & 0o077 == 0


def test_a_cache_that_others_may_write_is_not_used(own_cache):
    own_cache.mkdir()
    own_cache.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="writable by other users"):
        assert get(KEY, lambda: b"binary").path is None
    assert not list(own_cache.rglob("kernel.cubin"))


@pytest.mark.parametrize("place", ["/proc/ksopt-cache", "{file}/cache"])
def test_a_cache_that_cannot_be_written_costs_one_warning(place, tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("KSOPT_CACHE_DIR", place.format(file=file))
    with pytest.warns(RuntimeWarning, match="KSOPT_CACHE_DIR"):
        assert get(KEY, lambda: b"binary").data == b"binary"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert get(KEY, lambda: b"binary").data == b"binary"


def test_a_filled_read_only_cache_is_used_without_writing(own_cache, monkeypatch):
    get(KEY, lambda: b"binary")

    def refuse(*_args, **_kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    def only_reading(path, flags, *others, opened=os.open, **named):
        return refuse() if flags & (os.O_WRONLY | os.O_RDWR) else opened(path, flags, *others)

    monkeypatch.setattr(cache.os, "open", only_reading)
    for name in ("mkdir", "rename"):
        monkeypatch.setattr(cache.os, name, refuse)
    assert get(KEY, never).data == b"binary"


def test_a_full_disk_publishes_nothing(own_cache, monkeypatch):
    def half_then_full(path, data):
        path.write_bytes(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache, "_write", half_then_full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        artifact = get(KEY, lambda: b"binary")
    assert artifact == cache.Artifact(b"binary", None)
    assert not list(own_cache.rglob("kernel.cubin"))
    assert not list(own_cache.rglob(".aside-*"))


def test_a_real_write_limit_publishes_nothing(own_cache):
    # The kernel refuses the write in the middle of the file, as a full disk does.
    code = """
        import resource, signal, warnings
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        from ksopt.jit.cache import ArtifactKey, get
        key = ArtifactKey.of("sm_90a", "kernel.cubin", {"source": "code"})
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        warnings.simplefilter("ignore")
        artifact = get(key, lambda: bytes(5000))
        assert artifact.data == bytes(5000) and artifact.path is None
    """
    process = in_new_process(code)
    assert process.wait() == 0, process.stderr.read()
    assert not list(own_cache.rglob("kernel.cubin"))
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_ten_processes_build_once(tmp_path):
    log = tmp_path / "builds"
    code = f"""
        import os, time
        from ksopt.jit.cache import ArtifactKey, get
        key = ArtifactKey.of("sm_90a", "kernel.cubin", {{"source": "race"}})
        def build():
            with open({str(log)!r}, "a") as file:
                file.write("built\\n")
            time.sleep(0.5)
            return b"binary" * 1000
        artifact = get(key, build)
        assert artifact.data == b"binary" * 1000 and artifact.path is not None
    """
    processes = [in_new_process(code) for _ in range(10)]
    for process in processes:
        assert process.wait() == 0, process.stderr.read()
    assert log.read_text() == "built\n"


def test_a_killed_builder_does_not_block_the_next(own_cache):
    code = """
        import os, signal
        from ksopt.jit.cache import ArtifactKey, get
        key = ArtifactKey.of("sm_90a", "kernel.cubin", {"source": "code", "flags": "-O3"})
        get(key, lambda: os.kill(os.getpid(), signal.SIGKILL))
    """
    assert in_new_process(code).wait() == -9
    assert get(KEY, lambda: b"binary").data == b"binary"


OTHER = 54321  # a user's number that is not ours

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


def everything(folder: Path) -> list[Path]:
    return [folder, *folder.rglob("*")]


def give_away(*places: Path) -> None:
    for place in places:
        os.chown(place, OTHER, -1, follow_symlinks=False)


def arrangement(kind: str, shared: Path) -> Path:
    """Make a cache whose artifact another user planted; the path that is set as the cache."""
    folder = shared / "cache"
    if kind == "the folder is theirs":
        give_away(folder)
    elif kind == "all of it is theirs":
        give_away(*everything(folder))
    elif kind == "the folder is open to all":
        folder.chmod(0o777)
        give_away(*everything(folder)[1:])
    elif kind == "the parent is theirs":
        give_away(shared)
    elif kind == "the parent is open to all":
        shared.chmod(0o777)
    elif kind == "a folder within is theirs":
        give_away(next(folder.glob(f"*/{KEY.arch}")))
    elif kind == "the artifact is theirs":
        give_away(only_artifact(folder))
    elif kind == "the artifact is open to all":
        only_artifact(folder).chmod(0o666)
    elif kind == "a link of theirs leads to it":
        (shared / "link").symlink_to(folder)
        give_away(shared / "link")
        return shared / "link"
    elif kind == "a link of ours leads to theirs":
        (shared / "link").symlink_to(folder)
        give_away(*everything(folder))
        return shared / "link"
    elif kind == "a link within is theirs":
        version = next(folder.iterdir())
        version.rename(shared / "elsewhere")
        version.symlink_to(shared / "elsewhere")
        give_away(version, *everything(shared / "elsewhere"))
    return folder


PLANTED = [
    "the folder is theirs",
    "all of it is theirs",
    "the folder is open to all",
    "the parent is theirs",
    "the parent is open to all",
    "a folder within is theirs",
    "the artifact is theirs",
    "the artifact is open to all",
    "a link of theirs leads to it",
    "a link of ours leads to theirs",
    "a link within is theirs",
]


@as_root
@pytest.mark.parametrize("variable", ["KSOPT_CACHE_DIR", "XDG_CACHE_HOME"])
@pytest.mark.parametrize("kind", PLANTED)
def test_what_another_user_planted_is_not_read(kind, variable, tmp_path, monkeypatch):
    shared = tmp_path / "shared"
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(shared / "cache"))
    get(KEY, lambda: b"planted")  # with the right key and the right checksum
    place = arrangement(kind, shared)
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(place))
    if variable == "XDG_CACHE_HOME":
        monkeypatch.delenv("KSOPT_CACHE_DIR")
        (tmp_path / "home").mkdir()
        (tmp_path / "home" / "ksopt").symlink_to(place)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    before = {path: path.lstat().st_mtime_ns for path in everything(shared)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        artifacts = [get(KEY, lambda: b"our own") for _ in range(3)]
    assert {artifact.data for artifact in artifacts} == {b"our own"}
    assert {artifact.path for artifact in artifacts} == {None}
    (warning,) = caught
    assert "another user" in str(warning.message) or "other users" in str(warning.message)
    assert {path: path.lstat().st_mtime_ns for path in everything(shared)} == before
    os.chown(shared, 0, -1)


def test_a_cache_below_a_sticky_folder_is_used(tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path / "tmp" / "cache"))
    get(KEY, lambda: b"binary")
    assert get(KEY, never).path is not None


def test_a_link_of_ours_to_a_cache_of_ours_is_followed(own_cache, tmp_path, monkeypatch):
    get(KEY, lambda: b"binary")
    (tmp_path / "link").symlink_to(own_cache)
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path / "link"))
    assert get(KEY, never).data == b"binary"


def test_a_link_in_the_place_of_a_lock_is_not_followed(own_cache, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("years of work")
    folder = cache.store_root() / KEY.arch
    cache.make_private(folder)
    (folder / f"{KEY.digest}.lock").symlink_to(precious)
    with pytest.warns(RuntimeWarning, match="symbolic links"):
        assert get(KEY, lambda: b"binary").data == b"binary"
    assert precious.read_text() == "years of work"
