"""The choices on disk, under the conditions that break caches."""

import contextlib
import errno
import json
import os
import random
import shutil
import signal
import sys
import time
import warnings
from pathlib import Path

import pytest
import stand_ins
import torch

from ksopt.jit import cache, source_digest
from ksopt.kernels import tuning_cache
from ksopt.kernels.backends import cuda
from ksopt.kernels.problem import Problem, ProblemKey, rows_of
from ksopt.kernels.tuning_cache import Record, Timed
from ksopt.patterns.chain import Pattern
from ksopt.system import temporary_files

MACHINE = {"device": "Stand-in", "driver": "1.2.3", "code": "abc"}
KEY = ProblemKey(Problem.of_factor(Pattern(4, 64, 64, 16), "float16", False), "aligned", 10)

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are made by fork here")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(folder))
    monkeypatch.setattr(cache, "_warned", set())
    return folder


def a_record(us: float = 10.0, key: ProblemKey = KEY) -> Record:
    timed = (
        Timed("bmm", None, "repacked", 30.5, 3 * us, 2.9 * us, 3.1 * us),
        Timed("mma16", {"mt": 1, "resident": True}, "any", 9.0, us, us, us),
    )
    return Record(key, 1000, timed, cached=1, repacked=0)


@contextlib.contextmanager
def a_process(work):
    """A forked process that does ``work``; killed at the end if it still lives."""
    process = os.fork()
    if process == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def ended_well(process: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


def wait_for(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.005)


def test_what_is_saved_is_loaded():
    assert tuning_cache.load(MACHINE, KEY) is None
    assert tuning_cache.save(MACHINE, a_record())
    assert tuning_cache.load(MACHINE, KEY) == a_record()
    assert tuning_cache.load_all(MACHINE) == [a_record()]
    assert tuning_cache.save(MACHINE, a_record(5.0))
    assert tuning_cache.load_all(MACHINE) == [a_record(5.0)]


def test_keys_are_apart():
    problem = KEY.problem
    others = [
        ProblemKey(Problem.of_factor(problem.pattern, "bfloat16", False), "aligned", 10),
        ProblemKey(Problem.of_factor(problem.pattern, "float32", False), "aligned", 10),
        ProblemKey(
            Problem.of_factor(problem.pattern, "float32", False, exact=False), "aligned", 10
        ),
        ProblemKey(Problem.of_factor(problem.pattern, "float16", True), "aligned", 10),
        ProblemKey(Problem.of_factor(problem.pattern, "float16", True), "unaligned", 10),
        ProblemKey(problem, "aligned", 11),
        ProblemKey(Problem.of_factor(Pattern(4, 64, 64, 8), "float16", False), "aligned", 10),
    ]
    for number, key in enumerate([KEY, *others], start=1):
        tuning_cache.save(MACHINE, a_record(float(number), key))
    assert len(tuning_cache.load_all(MACHINE)) == len(others) + 1
    for number, key in enumerate([KEY, *others], start=1):
        assert tuning_cache.load(MACHINE, key) == a_record(float(number), key)
        assert ProblemKey.from_json(key.to_json()) == key


def test_machines_are_apart():
    tuning_cache.save(MACHINE, a_record())
    for name in MACHINE:
        assert tuning_cache.load({**MACHINE, name: "other"}, KEY) is None
        assert tuning_cache.load_all({**MACHINE, name: "other"}) == []


def test_files_are_private(own_cache):
    tuning_cache.save(MACHINE, a_record())
    with tuning_cache.alone(MACHINE, KEY):
        pass
    folder = tuning_cache.folder_of(MACHINE)
    assert len(list(folder.iterdir())) == 2
    for path in (own_cache, folder, *folder.iterdir()):
        assert path.stat().st_mode & 0o077 == 0, path
    assert not list(own_cache.rglob(".aside-*"))


def test_what_a_killed_process_left_is_removed_by_the_next():
    tuning_cache.save(MACHINE, a_record())
    folder = tuning_cache.folder_of(MACHINE)
    left = folder / ".aside-abcdefgh.partial"
    left.write_text("half a record")
    with temporary_files.new_file(folder, ".aside-") as (_, held):
        assert not left.exists()
        tuning_cache.save(MACHINE, a_record())
        assert held.exists()


def damaged(values: dict, how: str) -> bytes:
    if how == "emptied":
        return b""
    if how == "half":
        return json.dumps(values).encode()[:200]
    if how == "not text":
        return bytes(range(256))
    if how == "too deep":
        return b"[" * 100_000
    if how == "a list":
        return b"[]"
    if how == "another schema":
        values["schema"] = 99
    elif how == "another machine":
        values["fingerprint"] = {**MACHINE, "driver": "9"}
    elif how == "another key":
        values["key"]["dtype"] = "bfloat16"
    elif how == "no such choice":
        values["cached"] = 7
    elif how == "an infinite choice":
        values["cached"] = float("inf")
    elif how == "a choice below zero":
        values["repacked"] = -1
    elif how == "a time that is none":
        values["timed"][0]["median_us"] = "fast"
    elif how == "a time that is not a number":
        values["timed"][0]["median_us"] = float("nan")
    elif how == "a field too many":
        values["timed"][0]["extra"] = 1
    elif how == "a field too few":
        del values["timed"][0]["way"]
    elif how == "a pattern that is none":
        values["key"]["pattern"] = "(1,0,2,3)"
    else:
        raise AssertionError(how)
    return json.dumps(values).encode()


@pytest.mark.parametrize(
    "how",
    [
        *("emptied", "half", "not text", "too deep", "a list", "another schema"),
        *("another machine", "another key", "no such choice", "a choice below zero"),
        *("a time that is none", "a time that is not a number", "a field too many"),
        *("a field too few", "a pattern that is none", "an infinite choice"),
    ],
)
def test_what_is_corrupt_or_foreign_counts_as_missing_and_is_written_again(how):
    tuning_cache.save(MACHINE, a_record())
    path = tuning_cache.path_of(MACHINE, KEY)
    path.write_bytes(damaged(json.loads(path.read_text()), how))
    assert tuning_cache.load(MACHINE, KEY) is None
    tuning_cache.save(MACHINE, a_record(2.0))
    assert tuning_cache.load(MACHINE, KEY) == a_record(2.0)


def test_a_corrupt_file_does_not_hide_the_others():
    other = ProblemKey(KEY.problem, "aligned", 3)
    tuning_cache.save(MACHINE, a_record())
    tuning_cache.save(MACHINE, a_record(1.0, other))
    tuning_cache.path_of(MACHINE, other).write_bytes(b"{")
    assert tuning_cache.load_all(MACHINE) == [a_record()]


@pytest.mark.parametrize("place", ["/proc/ksopt-cache", "{file}/cache"])
def test_a_place_that_cannot_be_written_costs_one_warning(place, tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("KSOPT_CACHE_DIR", place.format(file=file))
    with pytest.warns(RuntimeWarning, match="KSOPT_CACHE_DIR"):
        assert not tuning_cache.save(MACHINE, a_record())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with tuning_cache.alone(MACHINE, KEY):
            assert not tuning_cache.save(MACHINE, a_record())
    assert tuning_cache.load(MACHINE, KEY) is None
    assert tuning_cache.load_all(MACHINE) == []


def test_a_full_disk_leaves_the_old_choice(own_cache, monkeypatch):
    tuning_cache.save(MACHINE, a_record())

    def full(_handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tuning_cache.os, "fsync", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        assert not tuning_cache.save(MACHINE, a_record(2.0))
    assert tuning_cache.load(MACHINE, KEY) == a_record()
    assert not list(own_cache.rglob(".aside-*"))


def test_a_place_that_others_may_write_is_not_written(own_cache):
    own_cache.mkdir()
    own_cache.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="writable by other users"):
        assert not tuning_cache.save(MACHINE, a_record())
    assert not list(own_cache.rglob("*.json"))


def test_killed_while_writing_the_old_choice_or_the_new_one_is_there(own_cache):
    """A process writes without end and is killed at 25 moments; every time the file is whole."""
    tuning_cache.save(MACHINE, a_record())

    def write_for_ever():
        for us in range(1, 10**9):
            tuning_cache.save(MACHINE, a_record(float(us)))

    rng = random.Random(0)
    seen = set()
    for _ in range(25):
        with a_process(write_for_ever):
            time.sleep(rng.uniform(0.0, 0.05))
        actual = tuning_cache.load(MACHINE, KEY)
        assert actual is not None
        assert actual == a_record(actual.timed[1].median_us)
        seen.add(actual.timed[1].median_us)
    assert len(seen) > 3  # it did get to write
    assert tuning_cache.load_all(MACHINE) == [actual]  # what was left half written is never read


def test_only_one_process_at_a_time_measures_a_key(tmp_path):
    log = tmp_path / "log"

    def measure():
        with tuning_cache.alone(MACHINE, KEY):
            with log.open("a") as file:
                file.write("in\n")
            time.sleep(0.02)
            with log.open("a") as file:
                file.write("out\n")

    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(a_process(measure)) for _ in range(10)]
        assert all(map(ended_well, processes))
    assert log.read_text().split() == ["in", "out"] * 10


def operands(rows):
    x = torch.zeros(rows, KEY.problem.pattern.in_features, dtype=torch.float16)
    weight = torch.zeros(KEY.problem.pattern.weight_shape, dtype=torch.float16)
    return x.as_subclass(stand_ins.OnDevice), weight


def test_ten_processes_measure_once_and_all_take_the_choice(monkeypatch, tmp_path):
    device = stand_ins.install(monkeypatch)
    device.ms["mma16"] = [2.0, 1.0, 1.5]
    folder = tmp_path / "said"
    folder.mkdir()

    def product():
        actual = cuda.choice_for(*operands(1000), False)
        (folder / f"{os.getpid()}").write_text(f"{actual.source} {actual.candidate.label}")

    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(a_process(product)) for _ in range(10)]
        assert all(map(ended_well, processes))
    message = [path.read_text().split(maxsplit=1) for path in folder.iterdir()]
    assert sorted(source for source, _ in message) == ["measured"] + ["recorded"] * 9
    assert len({label for _, label in message}) == 1


