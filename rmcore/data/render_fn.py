"""A user's own rendering: `module:function`, called as function(prompt, completion) -> text of one side.

The prompt is a string (one user turn) or a tuple of `Message` turns, oldest first; the text must hold the completion,
for the limit cuts around it. It is code, so it is imported only where a person or a configuration names it, never
because a checkpoint does.
"""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rmcore.data.pair import Prompt
from rmcore.errors import ConfigError, DataError

_FORM = "render_fn is module:function, of a file in the current folder, on PYTHONPATH or installed"


@dataclass(frozen=True, slots=True)
class RenderFn:
    """A rendering function and the `module:function` under which a checkpoint records it."""

    name: str
    function: Callable[[Prompt, str], str]

    def __call__(self, prompt: Prompt, completion: str) -> str:
        """Render one side.

        Raises:
            DataError: the function returned something else than a text.
        """
        text = self.function(prompt, completion)
        if not isinstance(text, str):
            raise DataError(
                f"render_fn {self.name} returned {type(text).__name__} for the completion {completion[:60]!r}: the "
                "text of one side is expected. Let it return a str."
            )
        return text


def load_render_fn(name: str) -> RenderFn:
    """Import the function that `name` (`module:function`) stands for. The current folder is looked at last.

    Raises:
        ConfigError: the module or the function is not there, or it cannot be called.
    """
    module_name, function_name = _parts(name)
    _add_current_folder()
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError) as error:
        raise ConfigError(
            f"render_fn={name}: the module {module_name} cannot be imported ({error}). {_FORM}."
        ) from error
    if not hasattr(module, function_name):
        place = getattr(module, "__file__", None) or "which has no file"
        raise ConfigError(f"render_fn={name}: {module_name} ({place}) has no {function_name}. {_FORM}.")
    function = getattr(module, function_name)
    if not callable(function):
        raise ConfigError(
            f"render_fn={name}: {function_name} is a {type(function).__name__} and cannot be called; name a function "
            "of (prompt, completion) that returns the text of one side."
        )
    return RenderFn(name, function)


def render_fn_digest(name: str) -> str:
    """sha256 in hex of the source file of the function's module; what that file imports is not part of it.

    Raises:
        ConfigError: there is no such module, or it has no file.
    """
    module_name, _ = _parts(name)
    _add_current_folder()
    try:
        spec = importlib.util.find_spec(module_name)
    except (ImportError, SyntaxError, ValueError) as error:  # of a parent package; ValueError: the running script
        raise ConfigError(f"render_fn={name}: the module {module_name} cannot be found ({error}). {_FORM}.") from error
    if spec is None or spec.origin is None or not spec.has_location:
        raise ConfigError(f"render_fn={name}: there is no file of a module {module_name}. {_FORM}.")
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()


def _parts(name: str) -> tuple[str, str]:
    module, colon, function = name.partition(":")
    if not (module and colon and function) or module.startswith("."):
        raise ConfigError(f"render_fn={name!r} does not name a function. {_FORM}.")
    return module, function


def _add_current_folder() -> None:
    """Make modules of the current folder importable, after all others, so that none stands in for a library.

    A console script and `python -P` leave that folder out. It stays in, as the function may import when it is called.
    """
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    importlib.invalidate_caches()
