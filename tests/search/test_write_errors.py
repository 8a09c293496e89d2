"""A study that cannot be written any more ends the search with a sentence, and goes on later."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import optuna
import pytest
from optuna.exceptions import StorageInternalError
from optuna.trial import TrialState
from sqlalchemy.exc import OperationalError

from ksopt.errors import InvalidInputError
from ksopt.report import output_folder
from ksopt.search import SearchRequest, run_search, study_store, write_errors
from ksopt.search.options import STUDY
from ksopt.search.storage import Storage
from ksopt.search.write_errors import UnwritableError

OPTIONS = "--dims 32x64 --budget 50% --batch 8 --device cpu --trials 12"
TOO_LONG_S = 120


def run(*options: str, most_bytes: int | None = None) -> subprocess.CompletedProcess[str]:
    """A search in a process that may write no larger files."""

    def limit() -> None:
        if most_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, resource.RLIM_INFINITY))

    return subprocess.run(
        [sys.executable, "-m", "ksopt", "search", *OPTIONS.split(), *options],
        capture_output=True,
        text=True,
        timeout=TOO_LONG_S,
        preexec_fn=limit,
    )


def complete(url: str) -> dict[int, str]:
    """The finished trials' chains by number."""
    trials = Storage(url).load(STUDY).get_trials(states=(TrialState.COMPLETE,))
    return {trial.number: trial.user_attrs["chain"] for trial in trials}


@pytest.mark.slow
@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize(("workers", "journal"), [(2, False)])
def test_a_limit_of_file_sizes_ends_a_search_which_then_goes_on(
    workers: int, journal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KSOPT_CACHE_DIR", str(tmp_path / "cache"))
    file = tmp_path / "trials.log" if journal else tmp_path / "out" / study_store.FILE
    url = f"journal:{file}" if journal else f"sqlite:///{file}"
    options = ["--workers", str(workers), "--out", str(tmp_path / "out")]
    options += ["--storage", url] if journal else []
    limit = 20_000 if journal else 130_000
    ended = run(*options, most_bytes=limit)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert f"the study at {file} cannot be written: no file may be larger than {limit:,}" in last
    assert last.startswith("ksopt: ")
    assert last.endswith("run the same command again (what was measured before is kept)")
    assert "Traceback" not in ended.stderr
    before = complete(url)
    assert before
    went_on = run(*options)
    assert went_on.returncode == 0, went_on.stderr
    after = complete(url)
    assert {number: after.get(number) for number in before} == before
    assert set(Counter(after.values()).values()) == {1}
    value = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    assert (
        len([t for t in value["layers"][0]["trials"] if t["state"] in ("complete", "pruned")]) == 12
    )


@pytest.mark.slow
@pytest.mark.usefixtures("brief")
def test_what_was_measured_stays_where_the_report_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = SearchRequest(
        "32x64", budgets=("50%",), batch=8, device="cpu", trials=3, out=tmp_path / "out"
    )
    write = output_folder.write_whole

    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(output_folder, "write_whole", full)
    with pytest.raises(InvalidInputError, match="what was measured is kept"):
        run_search(request)
    url = f"sqlite:///{tmp_path / 'out' / study_store.FILE}"
    before = complete(url)
    assert len(before) == 3
    monkeypatch.setattr(output_folder, "write_whole", write)
    assert len(run_search(request).layers[0].trials) == 3
    assert complete(url) == before


def cause(error: Exception) -> StorageInternalError:
    """As Optuna raises it."""
    actual = StorageInternalError("An exception is raised during the commit.")
    actual.__cause__ = OperationalError("INSERT", {}, error)
    return actual


def message_of(error: Exception, url: str, file: Path | None) -> str:
    with pytest.raises(UnwritableError) as caught, write_errors.in_words(url, file):
        raise error
    return str(caught.value)


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (errno.ENOSPC, "the disk is full. Make room, then run the same command again"),
        (errno.EDQUOT, "your quota is used up. Make room, then run"),
        (errno.EROFS, "it is read-only now. Make it writable, then run"),
        (errno.EFBIG, "(ulimit -f). Raise that limit, then run"),
        (errno.EIO, f"{os.strerror(errno.EIO)}. Once that is mended, run"),
    ],
)
def test_the_cause_is_named(number: int, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "trials.log"
    file.write_text("a\n")
    text = message_of(OSError(number, os.strerror(number)), f"journal:{file}", file)
    assert text.startswith(f"the study at {file} cannot be written: ")
    assert sentence in text


def test_the_cause_that_sqlite_does_not_name_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "study.db"
    file.write_bytes(bytes(100_000))
    error = cause(Exception("disk I/O error"))
    assert "written: disk I/O error. Once that is mended, run" in message_of(
        error, "sqlite:///x", file
    )
    full = os.statvfs_result((4096, 4096, 1000, 0, 0, 10, 10, 10, 0, 255))
    with monkeypatch.context() as context:
        context.setattr(os, "statvfs", lambda folder: full)
        assert "the disk is full" in message_of(error, "sqlite:///x", file)
    with monkeypatch.context() as context:
        context.setattr(resource, "getrlimit", lambda kind: (120_000, -1))
        assert "larger than 120,000 bytes here" in message_of(error, "sqlite:///x", file)
    with monkeypatch.context() as context:
        context.setattr(os, "access", lambda place, mode: False)
        assert "it is read-only now" in message_of(error, "sqlite:///x", file)


def test_a_server_that_fails_is_named_without_its_password() -> None:
    url = "postgresql://ann:hunter22@host/db"
    text = message_of(cause(Exception(f"no connection to {url}")), url, None)
    assert "hunter22" not in text
    assert text.startswith("the storage 'postgresql://ann:***@host/db' cannot be written: no conn")
    assert "once it works again, run the same command again" in text


def test_other_errors_pass(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError), write_errors.in_words("journal:x", tmp_path / "x"):
        raise ConnectionResetError(errno.ECONNRESET, "a bug, and no storage's")
    with pytest.raises(ZeroDivisionError), write_errors.in_words("journal:x", tmp_path / "x"):
        raise ZeroDivisionError


WRITE = """
import os, signal, sys
import optuna
from ksopt.search.storage import Storage
study = Storage("journal:" + sys.argv[1]).create("a")
for value in range(3):
    study.add_trial(optuna.trial.create_trial(value=value))
with open(sys.argv[1], "ab") as journal:
    journal.write(b'{"op_code":4,"worker_id":"x","stu')
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_half_a_line_of_a_journal_is_lost_alone(tmp_path: Path) -> None:
    """A writer was killed in the middle of a line: later entries stay readable."""
    file = tmp_path / "trials.log"
    done = subprocess.run([sys.executable, "-c", WRITE, str(file)], timeout=TOO_LONG_S)
    assert done.returncode == -signal.SIGKILL
    study = Storage(f"journal:{file}").create("a")
    assert [trial.value for trial in study.trials] == [0, 1, 2]
    study.add_trial(optuna.trial.create_trial(value=3.0))
    study.add_trial(optuna.trial.create_trial(value=4.0))
    again = Storage(f"journal:{file}").load("a")
    assert [trial.value for trial in again.trials] == [0, 1, 2, 3, 4]
    for line in file.read_text(encoding="utf-8").splitlines():
        json.loads(line)