def test_killed_while_measuring_nothing_that_was_measured_is_lost(monkeypatch, tmp_path):
    """A process tunes three problems, and is killed in the middle of a slow way of the third."""
    device = stand_ins.install(monkeypatch)
    began = tmp_path / "began"

    def slow(x, weight):
        began.touch()
        time.sleep(600)

    def tune():
        for rows in (100, 200):
            cuda.run(*operands(rows), False)
        monkeypatch.setattr(stand_ins.Device, "kernel", lambda *_: slow)
        cuda.run(*operands(400), False)

    with a_process(tune):
        wait_for(began.exists)
    records = tuning_cache.load_all(stand_ins.IDENTITY)
    assert [record.batch for record in records] == [100, 200]
    for rows in (100, 200):
        assert cuda.choice_for(*operands(rows), False).source == "recorded"
    start = time.monotonic()
    assert cuda.choice_for(*operands(400), False).source == "measured"  # the lock died with it
    assert time.monotonic() - start < 30
    assert "bmm" in device.clock.calls


def test_a_holder_that_hangs_does_not_stop_others_for_ever(monkeypatch, tmp_path):
    monkeypatch.setattr(tuning_cache, "_LONGEST_WAIT_S", 0.2)
    held = tmp_path / "held"

    def hold():
        with tuning_cache.alone(MACHINE, KEY):
            held.touch()
            time.sleep(600)

    with a_process(hold):
        wait_for(held.exists)
        with tuning_cache.alone(MACHINE, KEY):
            assert tuning_cache.save(MACHINE, a_record())


