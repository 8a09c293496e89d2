"""Checks after a process was killed, and after the same command has run again."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jsonschema

TESTS = Path(__file__).resolve().parents[1]
SCHEMA = TESTS.parent / "search" / "results-4.schema.json"


class Case(Protocol):
    """A command to be killed, and its invariants.

    Attributes:
        name: What `--what` calls it.
    """

    name: str

    def arguments(self, folder: Path, kill: int) -> Sequence[str]:
        """After ``python``; ``kill`` counts the times that the command was killed in the folder."""

    def environment(self, folder: Path) -> dict[str, str]:
        """The command's environment."""

    def stored(self, folder: Path) -> Mapping[str, Any]:
        """The finished files on disk, by name; may be called while the command runs."""

    def check_killed(self, folder: Path) -> None:
        """Raise an AssertionError unless all that is there is whole."""

    def check_done(self, folder: Path, stored: Mapping[str, Any], code: int) -> None:
        """Raise an AssertionError unless the command, run again, has done all of its work once."""


def environment(folder: Path) -> dict[str, str]:
    """The environment of a command that writes only to a folder, and measures briefly."""
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    paths = (str(TESTS / "brief"), str(TESTS / "fuzz"), os.environ.get("PYTHONPATH"))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "KSOPT_CACHE_DIR": str(folder / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder.parent / "inductor"),
        "TMPDIR": str(temporary),
        "OMP_NUM_THREADS": "1",
    }


@dataclass(frozen=True)
class Search:
    """``ksopt search``: trials are recorded once, numbers are unique, the report is whole.

    Args:
        workers: Processes that measure.
    """

    workers: int
    name: str = "search"

    def arguments(self, folder: Path, kill: int) -> Sequence[str]:
        """More trials each time, so that there is always something left to be killed."""
        what = "--dims 48x64 --budget 50% --batch 8 --device cpu --factors 2"
        options = f"--workers {self.workers} --trials {4 + kill}"
        return [
            "-m",
            "ksopt",
            "search",
            *what.split(),
            *options.split(),
            "--out",
            str(folder / "o"),
        ]

    def environment(self, folder: Path) -> dict[str, str]:
        """As every case's."""
        return environment(folder)

    def stored(self, folder: Path) -> Mapping[str, Any]:
        """The chain and the objectives of each finished trial, by its number."""
        return {
            number: (trial["state"], trial["chain"], trial["values"])
            for number, trial in _trials(folder / "o" / "study.db").items()
            if trial["state"] in ("COMPLETE", "PRUNED")
        }

    def check_killed(self, folder: Path) -> None:
        """The database and each of the report's files that is there are whole."""
        out = folder / "o"
        _check_database(out / "study.db")
        for name in ("results.json", "plan.json"):
            if (out / name).exists():
                json.loads((out / name).read_text(encoding="utf-8"))
        if (out / "trials.csv").exists():
            _csv(out / "trials.csv")
        if (out / "report.html").exists():
            _check_page(out / "report.html")

    def check_done(self, folder: Path, stored: Mapping[str, Any], code: int) -> None:
        """All trials are there once, those from before with the same times; no file is left."""
        assert code == 0, f"exit code {code}"
        self.check_killed(folder)
        out = folder / "o"
        value = json.loads((out / "results.json").read_text(encoding="utf-8"))
        jsonschema.validate(value, json.loads(SCHEMA.read_text(encoding="utf-8")))
        trials, (layer,) = _trials(out / "study.db"), value["layers"]
        reported = {str(trial["number"]): trial for trial in layer["trials"]}
        assert len(reported) == len(layer["trials"]), "a number is reported twice"
        for number, (state, chain, values) in stored.items():
            assert number in reported, f"trial {number} is not in the report"
            assert reported[number]["chain"] == chain, f"trial {number} has another chain"
            assert reported[number]["state"] == state.lower(), f"trial {number} has another state"
            latency = reported[number]["latency"]["median_us"]
            assert not values or latency == values[0], f"trial {number} has another latency"
        ended = [t for t in layer["trials"] if t["state"] in ("complete", "pruned", "failed")]
        requested = value["request"]["trials"]
        assert len(ended) == requested, f"{len(ended)} trials, of {requested} that were asked for"
        assert not [t for t in trials.values() if t["state"] in ("RUNNING", "WAITING")]
        rows = _csv(out / "trials.csv")
        assert [row["number"] for row in rows] == list(reported), "trials.csv has other trials"
        assert layer["recommendations"], "nothing is recommended"
        page = _check_page(out / "report.html")
        assert layer["recommendations"][0]["budget"]["text"] in page
        reports = {"results.json", "plan.json", "trials.csv", "report.md", "report.html", "plots"}
        _only(out, reports, "study")
        _only(folder / "cache" / "locks", {f"{os.uname().nodename}-cpu"})
        _only(folder / "tmp", set())


