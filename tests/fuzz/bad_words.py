"""Command lines that must be refused, drawn by chance: each is bad in one place at least."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from ksopt.cli.main import _parser

from .bad_files import PLACES, mutate, mutate_folder, mutate_study

REFUSED = frozenset({2})
REFUSED_OR_DONE = frozenset({0, 2})
"""What chance did to a file may leave it valid."""

ODD = [
    *(
        "",
        " ",
        "nan",
        "inf",
        "-inf",
        "1e999",
        "-1",
        "0",
        "1.5",
        "0x10",
        "1_0",
        "\uff19",
        "\u0663",
        "\u00b2",
    ),
    *("9" * 30, "9" * 5000, "-" + "9" * 400, "1e308", "1e-320", "é" * 100, "\udcff", "x" * 100_000),
    *("--", "-", "%s%n%d", "{}", "'; drop table studies; --", "\n", "\x1b[31m", "1,2,,3", "None"),
    *("(1,2,3)", "(0,0,0,0)", "(1,2,3,4)*(5,6,7,8)", "(" * 2000, "*" * 1000, "(1,2,3,x)", "()"),
    *("(1,99999999999999999999999,1,1)", "768", "768x", "1x1x1", "0x0", "99x99x", "8×8×8", "x"),
    *(
        "600q",
        "300%",
        "-5%",
        "5%%",
        "\u0663%",
        "nul\0byte",
        "a:b:c",
        ":",
        "cuda:99",
        "cuda:-1",
        "meta",
    ),
    *("sqlite://", "sqlite:///", "sqlite:////proc/x/y.db", "journal:", "journal:/", "mysql://"),
    *("http://ann:secret@host", "postgresql://ann:secret@127.0.0.1:1/x?connect_timeout=1"),
    *("sqlite:///full", "journal:full", "sqlite:///loop", "journal:loop", "sqlite:///nul\0"),
    *("os:system", "usersmodel:nowhere", "usersmodel", "nowhere:x", "breaks:build", "a.b.c:d"),
    *("usersmodel:raises", "usersmodel:leaves", "usersmodel:number", "usersmodel:not_callable"),
    *(
        "raising:build",
        "multiple:",
        "multiple:16",
        "16-",
        "16,,32",
        "32-16",
        "monarch,",
        "low_rank",
    ),
]

SEARCH = ["search", "--dims", "16x32", "--batch", "4", "--device", "cpu", "--trials", "1"]
SEARCH += ["--budget", "50%"]
SPACE = ["space", "--dims", "16x32", "--budget", "50%", "--visits", "2000"]
CONVERT = ["convert", "--model", "usersmodel:build", "--plan", "plan.json", "--out", "new"]
EXPLAIN = ["explain", "usersmodel:build", "--input", "4x8", "--tune", "off"]
KERNEL = ["explain-kernel", "(1,4,4,2)", "--batch", "4", "--gpu", "A100"]
TUNE = ["tune", "--pattern", "(1,4,4,2)", "--batch", "4", "--device", "cpu"]
BENCH = ["bench", "kernels", "--patterns", "(1,4,4,2)", "--batch", "4", "--device", "cpu"]
MODELS = ["bench", "models", "--models", "vit", "--small", "--device", "cpu"]
# Large numbers, which are bounded by memory and sense before any work begins.
VAST = [
    [*SEARCH, "--batch", "99999999999999"],
    [*SEARCH, "--workers", "1000000", "--out", "new"],
    ["search", "--dims", "999999999x999999999", "--device", "cpu", "--out", "new"],
    [*TUNE[:3], "--batch", "99999999999999", "--device", "cpu"],
    [*TUNE[:1], "--pattern", "(99999,99999,99999,9)", "--batch", "4", "--device", "cpu"],
    [*BENCH[:4], "--batch", "99999999999999", "--device", "cpu", "--out", "new"],
    [*BENCH, "--workers", "1000000", "--out", "new"],
    [*MODELS, "--batch", "99999999999999", "--out", "new"],
    [*MODELS, "--layers", "99999999999999", "--out", "new"],
    [*EXPLAIN[:2], "--input", "99999999999x8"],
    [*EXPLAIN[:2], "--input", "x".join(["9"] * 200)],
]


@dataclass(frozen=True)
class Case:
    """A command line.

    Attributes:
        words: Behind ``ksopt``.
        codes: Exit codes that are right.
        environment: Variables that are set, or with None unset.
        may_write: What a valid one writes, below the folder where it runs.
    """

    words: list[str]
    codes: frozenset[int] = REFUSED
    environment: dict[str, str | None] = field(default_factory=dict)
    may_write: tuple[str, ...] = ()


def draw(rng: random.Random, folder: Path, vast: bool) -> Case:
    """A case; files that it names are written into the folder."""
    kinds: list[tuple[int, Callable[[random.Random, Path], Case]]] = [
        *((8, _odd_search), (5, _odd_space), (5, _odd_convert), (3, _odd_explain)),
        *((4, _odd_tune), (5, _odd_bench), (3, _odd_models), (3, _no_command)),
        (3, _odd_kernel),
        (2, _odd_environment),
        *((8, _bad_weights), (5, _bad_plan), (4, _bad_config), (4, _bad_storage)),
        *((5, _bad_report), (4, _bad_replay), (3, _bad_out), (1 if vast else 0, _vast)),
    ]
    weights, makers = zip(*kinds, strict=True)
    return rng.choices(makers, weights)[0](rng, folder)


def _options(command: list[str]) -> dict[str, bool]:
    """The options of a command, from its own parser, and whether each takes a value."""
    parser = _parser()
    for word in command:
        choices = next(one.choices for one in parser._actions if one.dest in ("command", "kind"))
        assert isinstance(choices, dict)
        parser = choices[word]
    return {
        option: action.nargs != 0
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--") and option not in ("--help", "--traceback")
    }


def _with_odd(rng: random.Random, words: list[str], depth: int = 1) -> list[str]:
    """Words with one to three options that have odd values; now and then the words are odd."""
    words = list(words)
    options = _options(words[:depth])
    valued = [option for option, has_value in options.items() if has_value]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        option, odd = rng.choice(valued), rng.choice([*ODD, *PLACES])
        form = rng.randrange(12)
        if form == 0:  # a value too many, or for a flag, or for no option
            words += [rng.choice([*options, "--frobnicate", "-x"]), odd, rng.choice(ODD)]
        elif form == 1:
            words += [option]
        elif form == 2:
            words += [option, odd, rng.choice([*options])]
        elif option in words[:-1]:
            words[words.index(option) + 1] = odd
        else:
            words.append(f"{option}={odd}")
    return words


def _odd_search(rng: random.Random, folder: Path) -> Case:
    # For any odd value, the folder cannot be created: a search that begins would be a fault.
    return Case([*_with_odd(rng, SEARCH), "--out", rng.choice(("file", "file/x", "loop", "fifo"))])


def _odd_space(rng: random.Random, folder: Path) -> Case:
    return Case([*_with_odd(rng, SPACE), rng.choice(("--dtype=int8", "--min-rank=0", "--order=x"))])


def _odd_convert(rng: random.Random, folder: Path) -> Case:
    words = _with_odd(rng, CONVERT)
    if rng.random() < 0.3:  # the model is so small that a conversion takes no time
        return Case(words, REFUSED_OR_DONE, may_write=("new",))
    bad = ("--model=usersmodel:raises", "--out=full", "--plan=nowhere", "--device=nowhere")
    return Case([*words, rng.choice(bad)])


def _odd_explain(rng: random.Random, folder: Path) -> Case:
    words = ["explain", rng.choice(("usersmodel:broken", "usersmodel:raises")), "--input"]
    words += [rng.choice(("4x8", "4x8:int64", "8", *ODD)) for _ in range(rng.randrange(1, 4))]
    return Case(_with_odd(rng, words))


def _odd_tune(rng: random.Random, folder: Path) -> Case:
    words = _with_odd(rng, TUNE)
    bad = ("device=nowhere", "batch=0", "batch=x", "seconds=x", "seconds=nan", "seconds=-1")
    return Case([*words, f"--{rng.choice(bad)}"])


def _odd_kernel(rng: random.Random, folder: Path) -> Case:
    words = _with_odd(rng, KERNEL)
    bad = ("gpu=H20", "gpu=9.0,0,1", "batch=0", "batch=x", "siblings=0", "activation=x", "dtype=x")
    return Case([*words, f"--{rng.choice(bad)}"])


def _odd_bench(rng: random.Random, folder: Path) -> Case:
    words = _with_odd(rng, BENCH, depth=2)
    return Case([*words, "--out", rng.choice(("file", "loop", "file/x", "/proc/x"))])


def _odd_models(rng: random.Random, folder: Path) -> Case:
    words = _with_odd(rng, MODELS, depth=2)
    bad = (
        "models=bert",
        "dtypes=x",
        "passes=",
        "modes=graphs",
        "seconds=nan",
        "chain=(1,in/0,1,1)",
    )
    return Case([*words, f"--{rng.choice(bad)}"])


def _no_command(rng: random.Random, folder: Path) -> Case:
    pool = ["serch", "bench", "kernels", "doctor", "models", "--json", "-v", *ODD]
    words = [rng.choice(pool) for _ in range(rng.randrange(0, 4))]
    return Case([*words, rng.choice(("--frobnicate", "nonsense"))])


def _odd_environment(rng: random.Random, folder: Path) -> Case:
    names = ["KSOPT_CACHE_DIR", "XDG_CACHE_HOME", "KSOPT_TUNE", "CXX", "TMPDIR", "COLUMNS", "LANG"]
    odd = [value for value in [*ODD, *PLACES] if "\0" not in value and len(value) < 10_000]
    environment = {rng.choice(names): rng.choice(odd) for _ in range(rng.randrange(1, 3))}
    case = rng.choice((_odd_search, _odd_tune, _odd_bench, _odd_convert))(rng, folder)
    return replace(case, environment=environment)


def _bad_weights(rng: random.Random, folder: Path) -> Case:
    names = ("state.pt", "legacy.pt", "one.safetensors", "model.safetensors.index.json")
    source = folder / rng.choice(names)
    if rng.random() < 0.15:
        named = rng.choice(PLACES)
    else:
        named = f"bad{rng.choice(('', '.safetensors.index')) if source.suffix == '.json' else ''}"
        named += source.suffix
        mutate(source, folder / named, rng)
    tensor = rng.choice(("", ":up.weight", ":*", ":nothing", ":up.weight,down.weight^T"))
    search = ["search", "--dims", "8x32", "--batch", "4", "--device", "cpu", "--out", "file"]
    if rng.random() < 0.5:
        return Case([*search, "--weights", f"{named}{tensor}"])
    return Case([*CONVERT, "--weights", named], REFUSED_OR_DONE, may_write=("new",))


def _bad_plan(rng: random.Random, folder: Path) -> Case:
    if rng.random() < 0.2:
        return Case(["convert", "--model", "usersmodel:build", "--dry-run", "--plan", *_two(rng)])
    mutate(folder / "plan.json", folder / "bad.json", rng)
    words = ["convert", "--model", "usersmodel:build", "--dry-run", "--plan", "bad.json"]
    return Case(words, REFUSED_OR_DONE)


def _two(rng: random.Random) -> list[str]:
    places = [place for place in PLACES if place not in ("plan.json",)]
    return ["plan.json", rng.choice(places)][rng.randrange(2) :]


def _bad_config(rng: random.Random, folder: Path) -> Case:
    if rng.random() < 0.2:
        named = rng.choice([place for place in PLACES if place != "config.json"])
        named = "file" if named == "." else named  # its config.json is valid
    else:
        named = "bad.json"
        mutate(folder / "config.json", folder / named, rng)
    return Case(["search", "--hf-config", named, "--device", "cpu", "--out", "file"])


def _bad_storage(rng: random.Random, folder: Path) -> Case:
    source = folder / rng.choice(("other.db", "journal.log", "study.db"))
    source = source if source.exists() else folder / "other.db"
    (folder / "bad.store").write_bytes(source.read_bytes())
    if source.name == "study.db":
        mutate_study(folder / "bad.store", rng)
    elif rng.random() < 0.7:
        mutate(source, folder / "bad.store", rng)
    url = ("journal:" if source.suffix == ".log" else "sqlite:///") + "bad.store"
    if rng.random() < 0.3:
        url = rng.choice([odd for odd in ODD if ":" in odd])
    # Of another layer than any study here: valid files are refused, too.
    return Case([*SEARCH, "--storage", url, "--study", "ksopt-search", "--out", "loop"])


def _bad_replay(rng: random.Random, folder: Path) -> Case:
    if rng.random() < 0.3 or not (folder / "study.db").exists():
        where = rng.choice([*PLACES, *ODD])
        done = where in (".", "") and (folder / "study.db").exists()  # it has a study
        codes = REFUSED_OR_DONE if done else REFUSED
        return Case(["search", "--replay", where, "--out", "new"], codes)
    (folder / "bad.db").write_bytes((folder / "study.db").read_bytes())
    if rng.random() < 0.7:
        mutate_study(folder / "bad.db", rng)
    else:
        mutate(folder / "study.db", folder / "bad.db", rng)
    words = ["search", "--replay", f"sqlite:///{folder}/bad.db", "--out", "new"]
    return Case(words, REFUSED_OR_DONE, may_write=("new", ".bad.db.turn"))


def _bad_report(rng: random.Random, folder: Path) -> Case:
    if rng.random() < 0.3 or not (folder / "measured").exists():
        return Case(["bench", "kernels", "--report", rng.choice(PLACES), "--out", "new"])
    mutate_folder(folder / "measured", folder / "bad", ["rows.jsonl", "setting.json"], rng)
    words = ["bench", "kernels", "--report", "bad", "--out", "new"]
    return Case(words, frozenset({0, 1, 2}), may_write=("new",))


def _bad_out(rng: random.Random, folder: Path) -> Case:
    words = rng.choice((SEARCH, BENCH, CONVERT[:-2], EXPLAIN))
    places = [
        *("file", "full", "loop", "loop/x", "file/x", "dangling/x/y", "x" * 300, "/proc/x"),
        *(
            "/dev/null",
            "/dev/null/x",
            "nul\0",
            "\udcff/" * 2000,
            "linked" if words is SEARCH else "",
        ),
    ]
    place = rng.choice(places)
    if place == "full" and words in (SEARCH, BENCH):
        place = "loop"  # a folder with other files in it is fine there
    if place == "" and words in (SEARCH, BENCH):
        place = "file"  # nothing is the current folder
    return Case([*words, "--out", place])


def _vast(rng: random.Random, folder: Path) -> Case:
    return Case(list(rng.choice(VAST)))