@pytest.mark.parametrize(
    "edited",
    [
        *(
            "csrc/cuda/mma16.cuh",
            "csrc/host/kernel_table.hpp",
            "measure/interleaved.py",
            "jit/nvrtc.py",
        ),
        *("baselines.py", "batched.py", "epilogue.py", "precision.py"),
        "kernels/families/mma16.py",
    ],
)
def test_an_edit_of_a_kernel_or_of_its_timer_starts_over(edited, tmp_path, monkeypatch):
    import ksopt
    import ksopt.csrc

    places = {
        "ksopt": Path(ksopt.__file__).parent,
        "ksopt.csrc": Path(ksopt.csrc.__file__).parent,
        "ksopt.kernels": Path(tuning_cache.__file__).parent,
        "ksopt.jit": Path(tuning_cache.__file__).parents[1] / "jit",
        "ksopt.measure": Path(tuning_cache.__file__).parents[1] / "measure",
    }
    copies = {
        "ksopt": tmp_path,
        "ksopt.csrc": tmp_path / "csrc",
        "ksopt.kernels": tmp_path / "kernels",
        "ksopt.jit": tmp_path / "jit",
        "ksopt.measure": tmp_path / "measure",
    }
    for name in ("ksopt.csrc", "ksopt.kernels", "ksopt.jit", "ksopt.measure"):
        shutil.copytree(places[name], copies[name])
    for name in ("baselines.py", "batched.py", "epilogue.py", "precision.py"):
        shutil.copy(places["ksopt"] / name, tmp_path)

    def digest_with(text=""):
        with (tmp_path / edited).open("a") as file:
            file.write(text)
        source_digest.digest.cache_clear()
        return tuning_cache.code_digest()

    before = tuning_cache.code_digest()
    monkeypatch.setattr(source_digest.resources, "files", copies.__getitem__)
    is_python = edited.endswith(".py")
    try:
        assert digest_with() == before
        remark = '\n# A remark.\n"""And another one."""\n' if is_python else "\n// A remark.\n"
        remarked = digest_with(remark)
        assert (remarked == before) == is_python  # of device code all bytes count
        assert digest_with("\nadded = 1\n") not in (before, remarked)
    finally:
        source_digest.digest.cache_clear()


