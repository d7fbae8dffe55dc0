"""Grammar shared by the tasks of the synthetic benchmark: prompt templates, requested styles, and answers' tokens.

Templates are written once and read back by the regular expression made from them, so that drawing and parsing a prompt
cannot drift apart.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

STYLES = {
    "steps": "Show the calculation.",
    "sentence": "Answer in one sentence.",
    "numbered": "Use a numbered list.",
    "commas": "Use commas.",
    "quotes": "Put the number in quotes.",
}
_FIELDS = {"name": "[A-Z][a-z]+", "items": "[a-z0-9, ]+", "table": "[A-Za-z0-9, ]+", "key": "[A-Za-z]+"}
NUMBER = "[0-9]{1,4}"
_MARKER = re.compile(r"(?<![0-9])[0-9]{1,2}\)")
# Possessive and anchored at the start of a number: linear in time even for a policy that writes ten thousand digits.
EQUATION = re.compile(r"(?<![0-9])[0-9]++ ?[-+*] ?[0-9]++ ?=")
QUOTED = re.compile(r'"[0-9]+"')


class Assessment(NamedTuple):
    """Scores of one answer, each in [0, 1]; `style` is whether the asked-for form was kept."""

    relevance: float
    completeness: float
    correctness: float
    style: float


@dataclass(frozen=True)
class Template:
    """One wording of a prompt; `kind` selects the variant of the task (operator or direction)."""

    text: str
    kind: str = ""
    ood: bool = False

    def pattern(self) -> re.Pattern[str]:
        """The regular expression that reads the fields back; a field named twice must hold the same text twice."""
        seen: set[str] = set()
        parts = []
        for literal_or_field in re.split(r"(\{[a-z]+\})", self.text):
            if not literal_or_field.startswith("{"):
                parts.append(re.escape(literal_or_field))
                continue
            field = literal_or_field[1:-1]
            default = NUMBER if field in "abk" else "[a-z]+"
            parts.append(f"(?P={field})" if field in seen else f"(?P<{field}>{_FIELDS.get(field, default)})")
            seen.add(field)
        return re.compile("".join(parts))


def words_of(text: str) -> list[str]:
    """Lower-case words and whole numbers of a text, without the markers of a numbered list."""
    return re.findall(r"[a-z]+|[0-9]+", _MARKER.sub(" ", text).lower())


def stated_numbers(text: str) -> set[str]:
    """Numbers that a text claims: all but list markers and the terms left of an equals sign."""
    return set(re.findall(r"[0-9]+", EQUATION.sub(" ", _MARKER.sub(" ", text))))


def keeps_list_style(text: str, style: str) -> float:
    """1.0 where a list has the asked-for form, else 0.0."""
    numbered = "1)" in text and "2)" in text
    return float(numbered if style == "numbered" else not numbered and ", " in text)


def other_list_style(style: str) -> str:
    """The form that the prompt did not request."""
    return {"numbered": "commas", "commas": "numbered"}[style]


def write_items(items: list[str], style: str) -> str:
    """Items as `1) a 2) b` or as `a, b`."""
    if style == "numbered":
        return " ".join(f"{place}) {item}" for place, item in enumerate(items, start=1))
    return ", ".join(items)