@dataclass(frozen=True)
class Convert:
    """``ksopt convert``: the folder is there whole, and the same as ever, or not at all."""

    name: str = "convert"

    def arguments(self, folder: Path, kill: int) -> Sequence[str]:
        """The same until its folder is there; then another folder, for a full one is refused."""
        plan = folder / "plan.json"
        if not plan.exists():
            rule = {"match": "*", "chain": None}
            chains = [{"match": "0", "chain": "(1,16,4,4)*(4,4,8,1)"}, rule]
            text = json.dumps({"schema": "ksopt.plan/1", "layers": chains})
            plan.write_text(text, encoding="utf-8")
        out = folder / f"c{len(self.stored(folder))}"
        words = ["--model", "kill_program:build", "--plan", str(plan), "--out", str(out)]
        return ["-m", "ksopt", "convert", *words]

    def environment(self, folder: Path) -> dict[str, str]:
        """As every case's."""
        return environment(folder)

    def stored(self, folder: Path) -> Mapping[str, Any]:
        """Checksums of each converted model's files."""
        return {place.name: self._digests(place) for place in sorted(folder.glob("c[0-9]"))}

    def _digests(self, model: Path) -> list[str]:
        names = ("model.safetensors", "config.json", "report.md")
        return [_digest(model / name) for name in names if (model / name).exists()]

    def check_killed(self, folder: Path) -> None:
        """All of a model is there, or none."""
        for model in folder.glob("c[0-9]"):
            _only(model, {"model.safetensors", "config.json", "report.md"}, all_of_them=True)

    def check_done(self, folder: Path, stored: Mapping[str, Any], code: int) -> None:
        """The result exists and is the same as before, and the earlier files are unchanged."""
        self.check_killed(folder)
        now = self.stored(folder)
        assert code == (0 if len(now) > len(stored) else 2), f"exit code {code}"
        assert now, "there is no model"
        assert all(now.get(name) == digests for name, digests in stored.items()), "one was changed"
        reference = folder.parent / "reference"
        if reference.is_dir():
            whole = self._digests(reference / "c0")
            assert all(digests == whole for digests in now.values()), "not as if undisturbed"
        _only(folder, {*now, "plan.json", "cache", "tmp", "log"})
        _only(folder / "tmp", set())


@dataclass(frozen=True)
class Tune:
    """``ksopt tune``: a choice that is on disk stays, each product has one."""

    name: str = "tune"
    _batches: tuple[int, ...] = (8, 16, 32, 64)

    def arguments(self, folder: Path, kill: int) -> Sequence[str]:
        """Another pattern each time, beside those of before."""
        patterns = [f"({a},8,4,{d})" for a in (1, 2, 3, 4) for d in (1, 2, 3)][: 3 + kill]
        batches = map(str, self._batches)
        words = ["--pattern", *patterns, "--batch", *batches, "--device", "cpu"]
        return ["-m", "ksopt", "tune", *words, "--seconds", "0.05", "--json"]

    def environment(self, folder: Path) -> dict[str, str]:
        """As every case's."""
        return environment(folder)

    def stored(self, folder: Path) -> Mapping[str, Any]:
        """The choices on disk."""
        return {path.name: _digest(path) for path in self._files(folder)}

    def _files(self, folder: Path) -> list[Path]:
        return sorted((folder / "cache").glob("*/choices/*/*.json"))

    def check_killed(self, folder: Path) -> None:
        """Each choice is whole."""
        for path in self._files(folder):
            json.loads(path.read_text(encoding="utf-8"))

    def check_done(self, folder: Path, stored: Mapping[str, Any], code: int) -> None:
        """Each product has a choice, those of before the same."""
        assert code == 0, f"exit code {code}"
        self.check_killed(folder)
        now = self.stored(folder)
        for name, digest in stored.items():
            assert now.get(name) == digest, f"{name} was measured again"
        assert now
        assert len(now) % len(self._batches) == 0, f"{len(now)} choices"
        for place in (folder / "cache").rglob("*"):
            name = place.name
            assert place.is_dir() or name.endswith((".json", ".lock")), f"{place} is left"
        _only(folder / "tmp", set())


