"""The only place where a prompt and a completion become tokens of a reward model.

Training, evaluation, scoring and serving all go through `Renderer`, and a checkpoint records what was used
(`rm_rendering.json`), so a reward never depends on who computed it.

    chat format    the tokenizer's chat template, which is then the authority on special tokens
    plain format   `Prompt: ...` and `Response: ...` paragraphs, with the special tokens the tokenizer adds by itself,
                   closed by EOS (SEP for encoders; nothing where a tokenizer has neither, or pads with EOS)
    custom format  the text that the user's own function returns (`rmcore.data.render_fn`), treated as plain text:
                   special tokens and closing are the same, and an EOS that the text ends in is not doubled

All three take prompts of several turns: the template and the function get the turns as they are; the plain format
writes a lone user turn as its content alone and everything else as `Role: content` paragraphs (`pair.prompt_text`).
Only templates and functions know tools and further fields of messages. What is not shown of a dialogue makes its side
one that cannot be read (`rmcore.data.shown`).

A side longer than `max_seq_len` is cut, never dropped: the prompt loses tokens from its left, then the completion
from its right. A side's tokens depend on that side alone. Control tokens come from the template, the function and the
tokenizer only: in prompts and completions their strings are text (`rmcore.data.control_tokens`).
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rmcore.core.errors import DataError, ModelError
from rmcore.core.progress import Report, silent
from rmcore.data.chat_template import chat_text
from rmcore.data.control_tokens import ControlTokens, texts_of
from rmcore.data.pair import (
    TOOLS,
    Answer,
    PreferencePair,
    Prompt,
    answer_turn,
    as_answer,
    plain_prompt,
    prompt_messages,
    prompt_text,
)
from rmcore.data.readers.turns import exchange
from rmcore.data.render_fn import RenderFn, check_function
from rmcore.data.rendered import RenderedSide, cut, locate, locate_turn
from rmcore.data.shown import Shown, Turns

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase

RENDERING_FILE = "rm_rendering.json"
TOKENIZER_BATCH = 512
"""Sides that are rendered and tokenized together, between two reports."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """How a checkpoint wants its text: recorded at training, obeyed at scoring."""

    format: Literal["chat", "plain", "custom"]
    max_seq_len: int
    render_fn: str | None = None
    """`module:function` of the custom format: a name to compare with, never imported because it is recorded."""

    def __post_init__(self) -> None:
        if self.format not in ("chat", "plain", "custom"):
            raise ModelError(
                f"a rendering of format {self.format!r} is unknown; restore the checkpoint's {RENDERING_FILE}."
            )
        if not isinstance(self.max_seq_len, int) or isinstance(self.max_seq_len, bool) or self.max_seq_len < 1:
            raise ModelError(
                f"a rendering of at most {self.max_seq_len!r} tokens a side: that is no whole number from 1 on; "
                f"restore the checkpoint's {RENDERING_FILE}."
            )
        if (self.format == "custom") != (self.render_fn is not None):
            raise ModelError(
                f"a rendering of format {self.format!r} with render_fn={self.render_fn!r}: the custom format, and only "
                "it, names a function; restore the checkpoint's rm_rendering.json."
            )

    def save(self, folder: Path) -> None:
        """Write `rm_rendering.json` into a checkpoint folder."""
        (folder / RENDERING_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> "Rendering | None":
        """Read a checkpoint's record; None where the folder has none (a model trained elsewhere)."""
        path = folder / RENDERING_FILE
        if not path.is_file():
            return None
        try:
            return cls(**json.loads(path.read_text()))
        except ModelError:
            raise
        except (ValueError, TypeError, RecursionError) as error:
            raise ModelError(
                f"{path} is damaged ({error}), so it is not known how this model reads text; restore it from the "
                "folder the model was trained into."
            ) from error


@dataclass(frozen=True, slots=True)
class TokenizedSide:
    """Token ids of one side, special tokens included, no padding."""

    ids: list[int]
    num_cut: int
    """Tokens removed to respect the limit; 0 for most."""


