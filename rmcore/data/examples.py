"""A few rows of preference data as they were understood, for a person to check before anything is trained on them."""

from collections.abc import Sequence
from typing import Any

from rmcore.data.observation import Observation
from rmcore.data.pair import prompt_messages

SHOWN_BEGINNING, SHOWN_END = 150, 60
"""Characters that are shown of a longer text."""


def examples(observations: Sequence[Observation]) -> list[dict[str, Any]]:
    """Return the first, the middle and the last observation as lines: who says what, and how each answer was judged.

    Returns:
        For each a dict with `number` (from 1, of the observations that are used) and `lines`, pairs of a label (role of
        a turn, or the judgement of an answer) and a text, which is cut in the middle where it is long and has no
        control characters.
    """
    places = sorted({0, len(observations) // 2, len(observations) - 1} & set(range(len(observations))))
    return [{"number": place + 1, "lines": _lines(observations[place])} for place in places]


def format_examples(found: Sequence[dict[str, Any]], total: int) -> str:
    """The examples as text for a terminal."""
    lines = []
    for one in found:
        lines += ["", f"as understood: {one['number']:,} of {total:,}"]
        width = max(len(label) for label, _ in one["lines"])
        lines += [f"  {label:<{width}}  {text}" for label, text in one["lines"]]
    return "\n".join(lines)


def _lines(observation: Observation) -> list[tuple[str, str]]:
    turns = [(_shown(turn.role), _shown(turn.text)) for turn in prompt_messages(observation.prompt)]
    answers = [(f"→ {_judged(observation, place)}", _shown(answer)) for place, answer in enumerate(observation.answers)]
    return turns + answers


def _judged(observation: Observation, place: int) -> str:
    if observation.ranks is None:
        return ", ".join(
            f"{name} {given[place]:g}" for name, given in observation.grades.items() if given[place] is not None
        )
    rank = observation.ranks[place]
    if len(observation.ranks) == 2:
        return "tied" if len(set(observation.ranks)) == 1 else "chosen" if rank == 1 else "rejected"
    if observation.top_only:
        return "best" if rank == 1 else "not best"
    return f"rank {rank}"


def _shown(text: str) -> str:
    """One line of a text, cut in the middle; what a terminal would act on is written as an escape."""
    if len(text) > SHOWN_BEGINNING + SHOWN_END:
        left_out = len(text) - SHOWN_BEGINNING - SHOWN_END
        text = f"{text[:SHOWN_BEGINNING]} … {left_out:,} characters … {text[-SHOWN_END:]}"
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)
