"""How a verdict is shown, the same way on pages, in Markdown and in a terminal: its tone (a CSS class) and its sign."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class VerdictStyle(NamedTuple):
    """How a verdict is shown: good (only from a policy's samples upwards), bad, or open."""

    tone: str
    sign: str


VERDICT_STYLES = {
    **dict.fromkeys(("ready", "gained"), VerdictStyle("good", "✓")),
    **dict.fromkeys(("passes", "unclear"), VerdictStyle("open", "?")),
    **dict.fromkeys(("fails", "not_ready", "lost"), VerdictStyle("bad", "✗")),
}


def check_result(check: Mapping[str, Any]) -> str:
    """The result of one check in a sign and a word: "? undecided" where more pairs might show that it passes.

    "? missing" is one that was not measured, which is no failure.

    >>> check_result({"passed": False, "value": 0.3, "unclear": True})
    '? undecided'
    """
    if check["passed"]:
        return "✓ pass"
    return "? undecided" if check.get("unclear") else "? missing" if check["value"] is None else "✗ fail"
