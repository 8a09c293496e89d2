"""Imports and calls of functions and modules that a user names, which run the user's code."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TextIO

from ksopt.errors import InvalidInputError
from ksopt.system.suggest import nearest

if TYPE_CHECKING:
    from torch import nn


def build_model(text: str, stream: TextIO, option: str = "--model") -> nn.Module:
    """The model that MODULE:FACTORY returns; a notice that its code runs goes to ``stream``.

    Args:
        text: MODULE:FACTORY.
        stream: For the notice, and for output of the function.
        option: The option or the command that names it.

    Raises:
        InvalidInputError: As `call_factory`; or the result is no model.
    """
    from torch import nn

    model = call_factory(option, text, stream)
    if not isinstance(model, nn.Module):
        factory_name = text.partition(":")[2]
        raise InvalidInputError(
            f"{option} {text}: {factory_name}() must return a torch.nn.Module, and returned "
            f"{type(model).__name__}"
        )
    return model


def call_factory(option: str, text: str, stream: TextIO) -> object:
    """The result of the user's function; a notice that its code runs goes to ``stream``.

    Args:
        option: The option that names it, such as ``--model``.
        text: MODULE:FACTORY.
        stream: For the notice, and for output of the function.

    Raises:
        InvalidInputError: There is no such function, or it raises; the cause is then its error.
    """
    factory = load_function(option, text, stream)
    name = text.partition(":")[2]
    # Its output must not mix with the lines of a result.
    with (
        _current_folder_first(),
        contextlib.redirect_stdout(stream),
        _in_words(f"{option} {text}: {name}()"),
    ):
        return factory()


def load_function(option: str, text: str, stream: TextIO) -> Callable[..., Any]:
    """A user's function, imported; a notice that its code runs goes to ``stream``.

    Args:
        option: The option that names it, such as ``--model``.
        text: MODULE:FUNCTION.
        stream: For the notice, and for output of the import.

    Raises:
        InvalidInputError: There is no such function, or importing its module raises; the cause is
            then its error.
    """
    module_name, _, factory_name = text.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), factory_name)):
        raise InvalidInputError(
            f"{option} {text!r}: write MODULE:FACTORY, such as mymodel:build for the function "
            "build() of mymodel.py"
        )
    module = _imported(f"{option} {text}", module_name, stream)
    function: object = getattr(module, factory_name, None)
    if not callable(function):
        names = [name for name, value in vars(module).items() if callable(value)]
        raise InvalidInputError(
            f"{option} {text}: {module_name} has no function {factory_name}"
            f"{nearest(factory_name, names)}"
        )
    return function


def import_plugins(names: Iterable[str], stream: TextIO) -> None:
    """Import a user's modules, which register plugins; a notice of it goes to ``stream``.

    Args:
        names: As in ``import NAME``.
        stream: For the notice, and for output of the modules.

    Raises:
        InvalidInputError: There is no such module, or importing it raises; the cause is then its
            error.
    """
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise InvalidInputError(
                f"--plugins {name!r}: write the name of a module, such as mine for mine.py"
            )
        if name not in sys.modules:
            _imported(f"--plugins {name}", name, stream)


def _imported(what: str, module_name: str, stream: TextIO) -> ModuleType:
    """Import a user's module."""
    with _current_folder_first():
        try:
            spec = importlib.util.find_spec(module_name)
        except ModuleNotFoundError:
            spec = None
        if spec is None:
            raise InvalidInputError(
                f"{what}: there is no module {module_name}, neither installed nor in {Path.cwd()}"
            )
        if module_name not in sys.modules:
            print(f"importing {spec.origin}, which runs its code", file=stream)
        # Its output must not mix with the lines of a result.
        with contextlib.redirect_stdout(stream), _in_words(f"{what}: importing {module_name}"):
            return importlib.import_module(module_name)


@contextlib.contextmanager
def _in_words(what: str) -> Iterator[None]:
    """Turn an exception of the user's code into one sentence."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise InvalidInputError(
            f"{what} raised {type(error).__name__}: {error} (--traceback shows where)"
        ) from error


@contextlib.contextmanager
def _current_folder_first() -> Iterator[None]:
    """Import modules from the current folder first, as python -m does."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(here)
