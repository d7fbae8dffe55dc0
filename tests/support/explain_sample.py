"""Explanations made by hand: one mistake whose parts and edit are known."""

from typing import Any

from rmcore.data.pair import PreferencePair
from rmcore.explain.counterfactual import Counterfactual, Edit
from rmcore.explain.effects import Effects, SpanEffect
from rmcore.explain.kinds import Kind, Word
from rmcore.explain.record import Answer, Explained, Explanation

PAIR = PreferencePair(
    "Is <b>water</b> wet?", "Yes.\n\nIt is & always was.", "Surely! <script>bad()</script> It may be."
)


def effects(text: str, unit: Any, ends: tuple[int, ...], shares: tuple[float, ...], num_seen: int) -> Effects:
    """Effects of spans that end at these characters, of which the first `num_seen` are seen."""
    starts = (0, *ends[:-1])
    spans = tuple(
        SpanEffect(start, end, share, share if unit == "sentence" else None, share, place < num_seen)
        for place, (start, end, share) in enumerate(zip(starts, ends, shares, strict=True))
    )
    total = sum(shares) + 0.25
    return Effects(
        unit, spans, total=total, base=0.0, empty="", interaction=0.25, num_cut=0 if num_seen == len(ends) else 9
    )


def answer(text: str, first: int, shares: tuple[float, float], num_seen: int = 2) -> Answer:
    """An answer of two parts, the first `first` characters and the rest."""
    ends = (first, len(text))
    return Answer(
        prompt=str(PAIR.prompt),
        text=text,
        reward=sum(shares) + 0.25,
        sentences=effects(text, "sentence", ends, shares, num_seen),
        words=effects(text, "word", ends, shares, num_seen),
    )


def explained() -> Explained:
    """One kind of mistake and one mistake of it."""
    turned = Counterfactual(
        PAIR.pair_id,
        margin=-1.5,
        turned=True,
        edit=Edit("rejected", "evasion", "The answer evades.", "Surely! It may be.", 1, 0.5),
        num_tried=20,
        num_turning=3,
        num_unreadable=0,
    )
    pair = Explanation(
        PAIR.pair_id, answer(PAIR.chosen, 6, (0.5, -0.25), num_seen=1), answer(PAIR.rejected, 8, (2.0, -0.001)), turned
    )
    kind = Kind((0, 1), 2, (Word("surely", 9, 1),), (), (Word("water", 5, 0),), 0.5, (("facts", 2),))
    return Explained(
        num_pairs=40, num_mistakes=2, kinds=[kind], kinds_note="All mistakes are one kind.", pairs=[pair], kind_of=[0]
    )


def record() -> dict[str, Any]:
    """The same as the stage writes it."""
    return explained().to_dict()
