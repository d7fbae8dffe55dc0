"""Text is text: a control token's string in data is read as its characters, never as the token.

A tokenizer makes the token that ends a turn out of the string `<|im_end|>`, whatever its origin, so a user who types it
would write turns of their own. `split_special_tokens` of transformers is not the remedy: it also splits what the chat
template writes, it knows no tokens that are added but not marked special (DeepSeek's `<｜User｜>`), and a Unigram model
finds `</s>` in its own vocabulary.

Text without such a string goes past all this. Other text is rendered with a mark before each of data's strings, so
that those without one are the renderer's; these get other names, and a copy of the tokenizer knows control tokens by
these names alone. The copy is otherwise the same, so all other ids are those of the tokenizer itself.
"""

import json
import re
import secrets
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import TemplateError

from rmcore.core.errors import DataError, ModelError
from rmcore.data.chat_template import render_chat
from rmcore.data.pair import Answer, Message, Prompt, as_answer

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerBase

KNOWN_FORMS = re.compile(
    r"<\|[\w./-]{1,40}\|>|<｜[\w▁./-]{1,40}｜>"  # ChatML, Llama 3, Phi, GPT-2; DeepSeek
    r"|</?s>|<(?:bos|eos|pad|unk|mask|(?:start|end)_of_turn)>|<</?SYS>>|\[/?INST\]"  # Llama 2, Gemma, T5, Mistral
    r"|\[(?:CLS|SEP|MASK|PAD|UNK)\]"  # BERT
)
"""Control tokens of the common families: for counting where no tokenizer is at hand. See `known_strings`."""
_MARKS = range(0xE000, 0xF900)
"""Private use area of Unicode: characters without a meaning, which neither a template nor a normalizer changes."""


class Marked(NamedTuple):
    """A prompt and a completion, and the mark before each control token's string in them."""

    prompt: Prompt
    completion: str
    mark: str


class ControlTokens:
    """The control tokens of one tokenizer, and how text that holds their strings is read.

    They are the tokens marked as special, and those added ones that the chat template writes by itself between the
    turns of a dialogue. Other added tokens (`<think>`, runs of spaces) are vocabulary for text.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self.strings = _control_strings(tokenizer)
        """Longest first: where one begins with another, the tokenizer takes the longer."""
        self._pattern = re.compile("|".join(map(re.escape, self.strings)) or r"(?!)")
        # Unknown to the data's authors, so no text can hold a name; ids do not depend on them.
        nonce = secrets.token_hex(8)
        self._names = {string: f"rm{nonce}x{index}x" for index, string in enumerate(self.strings)}
        backend = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        normalized = any(
            one.normalized for one in tokenizer.added_tokens_decoder.values() if one.content in self._names
        )
        self._normalizer = backend.normalizer if backend is not None and normalized else None
        """Only where the tokenizer looks for a control token in what its normalizer made of the text."""

    def stand_in(self, texts: Sequence[str]) -> bool:
        """Whether a control token would come out of one of these texts."""
        if any(map(self._pattern.search, texts)):
            return True
        normalizer = self._normalizer
        return normalizer is not None and any(self._pattern.search(normalizer.normalize_str(text)) for text in texts)

    def mark(self, prompt: Prompt, completion: str) -> Marked:
        """Put a mark before each control token's string.

        Raises:
            DataError: the tokenizer is a slow one, or no character is left for a mark.
        """
        if not self._tokenizer.is_fast:
            raise DataError(
                "a text holds the string of a control token and this tokenizer is a slow one, which cannot be told to "
                "read it as text; use its fast version, or drop such rows."
            )
        whole = "".join(texts_of(prompt, completion))
        mark = next((chr(code) for code in _MARKS if chr(code) not in whole), None)
        if mark is None:
            raise DataError("a text holds each of the private characters of Unicode, so it is no text. Drop the row.")

        def marked(text: str) -> str:
            return self._pattern.sub(lambda found: mark + found[0], text)

        def marked_turn(turn: Message) -> Message:
            return Message(*map(marked, turn))

        answer = as_answer(marked_turn(completion.turn)) if isinstance(completion, Answer) else marked(completion)
        if isinstance(prompt, str):
            return Marked(marked(prompt), answer, mark)
        return Marked(tuple(map(marked_turn, prompt)), answer, mark)

    def rename(self, rendered: str, mark: str) -> str:
        """A text rendered of marked parts as `encode` takes it: unmarked control tokens renamed, and no marks."""
        pattern = re.compile(f"{mark}?(?:{self._pattern.pattern})")
        renamed = pattern.sub(lambda found: self._names.get(found[0], found[0]), rendered)
        return renamed.replace(mark, "")

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> "list[Encoding]":
        """Tokens of texts, whose only control tokens are the renamed ones and those that are added around a text."""
        return self._copy.encode_batch(list(texts), add_special_tokens=add_special_tokens)

    @cached_property
    def _copy(self) -> "Tokenizer":
        from tokenizers import Tokenizer

        rules = json.loads(self._tokenizer.backend_tokenizer.to_str())
        for token in rules["added_tokens"]:
            token["content"] = self._names.get(token["content"], token["content"])
        _rename_in_vocabulary(rules["model"], self._names)
        copy = Tokenizer.from_str(json.dumps(rules))
        copy.no_padding()
        copy.no_truncation()
        moved = [
            string
            for string, name in self._names.items()
            if copy.token_to_id(name) != self._tokenizer.convert_tokens_to_ids(string)
        ]
        if moved:
            raise ModelError(
                f"the ids of the control tokens {', '.join(moved[:4])} depend on their names in this tokenizer, so "
                "text that holds them cannot be read safely; save it again with transformers' save_pretrained."
            )
        return copy


def known_strings(texts: Iterable[str]) -> list[str]:
    """The strings of control tokens of the common families in texts, each once, in order."""
    # All begin with one of two characters, which are found twenty times as fast.
    return list(
        dict.fromkeys(found for text in texts if "<" in text or "[" in text for found in KNOWN_FORMS.findall(text))
    )


def texts_of(prompt: Prompt, completion: str) -> list[str]:
    """All text of a side, as data gave it: contents, roles, and the turns' own fields, too."""
    answer = list(completion.turn) if isinstance(completion, Answer) else [completion]
    return [prompt, *answer] if isinstance(prompt, str) else [part for one in prompt for part in one] + answer


def _control_strings(tokenizer: "PreTrainedTokenizerBase") -> tuple[str, ...]:
    added = tokenizer.added_tokens_decoder.values()
    control = {str(token) for token in tokenizer.all_special_tokens} | {one.content for one in added if one.special}
    others = {one.content for one in added if not one.special and one.content.strip()}
    if others and tokenizer.chat_template:
        turns = [{"role": role, "content": "0"} for role in ("user", "assistant", "user")]
        try:
            written = render_chat(tokenizer, turns)
        except TemplateError:  # wants a system turn, or will fail on data, too
            written = ""
        control |= {string for string in others if string in written}
    return tuple(sorted(control - {""}, key=lambda string: (-len(string), string)))


def _rename_in_vocabulary(model: dict[str, Any], names: dict[str, str]) -> None:
    """Rename entries in a tokenizer model, where text could otherwise be put together to one; ids stay."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(piece, piece): index for piece, index in vocabulary.items()}
    else:  # Unigram: (piece, score), the id is the place
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        inside = model.get("continuing_subword_prefix") or ""
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [
            (left, right)
            for left, right in pairs
            if not names.keys() & {left, right, left + right.removeprefix(inside)}
        ]
