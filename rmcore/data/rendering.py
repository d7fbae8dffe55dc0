"""The only place where a prompt and a completion become tokens.

Training, evaluation, scoring and serving all go through `Renderer`, and a checkpoint records what was used
(`rm_rendering.json`), so a reward never depends on who computed it.

    chat format    the tokenizer's chat template, which is then the authority on special tokens
    plain format   `Prompt: ...` and `Response: ...` paragraphs, with the special tokens the tokenizer adds by itself,
                   closed by EOS (SEP for encoders; nothing where a tokenizer has neither, or pads with EOS)
    custom format  the text that the user's own function returns (`rmcore.data.render_fn`), treated as plain text:
                   special tokens and closing are the same, and an EOS that the text ends in is not doubled

All three take prompts of several turns: the template and the function get the turns as they are; the plain format
writes a lone user turn as its content alone and everything else as `Role: content` paragraphs (`pair.prompt_text`).

A side longer than `max_seq_len` is cut, never dropped: the prompt loses tokens from its left, then the completion
from its right. A side's tokens depend on that side alone.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jinja2 import TemplateError

from rmcore.data.pair import PreferencePair, Prompt, plain_prompt, prompt_messages, prompt_text
from rmcore.data.render_fn import RenderFn
from rmcore.errors import DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RENDERING_FILE = "rm_rendering.json"
TOKENIZER_BATCH = 2048
MIN_PROMPT_SHARE = 4
"""A cut prompt keeps at least 1/4 of the limit: even a very long completion is read as an answer to something."""


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
        except (ValueError, TypeError) as error:
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
class _Text:
    """A rendered side and where its completion lies: text[start:end]."""

    text: str
    start: int
    end: int


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
        _check_function(rendering, render_fn)
        self.tokenizer = tokenizer
        self.rendering = rendering
        self._render_fn = render_fn

    def tokenize_pairs(self, pairs: Sequence[PreferencePair]) -> list[TokenizedPair]:
        """Tokenize both sides of all pairs."""
        sides = [(pair.prompt, text) for pair in pairs for text in (pair.chosen, pair.rejected)]
        tokenized = self.tokenize_sides(sides)
        return [
            TokenizedPair(pair.pair_id, tokenized[2 * index], tokenized[2 * index + 1], pair.target_margin)
            for index, pair in enumerate(pairs)
        ]

    def tokenize_sides(self, sides: Sequence[tuple[Prompt, str]]) -> list[TokenizedSide]:
        """Tokenize (prompt, completion) sides; order is kept."""
        result: list[TokenizedSide] = []
        for start in range(0, len(sides), TOKENIZER_BATCH):
            texts = [self._render(prompt, completion) for prompt, completion in sides[start : start + TOKENIZER_BATCH]]
            encoded = self.tokenizer(
                [text.text for text in texts], add_special_tokens=self._adds_special_tokens, verbose=False
            )
            result.extend(self._finish(text, ids) for text, ids in zip(texts, encoded["input_ids"], strict=True))
        return result

    def render(self, prompt: Prompt, completion: str) -> str:
        """The text of one side exactly as it is tokenized, without the special tokens a tokenizer adds by itself."""
        return self._render(prompt, completion).text

    @property
    def _adds_special_tokens(self) -> bool:
        return self.rendering.format != "chat"

    def _render(self, prompt: Prompt, completion: str) -> _Text:
        if self._render_fn is not None:
            text = self._render_fn(plain_prompt(prompt_messages(prompt)), completion)
            return _located(text, completion, f"render_fn {self._render_fn.name}")
        if self.rendering.format == "plain":
            prefix = f"Prompt: {prompt_text(prompt)}\n\nResponse: "
            return _Text(prefix + completion, len(prefix), len(prefix) + len(completion))
        messages = [message._asdict() for message in prompt_messages(prompt)]
        answer = {"role": "assistant", "content": completion}
        try:
            text = str(self.tokenizer.apply_chat_template([*messages, answer], tokenize=False))
        except TemplateError as error:
            raise DataError(
                f"the chat template refuses a dialogue with the roles {[message['role'] for message in messages]} "
                f"({error}); train with use_chat_template=false, or drop such dialogues."
            ) from error
        return _located(text, completion, "the chat template")

    def _finish(self, text: _Text, ids: list[int]) -> TokenizedSide:
        closing = self._closing(ids)
        limit = self.rendering.max_seq_len
        if len(ids) + len(closing) <= limit:
            return TokenizedSide(self._one_bos(ids) + closing, 0)
        return self._cut(text, closing)

    def _closing(self, ids: list[int]) -> list[int]:
        """Return the ids to append: EOS, or SEP for encoders, where not there already; none in the chat format."""
        if self.rendering.format == "chat":
            return []
        end = self.tokenizer.eos_token_id
        end = self.tokenizer.sep_token_id if end is None else end
        if end is None or end == self.tokenizer.pad_token_id or (ids and ids[-1] in (end, self.tokenizer.sep_token_id)):
            return []
        return [end]

    def _one_bos(self, ids: list[int]) -> list[int]:
        """Drop a second BOS: the text itself began with one and the tokenizer added its own."""
        bos = self.tokenizer.bos_token_id
        return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids

    def _cut(self, text: _Text, closing: list[int]) -> TokenizedSide:
        """Cut the prompt from the left, then the completion from the right; specials and the closing turn stay."""
        if not self.tokenizer.is_fast:
            raise ModelError(
                f"a side is longer than max_seq_len={self.rendering.max_seq_len} and this tokenizer is a slow one, "
                "which does not say where the prompt ends; use its fast version or raise max_seq_len."
            )
        encoded = self.tokenizer(
            text.text,
            add_special_tokens=self._adds_special_tokens,
            return_offsets_mapping=True,
            verbose=False,
        )
        ids, offsets = self._one_bos(encoded["input_ids"]), encoded["offset_mapping"]
        dropped = len(encoded["input_ids"]) - len(ids)
        added = [span[0] == span[1] for span in offsets][dropped:]  # what the tokenizer put around the text is empty
        starts = [span[0] for span in offsets][dropped:]
        first = next((index for index, special in enumerate(added) if not special), len(ids))
        if ids[:1] == [self.tokenizer.bos_token_id]:
            first = max(first, 1)  # in the chat format the template writes the BOS, as text
        last = next((index for index in range(len(ids), 0, -1) if not added[index - 1]), first)
        split = next((index for index in range(first, last) if starts[index] >= text.start), last)
        end = next((index for index in range(split, last) if starts[index] >= text.end), last)
        head, prompt, completion = ids[:first], ids[first:split], ids[split:end]
        tail = ids[end:] + closing
        room = self.rendering.max_seq_len - len(head) - len(tail)
        if room < 2:
            raise DataError(
                f"max_seq_len={self.rendering.max_seq_len} leaves no room for text beside the special tokens; raise it."
            )
        keep_prompt = min(len(prompt), max(room - len(completion), room // MIN_PROMPT_SHARE))
        keep_completion = min(len(completion), room - keep_prompt)
        kept = head + prompt[len(prompt) - keep_prompt :] + completion[:keep_completion] + tail
        return TokenizedSide(kept, len(ids) + len(closing) - len(kept))


def _check_function(rendering: Rendering, render_fn: RenderFn | None) -> None:
    given = None if render_fn is None else render_fn.name
    if given == rendering.render_fn:
        return
    if rendering.render_fn is None:
        raise ModelError(
            f"render_fn {given} was passed to a model of the {rendering.format} format, whose rewards it would change; "
            "leave render_fn out, or train with it."
        )
    raise ModelError(
        f"this checkpoint was trained on text rendered by {rendering.render_fn}, and "
        + (f"{given} was passed" if given else "a function is not imported merely because a checkpoint names it")
        + f"; if you trust it, pass render_fn={rendering.render_fn!r} (--render-fn {rendering.render_fn})."
    )


def _located(text: str, completion: str, renderer: str) -> _Text:
    """Find the completion, perhaps stripped of white space, in a rendered text: its last occurrence in any case."""
    body = completion if completion in text else completion.strip()
    start = text.rfind(body)
    if start < 0:
        raise DataError(
            f"{renderer} dropped or rewrote the completion {completion[:60]!r}, so a reward would not be of that text; "
            "correct it so that the completion stays as it is, or train with use_chat_template=false and no render_fn."
        )
    return _Text(text, start, start + len(body))


def choose_rendering(
    tokenizer: "PreTrainedTokenizerBase", *, use_chat_template: bool, max_seq_len: int, render_fn: str | None = None
) -> Rendering:
    """Custom format where a function is named, chat where wanted and the tokenizer has a template, else plain."""
    if render_fn is not None:
        return Rendering("custom", max_seq_len, render_fn)
    return Rendering("chat" if use_chat_template and tokenizer.chat_template else "plain", max_seq_len)


def ensure_pad_token(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Give the tokenizer a pad token if it has none: EOS, else a new `[PAD]`. True if the vocabulary grew.

    Lengths always come from attention masks, never from pad ids. Hugging Face's causal classes read the reward at the
    last token that is not the pad token, so where EOS is the pad, `Renderer` closes a side without it: then every
    reader, also one that pools the very last token, reads the same place.
    """
    if tokenizer.pad_token_id is not None:
        return False
    if tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
        return False
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    return True


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
