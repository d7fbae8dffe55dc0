"""Functions that a setting names: `module:function`, code of the user's own.

Imported only where a person or a configuration names it, never because a file does.
"""

import hashlib
import importlib
import importlib.util
import inspect
import math
import numbers
import sys
import traceback
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

from rmcore.core.errors import ConfigError, DataError, RmcoreError

REWARD_MEANING = "a function of (prompt, response) that returns a number"
_FORM = "{} is module:function, of a file in the current folder, on PYTHONPATH or installed"


def load_function(setting: str, name: str, meaning: str) -> Callable[..., Any]:
    """Import the function of two that `name` (`module:function`) stands for. The current folder is looked at last.

    Args:
        setting: which names it, for messages.
        name: module:function.
        meaning: what it has to be, for messages.

    Raises:
        ConfigError: the module or the function is not there, or it cannot be called with two arguments.
    """
    module_name, function_name = _split_name(setting, name)
    _add_current_folder()
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing runs the user's code, which raises what it likes
        raise ConfigError(
            f"{setting}={name}: the module {module_name} cannot be imported ({type(error).__name__}: {error}). "
            f"{_FORM.format(setting)}."
        ) from error
    if not hasattr(module, function_name):
        place = getattr(module, "__file__", None) or "which has no file"
        raise ConfigError(f"{setting}={name}: {module_name} ({place}) has no {function_name}. {_FORM.format(setting)}.")
    function: Callable[..., Any] = getattr(module, function_name)
    if not callable(function):
        raise ConfigError(
            f"{setting}={name}: {function_name} is a {type(function).__name__} and cannot be called; name {meaning}."
        )
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        raise ConfigError(
            f"{setting}={name}: {function_name} is asynchronous, so that it returns a coroutine; name {meaning}."
        )
    try:
        signature = inspect.signature(function)
    except ValueError:  # of some functions written in C nobody knows it
        return function
    try:
        signature.bind("", "")
    except TypeError as error:
        raise ConfigError(
            f"{setting}={name}: {function_name}{signature} cannot be called with two arguments ({error}); "
            f"name {meaning}."
        ) from error
    return function


def call_named(setting: str, name: str, function: Callable[..., Any], *arguments: object) -> Any:
    """Call a user's function and give what it returns.

    Raises:
        DataError: it failed.
    """
    try:
        return function(*arguments)
    except RmcoreError:
        raise
    except Exception as error:  # the user's code raises what it likes
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise DataError(
            f"{setting}={name} failed with {type(error).__name__}: {error} ({place.filename}, line {place.lineno}) on "
            f"{', '.join(repr(argument)[:60] for argument in arguments)}; it has to take whatever the data hold."
        ) from error


def call_for_number(setting: str, name: str, function: Callable[..., Any], prompt: Any, response: str) -> float:
    """Call a user's function of (prompt, response) and give its finite number.

    It may be one of Python's (`Decimal` and `Fraction`, too), of numpy's, or a tensor or array with one element.

    Raises:
        DataError: it failed, or gave something else.
    """
    value = call_named(setting, name, function, prompt, response)
    number = _number(value)
    if not math.isfinite(number):
        raise DataError(
            f"{setting}={name} gave {repr(value)[:200]} for the response {response[:60]!r}, which is a "
            f"{type(value).__name__}; a finite number is expected for every response, empty ones included."
        )
    return number


def _number(value: Any) -> float:
    """The number that a value is; NaN where it is none."""
    try:
        plain = value.item() if hasattr(value, "item") else value  # of numpy and torch, with one element
        is_number = isinstance(plain, numbers.Real | Decimal) and not isinstance(plain, bool)
        return float(plain) if is_number else math.nan
    except (ArithmeticError, TypeError, ValueError, RuntimeError):  # several elements, or too large
        return math.nan


def source_file_digest(setting: str, name: str) -> str:
    """sha256 in hex of the source file of the function's module; what that file imports is not part of it.

    Raises:
        ConfigError: there is no such module, or it has no file.
    """
    module_name, _ = _split_name(setting, name)
    _add_current_folder()
    try:
        spec = importlib.util.find_spec(module_name)
    except (ImportError, SyntaxError, ValueError) as error:  # of a parent package; ValueError: the running script
        raise ConfigError(
            f"{setting}={name}: the module {module_name} cannot be found ({error}). {_FORM.format(setting)}."
        ) from error
    if spec is None or spec.origin is None or not spec.has_location:
        raise ConfigError(f"{setting}={name}: there is no file of a module {module_name}. {_FORM.format(setting)}.")
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()


def _split_name(setting: str, name: str) -> tuple[str, str]:
    module, colon, function = name.partition(":")
    if not (module and colon and function) or module.startswith("."):
        raise ConfigError(f"{setting}={name!r} does not name a function. {_FORM.format(setting)}.")
    return module, function


def _add_current_folder() -> None:
    """Make modules of the current folder importable, after all others, so that none stands in for a library.

    A console script and `python -P` leave that folder out. It stays in, as the function may import when it is called.
    """
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    importlib.invalidate_caches()
