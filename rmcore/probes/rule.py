"""A rule: how an answer is edited, and what the edit may do to its reward.

One of the user's own is a function (answer, rng) in a module of theirs, which one of the three words decorates:

    from rmcore.probes.rule import Answer, not_higher

    @not_higher
    def says_thanks(answer: Answer, rng: Random) -> str | None:
        '''Thanks at the end do not raise a reward.'''
        return None if "thank" in answer.text.lower() else f"{answer.text} Thank you!"
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal

from rmcore.core.errors import ConfigError, DataError
from rmcore.core.named_function import call_named, load_function
from rmcore.data.pair import Prompt, is_blank, prompt_text

SETTING = "--rule"
Expectation = Literal["invariant", "not_higher", "lower"]
"""invariant: the edit changes nothing that counts. not_higher: it earns nothing, and may cost. lower: it must cost."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer as a rule sees it."""

    prompt: Prompt
    """A text, or the turns of a dialogue, the question last."""
    text: str
    elsewhere: str | None = None
    """An answer to another prompt of the same data; None where there is no other prompt."""

    @property
    def question(self) -> str:
        """The prompt's last turn; the prompt itself where it is a text."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[-1].content


Edit = Callable[[Answer, Random], str | None]
"""Gives the edited answer, or None where the rule does not apply. All its randomness comes from the generator."""


@dataclass(frozen=True, slots=True)
class Rule:
    """An edit and its expectation; made by decorating the edit with `invariant`, `not_higher` or `lower`."""

    name: str
    expects: Expectation
    edit: Edit
    meaning: str
    """First line of the edit's docstring."""

    def __call__(self, answer: Answer, rng: Random) -> str | None:
        """Give the edited answer, or None; see `Edit`."""
        return self.edit(answer, rng)

    def apply(self, answer: Answer, *, seed: int) -> str | None:
        """Edit an answer; the same for the same answer and seed, in whatever order answers come.

        Returns:
            None where the rule does not apply, which an edit that changes nothing says, too.

        Raises:
            DataError: the edit failed, or gave something else than a text.
        """
        rng = Random(f"{seed} {self.name} {prompt_text(answer.prompt)} {answer.text}")  # noqa: S311 - no secrets
        edited = call_named(SETTING, self.name, self.edit, answer, rng)
        if edited is not None and not isinstance(edited, str):
            raise DataError(
                f"{SETTING}={self.name} returned {type(edited).__name__} for the answer {answer.text[:60]!r}: the "
                "edited answer is expected, or None where the rule does not apply."
            )
        return None if edited is None or edited == answer.text or is_blank(edited) else edited


def _rule(edit: Edit, expects: Expectation) -> Rule:
    name = getattr(edit, "__name__", type(edit).__name__)
    return Rule(name, expects, edit, (edit.__doc__ or name).strip().partition("\n")[0])


def invariant(edit: Edit) -> Rule:
    """Make a rule of an edit that must not decide."""
    return _rule(edit, "invariant")


def not_higher(edit: Edit) -> Rule:
    """Make a rule of an edit that must not raise a reward; lowering it is as good."""
    return _rule(edit, "not_higher")


def lower(edit: Edit) -> Rule:
    """Make a rule of an edit that spoils a good answer, so that its reward must fall."""
    return _rule(edit, "lower")


def load_rule(name: str) -> Rule:
    """Import a rule of the user's own, `module:function`. The current folder is looked at last.

    Raises:
        ConfigError: it is not there, or says not what it expects.
    """
    words = "@invariant, @not_higher or @lower of rmcore.probes.rule"
    found = load_function(SETTING, name, f"a function of (answer, rng) decorated with {words}")
    if not isinstance(found, Rule):
        raise ConfigError(f"{SETTING}={name}: the function says not what it expects; decorate it with {words}.")
    return Rule(name, found.expects, found.edit, found.meaning)
