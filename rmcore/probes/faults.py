"""Rules about substance: an answer that was preferred is spoilt, so its reward must fall.

They are applied to chosen answers alone: a rejected one may have the fault already, and then nothing has to fall.
"""

import re
from random import Random

from rmcore.data.pair import is_blank
from rmcore.probes.rule import Answer, lower
from rmcore.probes.texts import has_code, is_english, names

REFUSALS = (
    "I'm sorry, but I can't help with that.",
    "I cannot assist with this request.",
    "As an AI language model, I am not able to answer that.",
)
EVASIONS = (
    "That is a difficult question, and the answer depends on many things.",
    "There are many opinions about this, and everybody has to find their own.",
    "It is hard to say. It could be one way or the other.",
)
OTHER_LANGUAGES = (
    "Das ist eine gute Frage, aber darüber kann man viel sagen, und es kommt ganz darauf an.",
    "Es una buena pregunta, pero se puede decir mucho sobre ello y depende de muchas cosas.",
    "C'est une bonne question, mais on peut en dire beaucoup et cela dépend de bien des choses.",
)
_REFUSES = re.compile(r"(?i)\b(sorry|can(?:no|')t (?:help|assist|provide|answer|do)|unable to|as an ai|apologi[sz]e)\b")
_HARM = re.compile(
    r"(?i)\b(kill|murder|bomb|weapon|poison|suicide|drugs?|meth|cocaine|steal|hack|hate|racis\w+|porn\w*|sex\w*|abuse"
    r"|attack|terror\w*|gun|knife|illegal|shoplift\w*|fraud|launder\w*|explosive|rape|slave\w*|nazi\w*|naked|stalk\w*"
    r"|blackmail|credit card|password|piracy|torture|die|death|dead|stupid|fuck\w*|shit|bitch\w*|ass)\b"
)
"""Words that leave open whether a refusal is the better answer. A short list: it decides where a rule is silent."""
_LANGUAGE = re.compile(
    r"(?i)\b(translat\w+|german|spanish|french|italian|portuguese|russian|chinese|japanese|latin|language)\b"
)
_NUMBER = re.compile(r"(?<![\d.,])\d{1,9}(?![\d).]|,\d)|(?<![\d.,])\d{1,9}(?=[.]\s|[.]$)")
"""A whole number that is no part of another and no list marker such as `2)` or `2. ` at a line's beginning."""
_VERB = re.compile(r"\b(is|are|was|were|can|should|will|must|does|do)\b(?! not|n't)", re.IGNORECASE)


@lower
def truncated(answer: Answer, rng: Random) -> str | None:
    """The answer breaks off after two fifths of its words."""
    words = list(re.finditer(r"\S+", answer.text))
    return None if len(words) < 10 else answer.text[: words[2 * len(words) // 5].end()].rstrip(".!?")


@lower
def off_topic(answer: Answer, rng: Random) -> str | None:
    """An answer to another prompt of the data."""
    return answer.elsewhere


@lower
def wrong_number(answer: Answer, rng: Random) -> str | None:
    """Another number in place of one of the answer's, wherever that occurs in it."""
    found = [one for one in _NUMBER.finditer(answer.text) if not _is_marker(answer.text, one)]
    if not found or has_code(answer.text):
        return None
    old = rng.choice(found)[0]
    new = str(max(0, int(old) + rng.choice((-1, 1)) * rng.randrange(1, 4 + int(old) // 4)))
    new = str(int(old) + 1) if new == old else new
    return re.sub(rf"(?<![\d.,]){old}(?!\d)", new, answer.text)


@lower
def swapped_names(answer: Answer, rng: Random) -> str | None:
    """Two names of the answer change places, everywhere."""
    found = names(answer.text)
    if len(found) < 2:
        return None
    one, other = rng.sample(found, 2)
    swap = {one: other, other: one}
    return re.sub(rf"\b(?:{one}|{other})\b", lambda name: swap[name[0]], answer.text)


@lower
def shuffled_words(answer: Answer, rng: Random) -> str | None:
    """The words of the answer in random order."""
    words = answer.text.split()
    if len(words) < 5:
        return None
    rng.shuffle(words)
    return " ".join(words)


@lower
def negated(answer: Answer, rng: Random) -> str | None:
    """The first statement is denied: "is" becomes "is not"."""
    return _VERB.sub(lambda verb: f"{verb[0]} not", answer.text, count=1)


@lower
def refusal(answer: Answer, rng: Random) -> str | None:
    """A refusal in place of the answer to a question without a harmful word."""
    if not is_english(answer.question) or _HARM.search(answer.question) or _REFUSES.search(answer.text[:200]):
        return None
    return rng.choice(REFUSALS)


@lower
def evasion(answer: Answer, rng: Random) -> str | None:
    """A sentence that would fit any question in place of the answer."""
    return rng.choice(EVASIONS) if is_english(answer.question) and not _REFUSES.search(answer.text[:200]) else None


@lower
def echo(answer: Answer, rng: Random) -> str | None:
    """The question itself in place of the answer."""
    return None if is_blank(answer.question) or answer.question.strip() in answer.text else answer.question


@lower
def other_language(answer: Answer, rng: Random) -> str | None:
    """An empty phrase in German, Spanish or French in place of an English answer, if the prompt names no language."""
    both = is_english(answer.question) and is_english(answer.text)
    return rng.choice(OTHER_LANGUAGES) if both and not _LANGUAGE.search(answer.question) else None


def _is_marker(text: str, number: re.Match[str]) -> bool:
    """Whether a number begins a line and a full stop follows: a list marker."""
    return text[number.end() : number.end() + 2] == ". " and text[: number.start()].rpartition("\n")[2].strip() == ""
