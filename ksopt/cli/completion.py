"""The command ``ksopt completion``: a script that completes commands and options in a shell."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping

from ksopt.errors import UnavailableError

SUMMARY = "Print a script with which a shell completes commands and options."
EPILOG = """\
It needs shtab: pip install 'ksopt[completion]'.

examples:
  eval "$(ksopt completion bash)"                                # in ~/.bashrc
  ksopt completion zsh > ~/.zsh/completions/_ksopt

exit codes: 0 done, 1 shtab is not installed, 2 an argument is not allowed
"""
SHELLS = ("bash", "zsh", "tcsh")


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments; the caller adds those of every command."""
    command.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def run(args: argparse.Namespace, parser: Callable[[], argparse.ArgumentParser]) -> int:
    """Print the script for a parser; return the exit code."""
    try:
        import shtab
    except ImportError:
        raise UnavailableError("completion needs shtab: pip install 'ksopt[completion]'") from None
    whole = parser()
    _complete_files(whole, {"FILE": shtab.FILE, "FOLDER": shtab.DIRECTORY})
    script = shtab.complete(whole, shell=args.shell)
    sys.stdout.write(json.dumps({"script": script}) + "\n" if args.json else script + "\n")
    return 0


def _complete_files(parser: argparse.ArgumentParser, kinds: Mapping[str, object]) -> None:
    """Complete file names for arguments that are files."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_files(command, kinds)
        elif str(action.metavar).partition("[")[0] in kinds:
            action.complete = kinds[str(action.metavar).partition("[")[0]]  # type: ignore[attr-defined]