@dataclass(frozen=True, slots=True)
class TokenizedPair:
    """Token ids of both sides of one pair."""

    pair_id: str
    chosen: TokenizedSide
    rejected: TokenizedSide
    target_margin: float | None = None
    """Annotated strength of the preference, in the annotator's unit."""

    @property
    def truncation(self) -> dict[str, int]:
        """Tokens that each side lost to the limit."""
        return {"chosen": self.chosen.num_cut, "rejected": self.rejected.num_cut}

    @property
    def equal_after_cut(self) -> bool:
        """Whether the cut took away everything in which the sides differ: both rewards are then the same."""
        return any(self.truncation.values()) and self.chosen.ids == self.rejected.ids

    @property
    def num_tokens(self) -> int:
        """Tokens of the longer side: what both of the pair's rows are padded to at least."""
        return max(len(self.chosen.ids), len(self.rejected.ids))


@dataclass(frozen=True, slots=True)
class DroppedPair:
    """A pair that is left out, why, and how many tokens each side is over the limit."""

    pair_id: str
    reason: str
    truncation: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready record, with the numbers, where there are some, under `meta["truncation"]`."""
        meta = {"meta": {"truncation": self.truncation}} if self.truncation else {}
        return {"pair_id": self.pair_id, "reason": self.reason, **meta}


class Readable(NamedTuple):
    """Pairs that a model can read, their tokens in the same order, and the other pairs with reasons.

    A pair cannot be read where the template refuses its roles, the template or the function rewrites a completion, or a
    part of the dialogue is not shown.
    """

    pairs: list[PreferencePair]
    tokenized: list[TokenizedPair]
    dropped: list[DroppedPair]


_Spans = Callable[[], Sequence[tuple[int, int]]]


class Renderer:
    """Turns sides into token ids, in batches.

    Args:
        tokenizer: a tokenizer with a pad token (see `ensure_pad_token`).
        rendering: format and limit.
        render_fn: the function of the custom format, which the caller must name: it is code.

    Raises:
        ModelError: the chat template, or the function, that the rendering asks for is not there or is another one.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", rendering: Rendering, render_fn: RenderFn | None = None
    ) -> None:
        if rendering.format == "chat" and not tokenizer.chat_template:
            raise ModelError(
                "this checkpoint was trained with a chat template and its tokenizer has none; "
                "restore chat_template.jinja in the checkpoint folder."
            )
        check_function(rendering.render_fn, rendering.format, render_fn)
        self.tokenizer = tokenizer
        self.rendering = rendering
        self._render_fn = render_fn
        self._control = ControlTokens(tokenizer)
        self._by = {
            "chat": "the chat template",
            "plain": "the plain format",
            "custom": f"render_fn {rendering.render_fn}",
        }[rendering.format]
        self._shown = Shown(self._written, self._by, ask_turns=rendering.format != "custom")

    def tokenize_pairs(self, pairs: Sequence[PreferencePair]) -> list[TokenizedPair]:
        """Tokenize both sides of all pairs.

        Raises:
            DataError: a pair cannot be read; `tokenize_readable` leaves such out.
        """
        tokenized = self.tokenize_sides(_sides(pairs))
        return [_pair(pair, *tokenized[2 * index : 2 * index + 2]) for index, pair in enumerate(pairs)]

    def tokenize_readable(self, pairs: Sequence[PreferencePair], *, report: Report = silent) -> Readable:
        """Tokenize the pairs that can be read and set the others aside: one is in the way of no other.

        Raises:
            DataError: there are pairs, and none can be read.
        """
        readable = Readable([], [], [])
        for pair, found in zip(pairs, self.try_pairs(pairs, report=report), strict=True):
            if isinstance(found, TokenizedPair):
                readable.pairs.append(pair)
                readable.tokenized.append(found)
            else:
                readable.dropped.append(found)
        if readable.dropped and not readable.pairs:
            raise DataError(
                f"none of the {len(pairs)} pairs can be read as this model reads text: {readable.dropped[0].reason}"
            )
        return readable

    def try_pairs(
        self, pairs: Sequence[PreferencePair], *, report: Report = silent
    ) -> list[TokenizedPair | DroppedPair]:
        """Tokenize pairs, with the reason in the place of one that cannot be read."""
        found = self.try_sides(_sides(pairs), report=report)
        result: list[TokenizedPair | DroppedPair] = []
        for pair, chosen, rejected in zip(pairs, found[::2], found[1::2], strict=True):
            if isinstance(chosen, TokenizedSide) and isinstance(rejected, TokenizedSide):
                result.append(_pair(pair, chosen, rejected))
            else:
                reason = str(chosen if isinstance(chosen, DataError) else rejected)
                result.append(DroppedPair(pair.pair_id, reason, {"chosen": 0, "rejected": 0}))
        return result

    def tokenize_sides(self, sides: Sequence[tuple[Prompt, str]]) -> list[TokenizedSide]:
        """Tokenize (prompt, completion) sides; order is kept.

        Raises:
            DataError: the template refuses a dialogue, or the template or the function rewrites a completion or leaves
                out a part of the dialogue, or the special tokens leave no room within the limit.
        """
        return _or_raise(self.try_sides(sides))

    def tokenize_texts(self, texts: Sequence[str]) -> list[TokenizedSide]:
        """Tokenize texts that are rendered already, such as `render` gives; too long ones are cut from the right.

        Control tokens in them are those of the tool that rendered them. The plain format has none, so there
        they are text.
        """
        plain = self.rendering.format == "plain"
        return _or_raise(
            self._tokenize(
                [RenderedSide(text, 0, len(text), guarded=plain and self._control.stand_in([text])) for text in texts]
            )
        )

    def render(self, prompt: Prompt, completion: str) -> str:
        """The text of one side as it is tokenized, without the special tokens a tokenizer adds by itself."""
        prompt, completion = exchange(prompt, completion)
        return self._located(self._text(prompt, completion), prompt, completion).text

    def try_sides(
        self, sides: Sequence[tuple[Prompt, str]], *, report: Report = silent
    ) -> list[TokenizedSide | DataError]:
        """Tokenize sides as `tokenize_sides` does, with the error in the place of a side that cannot be read."""
        result: list[TokenizedSide | DataError] = []
        for start in range(0, len(sides), TOKENIZER_BATCH):
            batch = sides[start : start + TOKENIZER_BATCH]
            result += self._tokenize([self._render(*side) for side in batch])
            report(len(result), len(sides), "sides tokenized")
        return result

    def _render(self, prompt: Prompt, completion: str) -> RenderedSide | DataError:
        try:
            prompt, completion = exchange(prompt, completion)
            text = self._text(prompt, completion)
            if not self._control.stand_in(texts_of(prompt, completion)):
                return self._located(text, prompt, completion)
            marked = self._control.mark(prompt, completion)
            written = self._written((*prompt_messages(marked.prompt), answer_turn(marked.completion)))
            side = self._located(written, marked.prompt, marked.completion)
            return self._unmarked(side, completion, marked.mark)
        except DataError as error:
            return error

    def _unmarked(self, side: RenderedSide, completion: str, mark: str) -> RenderedSide:
        """A side rendered of marked text as it is tokenized: names in place of control tokens, and no marks."""
        text = self._control.rename(side.text, mark)
        if not isinstance(completion, Answer):
            return replace(locate(text, completion, self._by), guarded=True)
        start, length = (len(self._control.rename(part, mark)) for part in (side.text[: side.start], side.answer))
        return RenderedSide(text, start, start + length, guarded=True)

    def _located(self, text: str, prompt: Prompt, completion: str) -> RenderedSide:
        if not isinstance(completion, Answer):
            return locate(text, completion, self._by)
        before = prompt_messages(prompt)
        return locate_turn(text, [self._written((*before, answer_turn(other))) for other in ("0", "1")])

    def _text(self, prompt: Prompt, completion: str) -> str:
        """The rendered text of a dialogue, which shows all of it.

        Raises:
            DataError: it does not, or cannot be rendered.
        """
        turns = (*prompt_messages(prompt), answer_turn(completion))
        text = self._written(turns)
        self._shown.check(turns, text)
        return text

    def _written(self, turns: Turns) -> str:
        """Render a dialogue that ends with the answer."""
        prompt, answer = plain_prompt(turns[:-1]), turns[-1]
        if self._render_fn is not None:
            return self._render_fn(prompt, as_answer(answer))
        if self.rendering.format == "plain":
            known = tuple(turn._replace(fields="") for turn in turns[:-1] if turn.role != TOOLS)
            return f"Prompt: {prompt_text(known)}\n\nResponse: {answer.content}"
        return chat_text(self.tokenizer, prompt, answer)

    def _tokenize(self, sides: Sequence[RenderedSide | DataError]) -> list[TokenizedSide | DataError]:
        # One completion is often in several pairs of its prompt.
        unique = list(dict.fromkeys(side for side in sides if isinstance(side, RenderedSide)))
        tokenized: dict[RenderedSide, TokenizedSide | DataError] = {}
        for side, ids, spans in self._encode(unique):
            try:
                tokenized[side] = self._finish(side, ids, spans)
            except DataError as error:
                tokenized[side] = error
        return [tokenized[side] if isinstance(side, RenderedSide) else side for side in sides]

    def _encode(self, sides: Sequence[RenderedSide]) -> Iterator[tuple[RenderedSide, list[int], _Spans]]:
        """Token ids of each side, and a function that gives the characters which its tokens stand for."""
        own = self.rendering.format != "chat"
        guarded = [side for side in sides if side.guarded]
        if guarded:
            encodings = self._control.encode([side.text for side in guarded], add_special_tokens=own)
            for side, encoding in zip(guarded, encodings, strict=True):
                yield side, encoding.ids, partial(getattr, encoding, "offsets")
        ordinary = [side for side in sides if not side.guarded]
        if ordinary:
            encoded = self.tokenizer(
                [side.text for side in ordinary],
                add_special_tokens=own,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )
            for index, (side, ids) in enumerate(zip(ordinary, encoded["input_ids"], strict=True)):
                yield side, ids, partial(self._spans, encoded, index)

    def _finish(self, side: RenderedSide, ids: list[int], spans: _Spans) -> TokenizedSide:
        """One BOS, the closing, and no more tokens than the limit."""
        first, closing = self._framed(ids)
        own, limit = ids[first:] if first else ids, self.rendering.max_seq_len
        kept = own + closing
        if len(kept) > limit:
            kept = cut(side, own, spans()[first:], bos=self.tokenizer.bos_token_id, closing=closing, limit=limit)
        return TokenizedSide(kept, len(own) + len(closing) - len(kept))

    def _framed(self, ids: list[int]) -> tuple[int, list[int]]:
        """Where the tokens of a side begin that stay, which leaves a second BOS out, and what is appended to them.

        The chat template is the authority on how a side ends; any other ends in EOS, or SEP for encoders.
        """
        bos, eos, sep = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id, self.tokenizer.sep_token_id
        end = sep if eos is None else eos
        doubled = bos is not None and ids[:2] == [bos, bos]  # the text itself began with one
        closed = len(ids) > doubled and ids[-1] in (end, sep)
        is_open = self.rendering.format == "chat" or end is None or end == self.tokenizer.pad_token_id
        return int(doubled), [] if is_open or closed else [end]

    def _spans(self, encoded: "BatchEncoding", index: int) -> list[tuple[int, int]]:
        """Which characters of a text its tokens stand for."""
        if not self.tokenizer.is_fast:
            raise DataError(
                f"a side is longer than max_seq_len={self.rendering.max_seq_len} and this tokenizer is a slow one, "
                "which does not say where the prompt ends; use its fast version or raise max_seq_len."
            )
        return encoded[index].offsets


