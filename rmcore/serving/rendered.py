"""Text that another program has rendered, compared with what this checkpoint was trained on.

Such a text is scored as the text that it is, never rendered again. Two things are repaired, because what is meant is
certain: a second BOS is left out, and white space after the end of the last turn becomes what the checkpoint's own
rendering has there. The rest is only said: no BOS where training had one or the reverse, an answer without its end,
another model's chat template.
"""

import re
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from rmcore.core.errors import DataError
from rmcore.data.chat_template import chat_text
from rmcore.data.control_tokens import KNOWN_FORMS
from rmcore.data.rendering import Renderer

QUESTION, ANSWER = "question-5d71", "answer-5d71"
"""A dialogue without meaning, whose rendering shows what is put around it."""
FOREIGN_OPENERS = (
    r"<\|im_start\|>assistant|<\|start_header_id\|>assistant<\|end_header_id\|>|\[/INST\]|<start_of_turn>model"
    r"|<\|start\|>assistant|<\|assistant\|>|<｜Assistant｜>"
)
"""Templates of Qwen, Llama 3, Mistral, Gemma, gpt-oss, Phi and DeepSeek write one of these before an answer."""
_THOUGHT = r"\s*(?:<think>\s*(?:</think>\s*)?)?$"
_ENDED = re.compile(rf"(?:{KNOWN_FORMS.pattern})\s*$")


@dataclass(frozen=True, slots=True)
class Reading:
    """One input of a ScoringRequest, and what is to be said about it."""

    given: Any
    warnings: tuple[str, ...] = ()


class Rendered:
    """Reads rendered texts for one checkpoint.

    Args:
        renderer: of the checkpoint.
    """

    def __init__(self, renderer: Renderer) -> None:
        tokenizer = renderer.tokenizer
        self._is_chat = renderer.rendering.format == "chat"
        self._bos, self._eos = tokenizer.bos_token or "", tokenizer.eos_token or ""
        self._adds_bos = bool(self._bos) and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
        """Whether the tokenizer begins a text with BOS by itself, where it may add special tokens."""
        text = renderer.render(QUESTION, ANSWER)
        question, answer = text.find(QUESTION), text.rfind(ANSWER)
        is_known = 0 <= question < answer  # a function may show neither
        between = text[question + len(QUESTION) : answer] if is_known else ""
        self._opener = _opener(tokenizer, between).strip() if self._is_chat else between.rstrip()
        self._ending = text[answer + len(ANSWER) :] if is_known else ""
        self._has_bos = self._is_chat and bool(self._bos) and text.startswith(self._bos)
        own = f"{re.escape(self._opener)}|" if self._opener else ""
        self._prompt_end = re.compile(f"(?:{own}{FOREIGN_OPENERS}){_THOUGHT}")

    def text(self, text: str) -> Reading:
        """Read a whole dialogue that is rendered already, with the answer at its end."""
        warnings = []
        own, num_bos = _without(text, self._bos)
        keeps_bos = num_bos and (self._is_chat or not self._adds_bos)
        if self._has_bos != bool(keeps_bos):
            has = "does not begin with the" if self._has_bos else "begins with a"
            warnings.append(f"it {has} BOS ({self._bos}), unlike what this checkpoint was trained on")
        if keeps_bos:
            own = self._bos + own
        if not self._is_chat and self._eos and own.rstrip().endswith(self._eos):
            own = own.rstrip().removesuffix(self._eos)  # which is added to every text of these formats
        end = self._ending
        if end.strip() and own.rstrip().endswith(end.rstrip()):
            own = own.rstrip().removesuffix(end.rstrip()) + end
        elif end.strip():
            warnings.append(
                f"it does not end as answers do in this checkpoint's training ({end!r}): the answer was cut off, or "
                "its end token was left out"
            )
        return Reading(own, (*warnings, *self._of_another(own)))

    def pair(self, prompt: Any, response: str) -> Reading:
        """Read a prompt and its response: rendered here, unless the prompt is a text that ends where an answer begins.

        Args:
            prompt: messages, a user's text, or a rendered text.
            response: what the policy wrote, with or without the token that ended it.
        """
        if isinstance(prompt, str) and self._prompt_end.search(prompt):
            return self.text(prompt + response)
        end = self._ending.strip()
        ended = response.rstrip()
        if end and ended.endswith(end):
            response = ended.removesuffix(end)
        elif self._eos and ended.endswith(self._eos):
            response = ended.removesuffix(self._eos)
        else:
            response = _ENDED.sub("", response)  # of a turn of another model
        return Reading({"prompt": prompt, "response": response})

    def _of_another(self, text: str) -> list[str]:
        if not self._opener or self._opener in text:
            return []
        found = re.search(FOREIGN_OPENERS, text)
        seen = f"{found[0]} of another model's template" if found else "none of it"
        return [
            f"it is not rendered as this checkpoint was trained, which has {self._opener!r} before an answer; the text "
            f"has {seen}. Its reward means little"
        ]


def _opener(tokenizer: Any, between: str) -> str:
    """The text before any answer, also where the template puts an empty thought before one that has none."""
    try:
        asked = chat_text(tokenizer, QUESTION, None)
    except DataError:
        return between
    generation = asked.partition(QUESTION)[2]
    if not generation.strip():
        return between
    return "".join(one for one, _ in takewhile(lambda both: both[0] == both[1], zip(between, generation, strict=False)))


def _without(text: str, bos: str) -> tuple[str, int]:
    count = 0
    while bos and text.startswith(bos, count * len(bos)):
        count += 1
    return text[count * len(bos) :], count
