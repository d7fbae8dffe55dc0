"""One rendered side: where its completion is in the text, and how its tokens are cut to a limit."""

from collections.abc import Sequence
from dataclasses import dataclass

from rmcore.core.errors import DataError

MIN_PROMPT_SHARE = 4
"""A cut prompt keeps at least 1/4 of the limit: even a very long completion is read as an answer to something."""


@dataclass(frozen=True, slots=True)
class RenderedSide:
    """The text of one side and where its completion is: text[start:end]."""

    text: str
    start: int
    end: int
    guarded: bool = False
    """Whether data brought a control token's string, so that `text` is for `ControlTokens.encode`."""

    @property
    def answer(self) -> str:
        """The text of the completion."""
        return self.text[self.start : self.end]


def locate_turn(text: str, others: Sequence[str]) -> RenderedSide:
    """Find an answer that is more than a text, such as a tool call: what differs from the dialogue with other answers.

    Args:
        text: what was rendered.
        others: the same dialogue rendered with two answers that have no character in common.
    """
    start = _num_common([text, *others])
    return RenderedSide(text, start, len(text) - _num_common([one[start:][::-1] for one in (text, *others)]))


def _num_common(texts: Sequence[str]) -> int:
    """How many characters all texts begin with."""
    places = enumerate(zip(*texts, strict=False))
    return next((place for place, chars in places if len(set(chars)) > 1), min(map(len, texts)))


def locate(text: str, completion: str, renderer: str) -> RenderedSide:
    """Find the completion, perhaps stripped of white space, in a rendered text: where either form ends last.

    A template that strips leaves the other form behind where the prompt quotes it.

    Args:
        text: what was rendered.
        completion: what has to be in it.
        renderer: who rendered it, for the message.

    Raises:
        DataError: it is not there.
    """
    spans = [(text.rfind(form) + len(form), len(form)) for form in (completion, completion.strip()) if form in text]
    if not spans:
        raise DataError(
            f"{renderer} dropped or rewrote the completion {completion[:60]!r}, so a reward would not be of that text; "
            "correct it so that the completion stays as it is, or train with use_chat_template=false and no render_fn."
        )
    end, length = max(spans)
    return RenderedSide(text, end - length, end)


def cut(
    side: RenderedSide,
    ids: list[int],
    spans: Sequence[tuple[int, int]],
    *,
    bos: int | None,
    closing: list[int],
    limit: int,
) -> list[int]:
    """Cut the prompt from the left, then the completion from the right; specials and the closing turn stay.

    Args:
        side: what the tokens are of.
        ids: N token ids.
        spans: which characters each of them stands for; empty where the tokenizer added the token by itself.
        bos: an id that stays where it comes first, also if the text itself holds it.
        closing: ids to append, within the limit.
        limit: most tokens, `closing` included.

    Raises:
        DataError: the special tokens alone leave no room for text.
    """
    first = next((index for index, (start, end) in enumerate(spans) if start != end), len(ids))
    if ids[:1] == [bos]:
        first = max(first, 1)  # in the chat format the template writes the BOS, as text
    last = next((index for index in range(len(ids), 0, -1) if spans[index - 1][0] != spans[index - 1][1]), first)
    split = next((index for index in range(first, last) if spans[index][0] >= side.start), last)
    stop = next((index for index in range(split, last) if spans[index][0] >= side.end), last)
    head, prompt, completion = ids[:first], ids[first:split], ids[split:stop]
    tail = ids[stop:] + closing
    room = limit - len(head) - len(tail)
    if room < 2:
        raise DataError(f"max_seq_len={limit} leaves no room for text besides the special tokens; raise it.")
    keep_prompt = min(len(prompt), max(room - len(completion), room // MIN_PROMPT_SHARE))
    keep_completion = min(len(completion), room - keep_prompt)
    return head + prompt[len(prompt) - keep_prompt :] + completion[:keep_completion] + tail