@dataclass(frozen=True)
class Compile:
    """The host library while it is built, and a model compiled by the backend."""

    name: str = "compile"

    def arguments(self, folder: Path, kill: int) -> Sequence[str]:
        """The same each time."""
        return [str(TESTS / "fuzz" / "kill_program.py")]

    def environment(self, folder: Path) -> dict[str, str]:
        """As every case's."""
        return environment(folder)

    def stored(self, folder: Path) -> Mapping[str, Any]:
        """The libraries on disk."""
        files = (folder / "cache").glob("*/host-*/*/ksopt_host.so")
        return {str(path.relative_to(folder)): _digest(path) for path in files}

    def check_killed(self, folder: Path) -> None:
        """Each library matches its record."""
        for name, digest in self.stored(folder).items():
            record = json.loads((folder / name).with_name("key.json").read_text(encoding="utf-8"))
            assert record["sha256"] == digest, f"{name} is not whole"

    def check_done(self, folder: Path, stored: Mapping[str, Any], code: int) -> None:
        """One library, the earlier one if there was one; nothing partial."""
        assert code == 0, f"exit code {code}"
        self.check_killed(folder)
        now = self.stored(folder)
        assert len(now) == 1, f"{len(now)} libraries"
        assert all(now[name] == digest for name, digest in stored.items()), "it was built again"
        left = [str(place) for place in (folder / "cache").rglob(".*")]
        assert not left, f"left behind: {left}"
        ours = [place.name for place in (folder / "tmp").iterdir() if "ksopt" in place.name]
        assert not ours, f"left behind: {ours}"


def _trials(file: Path) -> dict[str, dict[str, Any]]:
    """State, chain and objectives of a SQLite study's trials by number, read while it is used."""
    if not file.is_file():
        return {}
    try:
        with sqlite3.connect(f"file:{file}?mode=rw", uri=True, timeout=10) as database:
            trials = database.execute("SELECT trial_id, number, state FROM trials").fetchall()
            texts = dict(
                database.execute(
                    "SELECT trial_id, value_json FROM trial_user_attributes WHERE key = 'chain'"
                ).fetchall()
            )
            values = database.execute(
                "SELECT trial_id, value FROM trial_values ORDER BY trial_id, objective"
            ).fetchall()
    except sqlite3.OperationalError as error:
        if "no such table" in str(error):
            return {}  # it is being created
        raise
    finally:
        if "database" in locals():
            database.close()
    by_number: dict[str, dict[str, Any]] = {}
    for trial_id, number, state in trials:
        assert str(number) not in by_number, f"number {number} is there twice"
        chain = json.loads(texts[trial_id]) if trial_id in texts else None
        objectives = [value for of, value in values if of == trial_id]
        by_number[str(number)] = {"state": state, "chain": chain, "values": objectives}
    return by_number


def _check_database(file: Path) -> None:
    if not file.is_file():
        return
    with sqlite3.connect(f"file:{file}?mode=rw", uri=True, timeout=10) as database:
        verdict = database.execute("PRAGMA integrity_check").fetchone()
    database.close()
    assert verdict == ("ok",), f"the database is damaged: {verdict}"
    trials = _trials(file)
    assert sorted(map(int, trials)) == list(range(len(trials))), f"numbers {sorted(trials)}"
    done = Counter(t["chain"] for t in trials.values() if t["state"] in ("COMPLETE", "PRUNED"))
    twice = [chain for chain, count in done.items() if count > 1]
    assert not twice, f"measured twice: {twice}"


def _csv(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines, strict=True))
    assert all(None not in row and None not in row.values() for row in rows), f"{file}: a torn row"
    return rows


def _check_page(file: Path) -> str:
    page = file.read_text(encoding="utf-8")
    assert page.lower().startswith("<!doctype html>"), f"{file} does not begin as a page"
    assert page.rstrip().endswith("</html>"), f"{file} ends early"
    return page


def _digest(file: Path) -> str:
    data = file.read_bytes()
    if file.suffix == ".safetensors":  # whose header has its keys in any order
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        data = json.dumps(header, sort_keys=True).encode() + data[8 + size :]
    return hashlib.sha256(data).hexdigest()


def _only(folder: Path, names: set[str], study: str = "", all_of_them: bool = False) -> None:
    """Nothing else is in a folder; with a study's file beside them, that and the locks."""
    if study:
        names = names | {f"{study}.db", f".{study}.db.turn", ".lock"}
    there = {place.name for place in folder.iterdir()} if folder.is_dir() else set()
    assert there <= names, f"left behind in {folder.name}: {sorted(there - names)}"
    assert not all_of_them or there == names, f"{folder.name} lacks {sorted(names - there)}"
