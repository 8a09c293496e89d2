"""Fields of a dataclass that are options of a command, defined in one place.

A field created by `option` determines the argument of the command and its help, the value that the
dataclass takes from the arguments, the words of the command that recreates the dataclass, and the
option's name in sentences that name the field.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

_KEY = "option"
COMMON = "common options"
"""The heading of the options that the help lists first."""


@dataclass(frozen=True)
class Option:
    """The command-line option of a field.

    Args:
        help: Its text in ``--help``; %(default)s is its default.
        group: Its group in the help.
        flag: Its name; empty for the field's, with hyphens.
        metavar: The name of its value.
        parse: (text) -> a value; None for a text. A field that is False takes no value.
        nargs: argparse's, for several values; a repeated option adds to them.
        is_replaced: Whether a repeated option replaces its values.
        joined: The separator of several values in a command: a space, or a comma if they are one
            word.
        is_always_shown: Whether a command includes it even if it is the default.
        is_named: Whether sentences of the library name the field by another name than the flag.
        is_common: Whether the help lists it among the first options, for any group.
    """

    help: str
    group: str
    flag: str = ""
    metavar: str | None = None
    parse: Callable[[str], Any] | None = None
    nargs: str | None = None
    is_replaced: bool = False
    joined: str = " "
    is_always_shown: bool = False
    is_named: bool = False
    is_common: bool = False

    @property
    def heading(self) -> str:
        """The heading of the option's group in the help."""
        return COMMON if self.is_common else self.group


def option(default: Any, help: str, group: str, *, repr: bool = True, **how: Any) -> Any:
    """A dataclass field that is also an option; ``how`` has the other arguments of `Option`."""
    return field(default=default, repr=repr, metadata={_KEY: Option(help, group, **how)})


def options_of(kind: type[Any]) -> dict[str, Option]:
    """The fields of a dataclass that are options, by name."""
    return {one.name: one.metadata[_KEY] for one in fields(kind) if _KEY in one.metadata}


def flag_of(name: str, one: Option) -> str:
    """The option's name without leading hyphens."""
    return one.flag or name.replace("_", "-")


def add_arguments(
    parser: argparse.ArgumentParser,
    kind: type[Any],
    before: Mapping[str, Callable[[Callable[..., Any]], None]] | None = None,
) -> None:
    """Add a dataclass's options to a command, in the order of its fields.

    Args:
        parser: Of the command.
        kind: The dataclass.
        before: Functions that add an option that is no field, by the name of the next field.
    """
    options = options_of(kind)
    first = [COMMON] if any(one.is_common for one in options.values()) else []
    headings = dict.fromkeys([*first, *(one.heading for one in options.values())])
    groups = {each: parser.add_argument_group(each).add_argument for each in headings}
    for name, one in options.items():
        if before is not None and name in before:
            before[name](groups[one.heading])
        add_argument(groups[one.heading], kind, name)


def add_argument(add: Callable[..., Any], kind: type[Any], name: str) -> None:
    """Add one option to a command, or to a group of its options."""
    one, default = options_of(kind)[name], _default(kind, name)
    how: dict[str, Any] = {"help": one.help, "default": default}
    if default is False:
        how["action"] = "store_true"
    elif one.nargs is not None:
        how |= {"nargs": one.nargs, "metavar": one.metavar, "type": one.parse}
        how |= {"default": None} if one.is_replaced else {"default": [], "action": "extend"}
    else:
        how |= {"type": one.parse, "metavar": one.metavar}
    add(f"--{flag_of(name, one)}", **how)


def values(kind: type[Any], args: argparse.Namespace) -> dict[str, Any]:
    """The values of a dataclass's fields in a command's arguments, without missing ones."""
    passed = {}
    for name, one in options_of(kind).items():
        value = getattr(args, flag_of(name, one).replace("-", "_"), None)
        if value is not None:
            passed[name] = tuple(value) if isinstance(value, list) else value
    return passed


def words(one: object, first: Sequence[str] = (), **instead: Any) -> Iterator[str]:
    """The words of the command that recreates a dataclass, without default values.

    Args:
        one: The dataclass.
        first: The fields that the command begins with; the others follow in their order.
        instead: Values to use in place of the fields', by name.
    """
    options = options_of(type(one))
    for name in dict.fromkeys([*first, *options]):
        how, value = options[name], instead.get(name, getattr(one, name))
        shown = how.is_always_shown or value != _default(type(one), name)
        if value is None or value == () or not shown:
            continue
        yield f"--{flag_of(name, how)}"
        if isinstance(value, (tuple, list)):
            yield how.joined.join(shlex.quote(str(each)) for each in value)
        elif value is not True:
            yield shlex.quote(f"{value:g}" if isinstance(value, float) else str(value))


def in_flags(kind: type[Any], sentence: str) -> str:
    """A sentence with the fields of a dataclass replaced by the names of their options."""
    flags = {}
    for name, one in options_of(kind).items():
        if _default(kind, name) is False:
            flags[f"{name}=True"] = f"--{flag_of(name, one)}"
        elif one.is_named or "_" in name:
            flags[name] = f"--{flag_of(name, one)}"
    return re.sub(rf"\b({'|'.join(flags)})\b", lambda match: flags[match[0]], sentence)


def _default(kind: type[Any], name: str) -> Any:
    (one,) = (each for each in fields(kind) if each.name == name)
    return None if one.default is MISSING else one.default


def whole_number(text: str) -> int:
    """An argument that is a whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def number(text: str) -> float:
    """An argument that is a number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
