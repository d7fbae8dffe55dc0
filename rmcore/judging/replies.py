"""Read a server's answer into a `Reply`: its forms differ, and nothing in it is taken on trust.

Forms that servers use: content as a text or as a list of parts (Mistral); log-probabilities as OpenAI's chat has them,
or as its older completions had (llama-cpp-python); tokens as text or as the tokenizer's own pieces.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rmcore.core.printing import printable
from rmcore.judging.answers import Question, Reply

BYTES_PER_TOKEN = 64
"""Most bytes a token of an answer: tokens are 4 bytes on average, and the longest usual ones, runs of spaces, 64."""
TOP_LOGPROBS = 20
"""Alternatives of a token that OpenAI's interface gives at most."""
ALTERNATIVE_BYTES = 256
"""Most bytes of one alternative with its log-probability: 100 with the list of its bytes, more where it is indented."""
FRAME_BYTES = 65_536
"""Most bytes of the rest of an answer: names, counts, the reports of filters."""
MOST_TOKENS = 10**7
"""Tokens of one request; no model reads as many, so that a larger count is none."""
CHARACTERS_PER_TOKEN = 8
"""Characters of a token, at most, on average over a text: twice as many as in English."""
SMALLEST_CONTEXT = 1024
"""Tokens; no server cuts a shorter question."""
SHOWN_NAME = 200
_PIECES = "\u0120\u2581\u010a"
"""Characters for a space (byte-level BPE, SentencePiece) and for a line's end in the pieces of tokenizers."""


def most_bytes(answer_tokens: int, with_logprobs: bool) -> int:
    """Bytes of a whole answer of so many tokens, at most."""
    each = BYTES_PER_TOKEN + (ALTERNATIVE_BYTES * (TOP_LOGPROBS + 1) if with_logprobs else 0)
    return FRAME_BYTES + each * answer_tokens


def read_reply(body: Any, question: Question, answer_tokens: int) -> Reply | None:
    """Take what is used of a chat completion, decoded JSON; None where it is none, as an error page is.

    Args:
        body: as the server sent it.
        question: that was asked.
        answer_tokens: that the answer might have.
    """
    first = _at(body, "choices", 0)
    message = _at(first, "message")
    if not isinstance(message, Mapping):
        return None
    whole, most = _text(_at(message, "content")), most_bytes(answer_tokens, with_logprobs=False)
    text = whole[:most]
    read, written = tokens_of(body) or (0, 0)
    reply = Reply(
        text=text,
        model=name_of(_at(body, "model")),
        logprobs=_logprobs_at_answer(_at(first, "logprobs"), question.choices),
        tokens_read=read,
        tokens_written=written,
        refusal=name_of(_at(message, "refusal")),
    )
    is_full = _at(first, "finish_reason") == "length" or written >= answer_tokens
    least = fewest_tokens(question)
    if 0 < read < least and least > SMALLEST_CONTEXT:
        lost = (
            f"the server has read {read:,} tokens of a question of {least:,} or more: it cuts what its context does "
            "not hold. Start it with a longer context (Ollama: OLLAMA_CONTEXT_LENGTH)"
        )
    elif len(whole) > most:
        lost = f"its answer has {len(whole):,} characters, and answer_tokens={answer_tokens:,} are far fewer"
    elif is_full and not reply.refusal and (not reply.answer or reply.is_thinking):
        lost = f"all {answer_tokens:,} tokens of the answer went into thoughts or blanks: raise answer_tokens"
    else:
        return reply
    return replace(reply, lost=lost)


def tokens_of(body: Any) -> tuple[int, int] | None:
    """Tokens read and written, by the server's count; None where it gives none, or a count that cannot be one."""
    counts = [_at(body, "usage", name) for name in ("prompt_tokens", "completion_tokens")]
    if any(type(count) is not int or not 0 <= count <= MOST_TOKENS for count in counts):
        return None
    return counts[0], counts[1]


def fewest_tokens(question: Question) -> int:
    """Tokens that a question has at least: one a word, and one for eight characters where words are not separated.

    Runs of a sign or of spaces may be one token.
    """
    text = "\n".join(content for _, content in question.messages)
    return max(len(text.split()), len(re.sub(r"([\W_])\1+", r"\1", text)) // CHARACTERS_PER_TOKEN)


def name_of(said: Any) -> str:
    """The name that a server gives something, in one printable line; empty where it is no text."""
    return printable(said)[:SHOWN_NAME] if isinstance(said, str) else ""


def root_of(body: Any, model: str) -> str:
    """The model that a name means by a list of models, as vLLM's does; empty where it says nothing else."""
    entry = next((entry for entry in _listed(_at(body, "data")) if _at(entry, "id") == model), None)
    root = name_of(_at(entry, "root"))
    return "" if root == model else root


def error_inside(body: Any) -> tuple[int, Any] | None:
    """The status and the error of an answer that has status 200 all the same, as OpenRouter's for its providers.

    An error without a status of its own counts as the server's.
    """
    error = _at(body, "error") or _at(body, "choices", 0, "error")
    if not error:
        return None
    code = str(_at(error, "code"))
    return (int(code) if re.fullmatch("[45][0-9][0-9]", code) else 502), error


def _at(value: Any, *path: str | int) -> Any:
    """The value at a place of decoded JSON; None where there is no such place."""
    for step in path:
        if isinstance(step, str):
            value = value.get(step) if isinstance(value, Mapping) else None
        else:
            value = value[step] if isinstance(value, list) and step < len(value) else None
    return value


def _text(content: Any) -> str:
    """The text of an answer's content; of a list of parts those of text, without the thoughts."""
    if isinstance(content, list):
        content = "".join(
            part["text"]
            for part in content
            if _at(part, "type") in ("text", "output_text") and isinstance(_at(part, "text"), str)
        )
    return content if isinstance(content, str) else ""


def _logprobs_at_answer(logprobs: Any, choices: Sequence[str]) -> dict[str, float]:
    """Log-probabilities of the choices at the last token that is one; variants with a space are added up."""
    shares: dict[str, float] = {}
    at_answer = [others for token, others in _tokens(logprobs) if _word(token) in choices][-1:]
    for token, logprob in at_answer[0] if at_answer else ():
        choice = _word(token)
        if choice in choices and isinstance(logprob, int | float) and abs(logprob) < math.inf:
            shares[choice] = shares.get(choice, 0.0) + math.exp(min(0.0, logprob))
    return {choice: math.log(share) for choice, share in shares.items() if share > 0}


def _tokens(logprobs: Any) -> Iterator[tuple[Any, list[tuple[Any, Any]]]]:
    """Each token with its alternatives and their log-probabilities, of either form."""
    for token in _listed(_at(logprobs, "content")):
        others = _listed(_at(token, "top_logprobs"))
        yield _at(token, "token"), [(_at(other, "token"), _at(other, "logprob")) for other in others]
    for token, top in zip(_listed(_at(logprobs, "tokens")), _listed(_at(logprobs, "top_logprobs")), strict=False):
        yield token, list(top.items()) if isinstance(top, Mapping) else []


def _listed(found: Any) -> list[Any]:
    return found if isinstance(found, list) else []


def _word(token: Any) -> str:
    return token.strip(_PIECES + " \t\r\n") if isinstance(token, str) else ""