@pytest.mark.parametrize(
    ("x", "last", "expected"),  # 64 features, or 63 where no row is aligned
    [
        (torch.zeros(5, 64), False, "aligned"),
        (torch.zeros(5, 63), False, "unaligned"),
        (torch.zeros(5, 128)[:, :64], False, "aligned"),
        (torch.zeros(5, 127)[:, :64], False, "unaligned"),
        (torch.zeros(64, 5).T, False, "scattered"),
        (torch.zeros(5, 65)[:, 1:], False, "unaligned"),
        (torch.zeros(321)[1:].view(5, 64), False, "unaligned"),
        (torch.zeros(2, 3, 64), False, "aligned"),
        (torch.zeros(64), False, "aligned"),
        (torch.zeros(64, 8), True, "aligned"),
        (torch.zeros(64, 7), True, "unaligned"),
        (torch.zeros(8, 64).T, True, "scattered"),
        (torch.zeros(64, 16)[:, :8], True, "aligned"),
        (torch.zeros(64, 16)[:, :6], True, "unaligned"),
        (torch.zeros(64, 2, 4), True, "aligned"),
    ],
)
def test_how_rows_lie(x, last, expected):
    rows = x.numel() // 64 if 64 in x.shape else x.shape[0]
    assert rows_of(x, last, rows) == expected


@pytest.mark.parametrize("how", ["theirs", "open to all", "a link"])
def test_what_another_user_planted_is_not_believed(how, own_cache, monkeypatch):
    if how != "open to all" and os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    tuning_cache.save(MACHINE, a_record())
    path = tuning_cache.path_of(MACHINE, KEY)
    if how == "theirs":
        os.chown(path.parent, 54321, -1)
    elif how == "open to all":
        path.chmod(0o666)
    else:
        link = own_cache.with_name("link")
        link.symlink_to(own_cache)
        os.chown(link, 54321, -1, follow_symlinks=False)
        monkeypatch.setenv("KSOPT_CACHE_DIR", str(link))
    with pytest.warns(RuntimeWarning, match=r"another user|other users"):
        assert tuning_cache.load(MACHINE, KEY) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one warning is enough
        assert tuning_cache.load(MACHINE, KEY) is None
        assert tuning_cache.load_all(MACHINE) == []


def test_a_link_in_the_place_of_a_lock_is_not_followed(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("years of work")
    tuning_cache.save(MACHINE, a_record())
    tuning_cache.path_of(MACHINE, KEY).with_suffix(".lock").symlink_to(precious)
    with (
        pytest.warns(RuntimeWarning, match="symbolic links"),
        tuning_cache.alone(MACHINE, KEY),
    ):
        pass
    assert precious.read_text() == "years of work"


def test_nothing_here_warns_by_itself():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuning_cache.save(MACHINE, a_record())
        assert tuning_cache.load(MACHINE, KEY) is not None
