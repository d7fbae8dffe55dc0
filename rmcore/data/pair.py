"""The preference pair: the one record that every stage speaks of."""

import hashlib
import json
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Self

from rmcore.core.errors import DataError


class Message(NamedTuple):
    """One turn of a dialogue; `fields` is what else it has for the chat template, as one JSON object, or empty.

    Tools that may be called are the turn `TOOLS` before all others, with their JSON list as its content.

    >>> Message("user", "2 + 2?", '{"name": "Ada"}').record()
    {'role': 'user', 'content': '2 + 2?', 'name': 'Ada'}
    """

    role: str
    content: str
    fields: str = ""

    def record(self) -> dict[str, Any]:
        """The message as a chat template takes it: role, content and the fields of its own."""
        return {"role": self.role, "content": self.content, **self.further()}

    def further(self) -> dict[str, Any]:
        """The fields of its own: tool_calls, tool_call_id, name, reasoning_content and whatever else it has."""
        return json.loads(self.fields) if self.fields else {}

    @property
    def text(self) -> str:
        """All of it but the role, for people and digests: the content, then each field as `[name: JSON]` on a line."""
        if not self.fields:
            return self.content
        fields = (f"[{name}: {as_json(value)}]" for name, value in self.further().items())
        return "\n".join([self.content] * bool(self.content) + list(fields))


TOOLS = "tools"
"""Role of the turn that holds the tools of a dialogue."""


class Answer(str):
    """A completion that is more than a text: an assistant's turn with fields of its own, such as tool calls.

    Wherever text is wanted it is the turn's `text`, so that sides which differ in their fields are different texts;
    only `answer_turn` gives what a chat template is to render.
    """

    turn: Message

    def __new__(cls, turn: Message) -> "Answer":
        """An answer of this turn."""
        answer = super().__new__(cls, turn.text)
        answer.turn = turn
        return answer

    def __reduce__(self) -> tuple[type["Answer"], tuple[Message]]:
        return Answer, (self.turn,)


def as_answer(turn: Message) -> str:
    """The completion that an assistant's turn is: its content where it has nothing else."""
    return Answer(turn) if turn.fields else turn.content


def answer_turn(completion: str) -> Message:
    """The assistant's turn that a completion is."""
    return completion.turn if isinstance(completion, Answer) else Message("assistant", completion)


def as_json(value: Any) -> str:
    """JSON as turns hold it: with the letters and the order that were given."""
    return json.dumps(value, ensure_ascii=False)


_UNSEEN_CATEGORIES = frozenset(("Cc", "Cf", "Zs", "Zl", "Zp"))
_UNSEEN = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0" + "".join(map(chr, range(0xFE00, 0xFE10))))
"""Characters of other categories that are invisible, too: joiners, fillers, empty Braille, variation selectors."""

CHOSEN_PROBABILITY = "chosen_probability"
"""Where a pair's metadata have it: how likely another label of this pair names the same side, 0 to 1."""

NEIGHBOURS = 64
"""Prompts whose digests are remembered: the pairs of one are next to one another in most files."""
Prompt = str | tuple[Message, ...]
"""The prompt that a completion answers: a plain string (one user turn) or the turns of a dialogue, oldest first."""


