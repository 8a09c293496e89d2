"""An option of a command is one field: the argument, the value and the command come from it."""

import argparse
import shlex
from dataclasses import dataclass, fields

import pytest

from ksopt.bench.options import BenchOptions
from ksopt.cli.main import main
from ksopt.search import SearchRequest
from ksopt.search.report.results_json import results_schema
from ksopt.system.option_fields import (
    add_arguments,
    flag_of,
    in_flags,
    number,
    option,
    options_of,
    values,
    whole_number,
    words,
)


@dataclass(frozen=True)
class Toy:
    """The options of a command."""

    wheels: int = option(4, "how many (%(default)s)", "the car", parse=whole_number, metavar="N")
    top_speed: float | None = option(None, "m/s", "the car", flag="speed", parse=number)
    names: tuple[str, ...] = option((), "what it is called", "words", nargs="+", metavar="NAME")
    colours: tuple[str, ...] = option(
        ("red",), "one or more", "words", flag="colour", nargs="*", is_replaced=True
    )
    loud: bool = option(False, "with a horn", "words", is_named=True)
    built: str = "not an option"


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser, Toy, before={"colours": lambda add: add("--other", help="of no field")})
    return parser


def toy(*arguments: str) -> Toy:
    return Toy(**values(Toy, parser().parse_args(arguments)))


def test_no_argument_is_the_defaults() -> None:
    assert toy() == Toy()
    assert [*words(Toy())] == []


def test_arguments_are_values_and_values_are_a_command() -> None:
    parsed = toy("--wheels", "3", "--speed", "1.50", "--names", "a b", "--names", "c", "--loud")
    assert parsed == Toy(wheels=3, top_speed=1.5, names=("a b", "c"), loud=True)
    command = [*words(parsed)]
    assert command == ["--wheels", "3", "--speed", "1.5", "--names", "'a b' c", "--loud"]
    assert toy(*shlex.split(" ".join(command))) == parsed
    assert toy("--colour", "red", "--colour", "blue").colours == ("blue",)
    assert [*words(parsed, wheels=5, names=())] == ["--wheels", "5", "--speed", "1.5", "--loud"]


def test_the_help_has_groups_in_order() -> None:
    text = " ".join(parser().format_help().split())
    order = ["the car:", "--wheels N how many (4)", "words:", "--names NAME", "--other", "--colour"]
    assert sorted(order, key=text.rindex) == order
    assert "built" not in text


def test_sentences_name_options() -> None:
    sentence = "wheels 3 and top_speed 9: without loud=True it is not allowed"
    assert in_flags(Toy, sentence) == "wheels 3 and --speed 9: without --loud it is not allowed"


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [("--wheels=x", "is not a whole number"), ("--speed=x", "not a number")],
)
def test_what_is_no_number_is_refused(
    argument: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args([argument])
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(("command", "kind"), [("search", SearchRequest), ("bench", BenchOptions)])
def test_every_option_of_a_command_is_in_its_help(
    command: str, kind: type, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, *(["kernels"] if command == "bench" else []), "--help"])
    text = capsys.readouterr().out
    for name, one in options_of(kind).items():
        assert f"--{flag_of(name, one)} " in text, name
    others = {one.name for one in fields(kind)} - set(options_of(kind))
    assert others == ({"dims", "model_options"} if kind is SearchRequest else set())


# Of each option of a search a value that is not its default, as it is typed.
TYPED = {
    "batch": "7",
    "dtype": "float16",
    "layout": "batch_last",
    "device": "cpu",
    "epilogue": "bias gelu residual",
    "siblings": "3",
    "budgets": "25% 600",
    "min_use": "0.25",
    "min_rank": "3",
    "max_factors": "2",
    "families": "low_rank,monarch",
    "block_sizes": "2-16",
    "chainable": "",
    "aligned": "",
    "weights": "'my file.safetensors:up'",
    "max_error": "0.5",
    "objective": "latency",
    "train": "",
    "score": "mine:cost",
    "energy": "",
    "max_params": "900",
    "min_speedup": "1.2",
    "trials": "5",
    "timeout_s": "2.5",
    "seed": "9",
    "storage": "sqlite:///a.db",
    "study": "'a b'",
    "workers": "2",
    "plugins": "mine others",
    "out": "'my report'",
}


@pytest.mark.parametrize("name", TYPED)
def test_a_searchs_command_makes_the_same_search(name: str) -> None:
    flag = flag_of(name, options_of(SearchRequest)[name])
    command = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(command, SearchRequest)

    def request_of(text: str) -> SearchRequest:
        return SearchRequest(
            "32x64", **values(SearchRequest, command.parse_args(shlex.split(text)))
        )

    typed = f"--{flag} {TYPED[name]}".rstrip()
    needs = "--weights w " if name == "max_error" else ""
    request = request_of(needs + typed)
    assert getattr(request, name) != getattr(SearchRequest("32x64"), name)
    assert typed in request.command
    again = request_of(request.command.partition("--dims 32x64")[2])
    assert again.command == request.command
    assert SearchRequest.from_json(request.to_json()) == request


def test_every_option_of_a_search_is_in_the_schema() -> None:
    request = results_schema()["properties"]["request"]
    written = set(options_of(SearchRequest)) - {"out"} | {"dims", "command"}
    assert set(request["properties"]) == set(request["required"]) == written


def test_every_option_of_a_search_is_typed_above() -> None:
    # One more structure than chains is in tests/operators.
    assert set(TYPED) == set(options_of(SearchRequest)) - {"structures"}
