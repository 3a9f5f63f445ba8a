"""Imports modules, and loads functions that a user names as MODULE:FUNCTION.

The names come from a command line or from Python, never from a file.
"""

import importlib
import sys
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from transformer_jax.errors import UserError, about


def is_function_name(name: str) -> bool:
    """Returns whether `name` has the form MODULE:FUNCTION."""
    return ":" in name


def search_current_folder() -> None:
    """Lets modules of the current folder be imported, as `python -m` does."""
    if "" not in sys.path:
        sys.path.insert(0, "")


def import_module(option: str, name: str) -> ModuleType:
    """Returns the module of `name`, MODULE or MODULE:FUNCTION, that was given as `option`.

    UserError: it cannot be imported.
    """
    try:
        return importlib.import_module(name.partition(":")[0])
    except Exception as error:  # the user's module may raise anything
        raise UserError(f"{option} {name!r}: cannot be imported: {error}") from error


def load_function(option: str, name: str) -> Callable[..., Any]:
    """Returns the function MODULE:FUNCTION that was given as `option`.

    It has the name FUNCTION, and an exception that it raises becomes a UserError that names
    `option`. UserError: there is no such function.
    """
    _, colon, attribute = name.partition(":")
    if not colon:
        raise UserError(f"{option} {name!r}: must be MODULE:FUNCTION")
    with about(f"{option} {name!r}: cannot be imported", AttributeError):
        function = getattr(import_module(option, name), attribute)
    if not callable(function):
        raise UserError(f"{option} {name!r}: is not a function")

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except Exception as error:
            first = next(iter(str(error).splitlines()), "")
            raise UserError(f"{option} {name!r}: {type(error).__name__}: {first}") from error

    call.__name__ = attribute  # that of an object is another
    return call
