"""The preference pair: the one record that every stage speaks of."""

import hashlib
import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from rmcore.core.errors import DataError


class Message(NamedTuple):
    """One turn of a dialogue."""

    role: str
    content: str


_UNSEEN_CATEGORIES = frozenset(("Cc", "Cf", "Zs", "Zl", "Zp"))
_UNSEEN = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0" + "".join(map(chr, range(0xFE00, 0xFE10))))
"""Characters of other categories that are invisible, too: joiners, fillers, empty Braille, variation selectors."""

CHOSEN_PROBABILITY = "chosen_probability"
"""Where a pair's metadata have it: how likely another label of this pair names the same side, 0 to 1."""

Prompt = str | tuple[Message, ...]
"""The prompt that a completion answers: a plain string (one user turn) or the turns of a dialogue, oldest first."""


def prompt_messages(prompt: Prompt) -> tuple[Message, ...]:
    """The prompt as dialogue turns; a plain string is one user turn."""
    return (Message("user", prompt),) if isinstance(prompt, str) else prompt


def plain_prompt(prompt: tuple[Message, ...]) -> Prompt:
    """One form for one meaning: a single user turn is its text, everything else stays a dialogue."""
    return prompt[0].content if len(prompt) == 1 and prompt[0].role == "user" else prompt


def prompt_text(prompt: Prompt) -> str:
    """The prompt as plain text: one user turn is its content, several turns are `Role: content` paragraphs."""
    messages = prompt_messages(prompt)
    if len(messages) == 1 and messages[0].role == "user":
        return messages[0].content
    return "\n\n".join(f"{message.role.capitalize()}: {message.content}" for message in messages)


def opening(prompt: Prompt) -> str:
    """Give the text that a conversation began with: its first user turn; of a prompt without one, the whole of it.

    The prompts of one conversation are one another's beginnings, so they are not independent: splits keep them together
    and intervals are drawn over conversations. A prompt of one turn is a conversation of its own.
    """
    return next((turn.content for turn in prompt_messages(prompt) if turn.role == "user"), prompt_text(prompt))


def is_blank(text: str) -> bool:
    """Whether nothing of a text can be seen: white space, control and zero-width characters alone, or none at all."""
    return all(char in _UNSEEN or unicodedata.category(char) in _UNSEEN_CATEGORIES for char in text)


def prompt_key(prompt: Prompt) -> str:
    """Digest of a prompt with all its turns: what samples of a policy are stored under."""
    return content_id(prompt_text(prompt))


def content_id(*parts: str) -> str:
    """16 hex digits that depend on the given texts and their order only."""
    return hashlib.sha256("\x1f".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def text_number(*parts: str) -> int:
    """The same as a number of 64 bits, of which an array holds ten million in 80 MB.

    Two of n different texts share theirs with probability n^2 / 2^65: one in 400,000 for ten million.
    """
    return int(content_id(*parts), 16)


@dataclass(frozen=True, slots=True, init=False)
class PreferencePair:
    """One prompt with two completions, of which `chosen` was preferred.

    `target_margin` is the annotated strength of the preference, in the annotator's own unit, or None; `margin` is
    another name for it. `metadata` holds whatever else the record carried (`subset` is read by evaluation).
    `pair_id` defaults to a digest of the three texts.

    Raises:
        DataError: a text is empty, both completions are the same, or the margin is given under both names.
    """

    prompt: Prompt
    chosen: str
    rejected: str
    target_margin: float | None
    metadata: Mapping[str, Any]
    pair_id: str

    # By hand: an InitVar `margin` could not have a property beside it, and `pair.margin` would be None for every pair.
    def __init__(
        self,
        prompt: Prompt,
        chosen: str,
        rejected: str,
        target_margin: float | None = None,
        metadata: Mapping[str, Any] | None = None,
        pair_id: str = "",
        *,
        margin: float | None = None,
    ) -> None:
        if margin is not None and target_margin is not None:
            raise DataError(
                f"margin={margin} and target_margin={target_margin} are two names of one thing; give one of them."
            )
        values = {
            "prompt": prompt,
            "chosen": chosen,
            "rejected": rejected,
            "target_margin": margin if target_margin is None else target_margin,
            "metadata": {} if metadata is None else metadata,
            "pair_id": pair_id,
        }
        for field, value in values.items():
            object.__setattr__(self, field, value)
        self._check()

    def _check(self) -> None:
        for name, text in (("prompt", prompt_text(self.prompt)), ("chosen", self.chosen), ("rejected", self.rejected)):
            if is_blank(text):
                raise DataError(f"the {name} of a preference pair is empty: nothing can be scored. Drop the row.")
        if self.chosen == self.rejected:
            raise DataError("chosen and rejected are the same text: the pair carries no preference. Drop the row.")
        if not self.pair_id:
            object.__setattr__(self, "pair_id", content_id(prompt_text(self.prompt), self.chosen, self.rejected))

    @property
    def margin(self) -> float | None:
        """`target_margin`, as the tutorial calls it; a reward model's own margin is another thing."""
        return self.target_margin

    @property
    def prompt_id(self) -> str:
        """Digest of what the prompt's conversation began with (`opening`): the unit that intervals are drawn over."""
        return content_id(opening(self.prompt))

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready record that `rmcore.data.readers.sources` reads back to an equal pair.

        A prompt that is the transcript of a dialogue comes back as its turns.
        """
        prompt = self.prompt if isinstance(self.prompt, str) else [message._asdict() for message in self.prompt]
        return {
            "pair_id": self.pair_id,
            "prompt": prompt,
            "chosen": self.chosen,
            "rejected": self.rejected,
            "target_margin": self.target_margin,
            "metadata": json.loads(json.dumps(dict(self.metadata))),
        }


def cap_pairs(pairs: Iterable[PreferencePair], most: int | None) -> list[PreferencePair]:
    """The first `most` pairs of each prompt, with all its turns, in order; None keeps all."""
    seen: Counter[Prompt] = Counter()
    kept = []
    for pair in pairs:
        seen[pair.prompt] += 1
        if most is None or seen[pair.prompt] <= most:
            kept.append(pair)
    return kept
