"""Files that a command line may name, and random modifications of them."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

MODULE = """
import torch
from torch import nn

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 8, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))

def build(): return Two()
def raises(): raise KeyError(101)
def leaves(): raise SystemExit(3)
def number(): return 3
def nothing(): return None
def meta():
    with torch.device("meta"):
        return Two()
class Broken(nn.Module):
    def forward(self, x): raise IndexError("too far")
def broken(): return Broken()
def empty(): return nn.Sequential()
not_callable = 3
def score(scored): return 0.0
"""
UP = "(1,16,4,2)*(2,4,4,1)"
DEEP = 100_000


def make_valid(folder: Path) -> None:
    """Fill a folder with one valid file of each kind, and things that are no files."""
    folder.mkdir(parents=True)
    (folder / "usersmodel.py").write_text(MODULE)
    (folder / "breaks.py").write_text("def build(:\n")
    (folder / "raising.py").write_text("raise RecursionError('as it is imported')\n")
    torch.manual_seed(0)
    model = nn.Module()
    model.up, model.down = nn.Linear(8, 32), nn.Linear(32, 8, bias=False)
    state = model.state_dict()
    torch.save(state, folder / "state.pt")
    torch.save(state, folder / "legacy.pt", _use_new_zipfile_serialization=False)
    save_file(state, folder / "one.safetensors")
    names = list(state)
    parts = {"a.safetensors": names[:2], "b.safetensors": names[2:]}
    for file, held in parts.items():
        save_file({name: state[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in parts.items() for name in held}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    plan = {
        "schema": "ksopt.plan/1",
        "made_by": "hand",
        "layers": [
            {"match": "down", "chain": None},
            {"match": "*", "in_features": 8, "out_features": 32, "chain": UP},
        ],
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    config = {
        "model_type": "bert",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "patterns.txt").write_text("(1,4,4,2)\n(2,4,4,1)  # a comment\n")
    with sqlite3.connect(folder / "other.db") as connection:
        connection.execute("create table studies (x)")
    (folder / "journal.log").write_text('{"op_code": 0, "worker_id": "x"}\n')
    (folder / "empty").write_bytes(b"")
    (folder / "file").write_text("words\n")
    (folder / "folder").mkdir()
    (folder / "full").mkdir()
    (folder / "full" / "precious").write_text("years of work")
    (folder / "loop").symlink_to(folder / "loop2")
    (folder / "loop2").symlink_to(folder / "loop")
    (folder / "dangling").symlink_to(folder / "nowhere")
    (folder / "é ü\n文").write_text("{}")
    os.mkfifo(folder / "fifo")
    linked = folder / "linked"
    linked.mkdir()
    (linked / ".lock").symlink_to(folder / "full" / "precious")


PLACES = [
    *("empty", "file", "folder", "full", "loop", "dangling", "nowhere", "é ü\n文", "usersmodel.py"),
    *("loop/x", "file/x", "nowhere/x/y", "x" * 300, "a/" * 3000, "", ".", "..", "/", "/proc/x"),
    *("/dev/null", "/dev/zero", "/dev/full", "/proc/self/mem", "~nobody-of-that-name/x", "\udcff"),
    *("nul\0byte", "state.pt", "one.safetensors", "plan.json", "config.json", "other.db"),
]
"""Paths that are not a file of the expected kind, for any kind."""


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    """A file that was cut, overwritten, stretched, or filled with something else."""
    kind = rng.randrange(9)
    at = rng.randrange(len(data) + 1)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[at:]
    if kind == 2:
        return data[:at] + rng.randbytes(rng.randrange(1, 64)) + data[at:]
    if kind == 3:
        return data[:at] + bytes(rng.randrange(1, 64)) + data[at + 64 :]
    if kind == 4:
        return rng.randbytes(rng.randrange(1, 2000))
    if kind == 5:
        return data[:at] + data[: len(data) - at] * 2
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        if changed:
            # The structure is at the ends: headers, pickles, directories of archives.
            place = rng.choice((rng.randrange(len(changed)), rng.randrange(min(200, len(changed)))))
            changed[place] = rng.choice((rng.randrange(256), 0, 255, changed[place] ^ 1))
    return bytes(changed)


ODD_VALUES: list[Callable[[], Any]] = [
    *(lambda: None, lambda: True, lambda: [], lambda: {}, lambda: "", lambda: 0, lambda: -1),
    *(lambda: 10**400, lambda: 10**4299, lambda: 1.5, lambda: float("nan"), lambda: float("inf")),
    *(lambda: 2**63, lambda: 2**31, lambda: "é\udcff"[:1], lambda: "x" * 10_000, lambda: "\0"),
    *(lambda: [[]], lambda: {"a": {"b": []}}, lambda: ["(1,2,3)"], lambda: "(0,1,1,1)"),
    *(lambda: "(1,99999999999999999999,1,1)", lambda: "(" * 3000, lambda: "*" * 3000),
    *(lambda: "[" * 500, lambda: "[z-a]", lambda: [None], lambda: {"chain": 1}, lambda: 1e308),
]


def mutated_json(value: Any, rng: random.Random) -> bytes:
    """A JSON document with something odd in the place of one of its values or keys."""
    kind = rng.randrange(8)
    if kind == 0:
        opened, closed = rng.choice((("[", "]"), ('{"a":', "}")))
        depth = rng.choice((600, 3000, DEEP))
        return (opened * depth + "1" + closed * depth).encode()
    if kind == 1:
        deep = json.dumps(value).replace("null", "[" * DEEP + "]" * DEEP, 1)
        return deep.encode()
    if kind == 2:
        return json.dumps(value).replace("1", rng.choice(("9" * 5000, "1e999", "-")), 1).encode()
    if kind == 3:
        encoding = rng.choice(("utf-16", "utf-32", "latin-1"))
        return json.dumps({"é": value}, ensure_ascii=False).encode(encoding)
    if kind == 4:
        return b"\xef\xbb\xbf" + json.dumps(value).encode()
    holders = _holders(value)
    holder = rng.choice(holders)
    odd = rng.choice(ODD_VALUES)()
    if isinstance(holder, dict) and holder:
        key = rng.choice(list(holder))
        if kind == 5:
            del holder[key]
        elif kind == 6:
            holder[rng.choice(("", "é", "schema", "x" * 1000))] = holder.pop(key)
        else:
            holder[key] = odd
    elif isinstance(holder, list):
        holder[:] = [odd]
    else:
        value = odd
    return json.dumps(value).encode()


def _holders(value: Any) -> list[Any]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value, *(one for part in inner for one in _holders(part))]


class _Calls:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch ksopt-was-fooled",)


def bad_torch_file(rng: random.Random) -> bytes:
    """A pickle that is no state_dict, or that calls a forbidden function."""
    values: list[Any] = [
        *(_Calls(), {"a": 1}, [1], 3, None, {1: 2}, "text", {"a": {"b": 1}}, {("a",): 1}),
        {"w": bytearray(10)},
    ]
    data = pickle.dumps(rng.choice(values), protocol=rng.choice((0, 1, 2, 4)))
    ends = (
        b"e.",
        b"h\x65.",
        b"q\x00h\x01.",
        b"(K\x01o.",
        b"\x80\x02]q\x01h\x7f.",
        b"cos\nsystem\n.",
    )
    return rng.choice((data, data[: rng.randrange(len(data))], rng.choice(ends)))


def mutate(source: Path, target: Path, rng: random.Random) -> None:
    """Write a mutated copy of a file."""
    data = source.read_bytes()
    if source.suffix == ".json" and rng.random() < 0.8:
        target.write_bytes(mutated_json(json.loads(data), rng))
    elif source.suffix == ".pt" and rng.random() < 0.3:
        target.write_bytes(bad_torch_file(rng))
    else:
        target.write_bytes(mutated_bytes(data, rng))


def mutate_folder(source: Path, target: Path, names: list[str], rng: random.Random) -> None:
    """A copy of a folder with one of its files mutated."""
    shutil.copytree(source, target)
    name = rng.choice(names)
    if rng.random() < 0.1:
        (target / name).unlink()
    elif name.endswith(".jsonl") and rng.random() < 0.8:
        lines = (target / name).read_text().splitlines()
        place = rng.randrange(len(lines))
        lines[place] = mutated_json(json.loads(lines[place]), rng).decode("latin-1")
        (target / name).write_text("\n".join(lines) + "\n", encoding="latin-1")
    else:
        mutate(source / name, target / name, rng)


def mutate_study(target: Path, rng: random.Random) -> None:
    """Change values in the tables of a SQLite study."""
    with sqlite3.connect(target) as connection:
        tables = [
            *("study_user_attributes", "trial_user_attributes", "trials", "trial_values"),
            *("studies", "study_directions", "version_info", "trial_system_attributes"),
        ]
        for _ in range(rng.choice((1, 1, 3))):
            table = rng.choice(tables)
            columns = [row[1] for row in connection.execute(f"pragma table_info({table})")]
            column = rng.choice(columns)
            odd = rng.choice(("null", "'{'", "'[1]'", "'x'", "-1", "1e999", "'\"x\"'", "'{}'"))
            if column == "value_json" and rng.random() < 0.6:
                rows = connection.execute(f"select rowid, value_json from {table}").fetchall()
                if rows:
                    row, text = rng.choice(rows)
                    mutated = mutated_json(json.loads(text), rng).decode("latin-1")
                    connection.execute(
                        f"update {table} set value_json = ? where rowid = ?", (mutated, row)
                    )
                continue
            rule = rng.choice(("", " where rowid % 2"))
            try:
                connection.execute(f"update {table} set {column} = {odd}{rule}")
            except sqlite3.Error:
                connection.execute(f"delete from {table}{rule}")
