"""A user's own rendering: `module:function`, called as function(prompt, completion) -> text of one side.

The prompt is a string (one user turn) or a tuple of `Message` turns, oldest first, tools as the first of them; a
completion that calls tools is an `Answer` (`rmcore.data.pair`). The text must hold the completion, for the limit cuts
around it, and the tools and further fields of messages, where there are some; which turns it reads is the function's.
Control tokens that the function writes are read as such; those that someone typed into what it is given are text:
before each is a private-use character as a mark, which must stay. It is code, so it is imported only where a person
or a configuration names it, never because a checkpoint does.
"""

from collections.abc import Callable
from dataclasses import dataclass

from rmcore.core.errors import DataError, ModelError
from rmcore.core.named_function import call_named, load_function, source_file_digest
from rmcore.data.pair import Prompt

SETTING = "render_fn"


@dataclass(frozen=True, slots=True)
class RenderFn:
    """A rendering function and the `module:function` under which a checkpoint records it."""

    name: str
    function: Callable[[Prompt, str], str]

    def __call__(self, prompt: Prompt, completion: str) -> str:
        """Render one side.

        Raises:
            DataError: the function failed, or returned something else than a text.
        """
        text = call_named(SETTING, self.name, self.function, prompt, completion)
        if not isinstance(text, str):
            raise DataError(
                f"render_fn {self.name} returned {type(text).__name__} for the completion {completion[:60]!r}: the "
                "text of one side is expected. Let it return a str."
            )
        return text


def load_render_fn(name: str) -> RenderFn:
    """Import the function that `name` (`module:function`) stands for. The current folder is looked at last.

    Raises:
        ConfigError: the module or the function is not there, or it cannot be called with prompt and completion.
    """
    meaning = "a function of (prompt, completion) that returns the text of one side"
    return RenderFn(name, load_function(SETTING, name, meaning))


def render_fn_digest(name: str) -> str:
    """sha256 in hex of the source file of the function's module; what that file imports is not part of it.

    Raises:
        ConfigError: there is no such module, or it has no file.
    """
    return source_file_digest(SETTING, name)


def check_function(recorded: str | None, form: str, given: RenderFn | None) -> None:
    """Refuse another function than the one that a checkpoint of this format records, or one where it records none.

    Raises:
        ModelError: says what to pass.
    """
    name = None if given is None else given.name
    if name == recorded:
        return
    if recorded is None:
        raise ModelError(
            f"render_fn {name} was passed to a model of the {form} format, whose rewards it would change; leave "
            "render_fn out, or train with it."
        )
    raise ModelError(
        f"this checkpoint was trained on text rendered by {recorded}, and "
        + (f"{name} was passed" if name else "a function is not imported merely because a checkpoint names it")
        + f"; if you trust it, pass render_fn={recorded!r} (--render-fn {recorded})."
    )
