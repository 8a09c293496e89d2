"""Functions and modules that a user names: imported and called, which runs their code."""

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


def build_model(text: str, stream: TextIO) -> nn.Module:
    """The model that MODULE:FACTORY names; ``stream`` is told that its code runs.

    Raises:
        InvalidInputError: As `call_factory`; what it returns is no model.
    """
    from torch import nn

    model = call_factory("--model", text, stream)
    if not isinstance(model, nn.Module):
        factory_name = text.partition(":")[2]
        raise InvalidInputError(
            f"--model {text}: {factory_name}() must return a torch.nn.Module, and returned "
            f"{type(model).__name__}"
        )
    return model


def call_factory(option: str, text: str, stream: TextIO) -> object:
    """What the user's function returns; ``stream`` is told that its code runs.

    Args:
        option: What names it on the command line, such as ``--model``.
        text: MODULE:FACTORY.
        stream: For the user, and for what the function prints.

    Raises:
        InvalidInputError: There is no such function, or it raises; the error is the cause then.
    """
    factory = load_function(option, text, stream)
    name = text.partition(":")[2]
    # What it prints must not come between the lines of a result.
    with (
        _current_folder_first(),
        contextlib.redirect_stdout(stream),
        _in_words(f"{option} {text}: {name}()"),
    ):
        return factory()


def load_function(option: str, text: str, stream: TextIO) -> Callable[..., Any]:
    """A user's function, its module imported; ``stream`` is told that its code runs.

    Args:
        option: What names it on the command line, such as ``--model``.
        text: MODULE:FUNCTION.
        stream: For the user, and for what the module prints as it is imported.

    Raises:
        InvalidInputError: There is no such function, or importing its module raises; the error is
            the cause then.
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
    """Import a user's modules, which register what is theirs; ``stream`` is told so.

    Args:
        names: As in ``import NAME``.
        stream: For the user, and for what the modules print.

    Raises:
        InvalidInputError: There is no such module, or importing it raises; the error is the cause
            then.
    """
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise InvalidInputError(
                f"--plugins {name!r}: write the name of a module, such as mine for mine.py"
            )
        if name not in sys.modules:
            _imported(f"--plugins {name}", name, stream)


def _imported(what: str, module_name: str, stream: TextIO) -> ModuleType:
    """A user's module."""
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
            print(f"importing {spec.origin}: this is its own code", file=stream)
        # What it prints must not come between the lines of a result.
        with contextlib.redirect_stdout(stream), _in_words(f"{what}: importing {module_name}"):
            return importlib.import_module(module_name)


@contextlib.contextmanager
def _in_words(what: str) -> Iterator[None]:
    """What the user's code raises, in a sentence."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise InvalidInputError(
            f"{what} raised {type(error).__name__}: {error} (--traceback shows where)"
        ) from error


@contextlib.contextmanager
def _current_folder_first() -> Iterator[None]:
    """A user's modules are those of the folder where the command runs, as with python -m."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(here)