def _sides(pairs: Sequence[PreferencePair]) -> list[tuple[Prompt, str]]:
    return [(pair.prompt, text) for pair in pairs for text in (pair.chosen, pair.rejected)]


def _pair(pair: PreferencePair, chosen: TokenizedSide, rejected: TokenizedSide) -> TokenizedPair:
    return TokenizedPair(pair.pair_id, chosen, rejected, pair.target_margin)


def _or_raise(sides: Sequence[TokenizedSide | DataError]) -> list[TokenizedSide]:
    result: list[TokenizedSide] = []
    for place, side in enumerate(sides):
        if isinstance(side, DataError):
            many = sum(isinstance(one, DataError) for one in sides)
            raise DataError(f"{many} of {len(sides)} sides cannot be read; side {place}, from 0: {side}") from side
        result.append(side)
    return result


def choose_rendering(
    tokenizer: "PreTrainedTokenizerBase", *, use_chat_template: bool, max_seq_len: int, render_fn: str | None = None
) -> Rendering:
    """Custom format where a function is named, chat where wanted and the tokenizer has a template, else plain."""
    if render_fn is not None:
        return Rendering("custom", max_seq_len, render_fn)
    return Rendering("chat" if use_chat_template and tokenizer.chat_template else "plain", max_seq_len)


def count_cut(pairs: Sequence[TokenizedPair]) -> dict[str, int]:
    """How many pairs and sides were cut to the limit, how many tokens that cost, and how many pairs became ties."""
    sides = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
    return {
        "num_pairs": len(pairs),
        "num_cut_pairs": sum(1 for pair in pairs if pair.chosen.num_cut or pair.rejected.num_cut),
        "num_cut_sides": sum(1 for side in sides if side.num_cut),
        "num_cut_tokens": sum(side.num_cut for side in sides),
        "num_equal_after_cut": sum(pair.equal_after_cut for pair in pairs),
    }
