"""The argument parser: short errors with the nearest valid word, and options of every command."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ksopt.search.storage_url import without_password
from ksopt.system.suggest import nearest

SIZE = re.compile(r"[0-9]+[xX×][0-9]+")
"""The size of a layer, INxOUT."""


class Parser(argparse.ArgumentParser):
    """Reports an invalid argument in one line, without the whole usage before it."""

    _words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = list(sys.argv[1:] if args is None else args)
        for word in self._words:
            if "\0" in word:
                self.error(f"{word!r}: no argument can hold a NUL character")
            # argparse takes the value -- for an empty list.
            if word.startswith("--") and word.endswith("=--"):
                self.error(f"{word}: -- is no value")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        command = self._command()
        message += command._hint(message)
        # The message may quote a storage URL with a password.
        for word in self._words:
            message = message.replace(word, without_password(word)) if word else message
        prog = command.prog
        self.exit(2, f"{prog}: {message} ({prog} --help says what is allowed)\n")

    def _command(self) -> Parser:
        """The parser of the command in the words, or this parser."""
        parser: Parser = self
        for word in self._words:
            for action in parser._actions:
                if isinstance(action, argparse._SubParsersAction) and word in action.choices:
                    parser = action.choices[word]
                    break
        return parser

    def _hint(self, message: str) -> str:
        """A suggestion for the word that a message rejects; empty if there is none."""
        choice = re.search(r"invalid choice: '([^']*)'", message)
        if choice is not None:
            choices = [word for one in self._actions for word in one.choices or ()]
            return nearest(choice[1], choices)
        _, unknown, words = message.partition("unrecognized arguments: ")
        for word in words.split() if unknown else ():
            if word.startswith("--"):
                name = word.partition("=")[0]
                return nearest(name, self._option_string_actions, prefix="--")
            if SIZE.fullmatch(word):
                return "; write sizes beside each other, before the options"
        return ""


def add_command(
    commands: argparse._SubParsersAction[Parser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    epilog: str,
    add_arguments: Callable[[argparse.ArgumentParser], None] | None = None,
    usage: str | None = None,
) -> None:
    """Add a command: its own options first, then the options of every command.

    Args:
        commands: The subparsers to add it to.
        name: Of the command.
        run: (arguments) -> the exit code.
        summary: A sentence that describes the command.
        epilog: Examples and exit codes.
        add_arguments: Adds its own options.
        usage: The first line of the help; None lists every option.
    """
    command = commands.add_parser(
        name,
        help=summary[0].lower() + summary[1:].rstrip("."),
        description=summary,
        epilog=epilog,
        usage=usage,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    command.set_defaults(run=run)
    if add_arguments is not None:
        add_arguments(command)
    shared = command.add_argument_group("output and errors").add_argument
    shared("-h", "--help", action="help", help="show this message and exit")
    shared("--json", action="store_true", help="print one JSON document to stdout")
    shared(
        "--quiet", action="store_true", help="no progress on stderr: the answer and errors alone"
    )
    shared(
        "-v",
        "--verbose",
        action="count",
        default=0,
        help="log what is done to stderr; -vv says more",
    )
    shared("--traceback", action="store_true", help="show where an error came from")