def as_rows(
    prompts: Prompt | Sequence[Prompt], responses: str | Sequence[str]
) -> tuple[Sequence[Prompt], Sequence[str]]:
    """Return N prompts and N responses as lists; one of each that is given without a list is one row.

    A string is a sequence of its characters, so without this `score("one prompt", "one answer")` would be ten rows.

    Raises:
        ValueError: one of both is a single one, and the other is a list.
    """
    is_one_prompt, is_one_response = _is_prompt(prompts), isinstance(responses, str)
    if is_one_prompt != is_one_response:
        one, many = ("prompt", "responses") if is_one_prompt else ("response", "prompts")
        raise ValueError(
            f"one {one} and a list of {many}: it is not clear which belong together. Give a list of each, of equal "
            "lengths, or one of each."
        )
    return ([prompts], [responses]) if is_one_prompt else (prompts, responses)  # type: ignore[list-item,return-value]  # told apart above


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Return prompts as a list; one that is given without a list is a list of one."""
    return [prompts] if _is_prompt(prompts) else prompts  # type: ignore[list-item,return-value]  # told apart above


def _is_prompt(value: Prompt | Sequence[Prompt]) -> bool:
    """Whether this is one prompt: a text, or the turns of one dialogue."""
    return isinstance(value, str) or (len(value) > 0 and all(isinstance(one, Message) for one in value))


def prompt_messages(prompt: Prompt) -> tuple[Message, ...]:
    """The prompt as dialogue turns; a plain string is one user turn."""
    return (Message("user", prompt),) if isinstance(prompt, str) else prompt


def plain_prompt(prompt: tuple[Message, ...]) -> Prompt:
    """One form for one meaning: a single user turn is its text, everything else stays a dialogue."""
    lone = len(prompt) == 1 and prompt[0].role == "user" and not prompt[0].fields
    return prompt[0].content if lone else prompt


def tools_of(prompt: Prompt) -> list[Any] | None:
    """The tools that the answer may call, as a chat template takes them; None where none are given.

    Raises:
        DataError: the turn `TOOLS` holds no JSON list, or is not the first one.
    """
    turns = prompt_messages(prompt)
    places = [place for place, turn in enumerate(turns) if turn.role == TOOLS]
    if not places:
        return None
    try:
        tools = json.loads(turns[0].content) if places == [0] else None
    except (ValueError, RecursionError):
        tools = None
    if not isinstance(tools, list) or not tools:
        raise DataError(
            f"a turn with the role {TOOLS!r} holds the JSON list of the tools and is the first one; here it is turn "
            f"{places[-1] + 1} of {len(turns)}, {turns[places[-1]].content[:60]!r}. Give the tools in a column `tools`."
        )
    return tools


def prompt_text(prompt: Prompt) -> str:
    """The prompt as plain text: one user turn is its content, several turns are `Role: content` paragraphs.

    It tells prompts apart: tools and the turns' own fields are in it.
    """
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1 and prompt[0].role == "user":
        return prompt[0].text
    return "\n\n".join(f"{message.role.capitalize()}: {message.text}" for message in prompt)


def opening(prompt: Prompt) -> str:
    """Give the text that a conversation began with: its first user turn; of a prompt without one, the whole of it.

    The prompts of one conversation are one another's beginnings, so they are not independent: splits keep them together
    and intervals are drawn over conversations. A prompt of one turn is a conversation of its own.
    """
    if isinstance(prompt, str):
        return prompt
    first = next((turn for turn in prompt if turn.role == "user"), None)
    return prompt_text(prompt) if first is None else first.content


def is_blank(text: str) -> bool:
    """Whether nothing of a text can be seen: white space, control and zero-width characters alone, or none at all."""
    if "!" <= text[:1] <= "~":
        return False
    return all(char in _UNSEEN or unicodedata.category(char) in _UNSEEN_CATEGORIES for char in text)


def prompt_key(prompt: Prompt) -> str:
    """Digest of a prompt with all its turns: what samples of a policy are stored under."""
    return content_id(prompt_text(prompt))


def content_id(*parts: str) -> str:
    """16 hex digits that depend on the given texts and their order only."""
    return hashlib.sha256("\x1f".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:16]


@lru_cache(NEIGHBOURS)
def _prompt_id(asked: str) -> str:
    return content_id(asked)


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

    # By hand: an InitVar `margin` could not have a property next to it, and `pair.margin` would be None for every pair.
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
        asked = prompt_text(prompt)
        for name, text in (("prompt", asked), ("chosen", chosen), ("rejected", rejected)):
            if is_blank(text):
                raise DataError(f"the {name} of a preference pair is empty: nothing can be scored. Drop the row.")
        if chosen == rejected:
            raise DataError("chosen and rejected are the same text: the pair carries no preference. Drop the row.")
        set_field = object.__setattr__
        set_field(self, "prompt", prompt)
        set_field(self, "chosen", chosen)
        set_field(self, "rejected", rejected)
        set_field(self, "target_margin", margin if target_margin is None else target_margin)
        set_field(self, "metadata", {} if metadata is None else metadata)
        set_field(self, "pair_id", pair_id or content_id(asked, chosen, rejected))

    @classmethod
    def stored(cls, **fields: Any) -> Self:
        """A pair of all its fields as it was when it was checked and written: reading it again checks nothing."""
        pair = cls.__new__(cls)
        for name, value in fields.items():
            object.__setattr__(pair, name, value)
        return pair

    @property
    def margin(self) -> float | None:
        """`target_margin`, as the tutorial calls it; a reward model's own margin is another thing."""
        return self.target_margin

    @property
    def prompt_id(self) -> str:
        """Digest of what the prompt's conversation began with (`opening`): the unit that intervals are drawn over."""
        return _prompt_id(opening(self.prompt))

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready record that `rmcore.data.readers.sources` reads back to an equal pair.

        A prompt that is the transcript of a dialogue comes back as its turns.
        """
        tools = tools_of(self.prompt)
        prompt = self.prompt if isinstance(self.prompt, str) else dialogue_records(self.prompt)
        return {
            "pair_id": self.pair_id,
            "prompt": prompt,
            "chosen": answer_record(self.chosen),
            "rejected": answer_record(self.rejected),
            **({} if tools is None else {"tools": tools}),
            "margin": self.target_margin,
            "metadata": json.loads(json.dumps(dict(self.metadata))),
        }


def dialogue_records(prompt: Prompt) -> list[dict[str, Any]]:
    """The turns of a prompt as a chat template takes them, without the tools (`tools_of`)."""
    return [turn.record() for turn in prompt_messages(prompt) if turn.role != TOOLS]


def answer_record(completion: str) -> str | list[dict[str, Any]]:
    """A completion as a JSON-ready value: its text, or a list of the one message that it is."""
    return [completion.turn.record()] if isinstance(completion, Answer) else completion


def with_text_answers(pairs: Sequence[PreferencePair], purpose: str) -> list[PreferencePair]:
    """The pairs whose answers are texts alone; how many are not, such as calls of tools, is said on stderr.

    Args:
        pairs: some.
        purpose: what cannot be done with the others, for the message: "edited".

    Raises:
        DataError: there are pairs, and none has such answers.
    """
    kept = [pair for pair in pairs if not any(isinstance(side, Answer) for side in (pair.chosen, pair.rejected))]
    left_out = len(pairs) - len(kept)
    if left_out and not kept:
        raise DataError(
            f"the answers of all {len(pairs)} pairs are more than texts, such as calls of tools, and cannot be "
            f"{purpose}; take pairs with answers of text."
        )
    if left_out:
        print(
            f"warning: answers of {left_out} of {len(pairs)} pairs are more than texts, such as calls of tools, and "
            f"cannot be {purpose}; these pairs are left out",
            file=sys.stderr,
        )
    return kept


def cap_pairs(pairs: Iterable[PreferencePair], most: int | None) -> list[PreferencePair]:
    """The first `most` pairs of each prompt, with all its turns, in order; None keeps all."""
    seen: Counter[Prompt] = Counter()
    kept = []
    for pair in pairs:
        seen[pair.prompt] += 1
        if most is None or seen[pair.prompt] <= most:
            kept.append(pair)
    return kept
