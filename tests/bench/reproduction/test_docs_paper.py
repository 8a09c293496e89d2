"""docs/paper.md and docs/crossover.md match the commands: words, options and files exist."""

import argparse
import re
import shlex
from pathlib import Path

import pytest
import torch

from ksopt.bench.crossover.options import CrossoverOptions
from ksopt.bench.crossover.request import PASSES, PRECISIONS, CrossoverRequest
from ksopt.bench.reproduction.options import PaperOptions
from ksopt.bench.reproduction.request import DTYPES, PaperRequest
from ksopt.bench.reproduction.tables_and_figures import ITEMS
from ksopt.cli import main
from ksopt.system import option_fields

DOCS = Path(__file__).parents[3] / "docs"
TEXTS = {kind: (DOCS / f"{kind}.md").read_text(encoding="utf-8") for kind in ("paper", "crossover")}
COMMANDS = [
    (kind, command)
    for kind, text in TEXTS.items()
    for command in re.findall(rf"(?:^|`)ksopt bench {kind}([^`\n]*)", text, flags=re.MULTILINE)
    if command or kind == "crossover"
]


@pytest.mark.parametrize(("kind", "command"), COMMANDS)
def test_a_command_asks_for_what_there_is(
    kind: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ksopt.measure.device.resolve", lambda name: torch.device("cuda:0"))
    monkeypatch.setattr("ksopt.system.limits.check_bytes", lambda *sizes: None)
    options, request = {
        "paper": (PaperOptions, PaperRequest),
        "crossover": (CrossoverOptions, CrossoverRequest),
    }[kind]
    parser = argparse.ArgumentParser()
    option_fields.add_arguments(parser, options)
    arguments, rest = parser.parse_known_args(shlex.split(command))
    assert set(rest[::2]) <= {"--out", "--minutes", "--workers"}
    built = request.of(options(**option_fields.values(options, arguments)))  # type: ignore[attr-defined]
    assert built.parts if kind == "paper" else built.sites
    # The command that a folder notes asks for the same.
    again, _ = parser.parse_known_args(shlex.split(built.command)[3:])
    assert request.of(options(**option_fields.values(options, again))) == built  # type: ignore[attr-defined]


def test_every_table_and_figure_has_its_command() -> None:
    named = set()
    for kind, command in COMMANDS:
        if kind == "paper" and "--all" not in command:
            parser = argparse.ArgumentParser()
            option_fields.add_arguments(parser, PaperOptions)
            arguments, _ = parser.parse_known_args(shlex.split(command))
            named |= {("table", number) for number in arguments.table or ()}
            named |= {("figure", number) for number in arguments.figure or ()}
    assert named == {(item.kind, item.number) for item in ITEMS}


@pytest.mark.parametrize("kind", TEXTS)
def test_the_options_and_their_words_exist(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["bench", kind, "--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    named = set(re.findall(r"`(--[a-z-]+)", TEXTS[kind]))
    assert named <= known
    assert known - named <= {"--help", "--json", "--quiet", "--seed", "--traceback", "--verbose"}
    for word in DTYPES if kind == "paper" else (*PRECISIONS, *PASSES):
        assert f"`{word}`" in TEXTS[kind]


def test_the_files_of_a_map_are_those_it_leaves(brief: None, tmp_path: Path) -> None:
    words = ["--widths", "16", "--rows", "1", "--passes", "inference", "--budgets", "50%"]
    command = ["bench", "crossover", *words, "--device", "cpu", "--quiet", "--out", str(tmp_path)]
    assert main.main(command) == 0
    named = re.findall(r"^\| (.*?) \|", TEXTS["crossover"].split("## Output files")[1], re.M)[1:]
    names = {word for cell in named for word in re.findall(r"`([^`]+)`", cell)}
    assert names == {path.name for path in tmp_path.iterdir()}
