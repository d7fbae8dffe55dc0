"""The worth of each part of an answer: its reward with and without it, and with it alone.

For an answer of the spans N = {1, ..., n} let v(S) be the reward of the text that the spans S make (`spans.text_of`),
v(N) the reward of the answer and v({}) that of an empty one. Exact differences of rewards, nothing is fitted or drawn:

    removed_i  =  v(N) - v(N without i)      what the answer loses without the part
    alone_i    =  v({i}) - v({})             what the part adds to an empty answer
    share_i    =  (removed_i + alone_i) / 2

Write v(S) as the sum of m(T) over all T within S (m: Harsanyi's dividends, Moebius coefficients). Then removed_i is the
sum of m(T) over all T with i, alone_i is m({i}), and Shapley's value of i is the sum of m(T) / |T| over all T with i.
Where m(T) = 0 for |T| > 2, so where spans interact in pairs at most,

    share_i  =  m({i}) + 1/2 * sum over j of m({i, j})  =  Shapley's value of i

exactly, from 2n + 2 rewards and not 2^n. In general the shares leave

    interaction  =  v(N) - v({}) - sum of shares  =  sum over |T| >= 3 of (1 - |T| / 2) m(T)

which holds nothing but interactions among three and more spans, and is reported next to them. It is no bound: they may
cancel in it. By word there is `removed` alone, which is then the share, and `interaction` holds pairs as well.

An answer longer than the model reads is taken apart as far as the model sees it: the parts beyond are named unseen and
have no effect. Where the limit cuts the prompt, too, a text without a part lets the model read more of it.

Texts with a hole in them are not what a reward model was trained on, and the empty answer least of all, so `removed` is
the surer of the two.

Sources: Shapley 1953 (A value for n-person games); Harsanyi 1963 (dividends); Grabisch and Roubens 1999 (Int. J. Game
Theory 28, interaction indices; games that are at most 2-additive); Covert, Lundberg and Lee 2021 (JMLR 22, explaining
by removing).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rmcore.core.errors import DataError
from rmcore.core.progress import Report, silent
from rmcore.data.pair import Prompt
from rmcore.data.rendering import TokenizedSide
from rmcore.ensembles.score import SideScorer
from rmcore.explain.spans import Span, Unit, spans_of, text_of
from rmcore.models.checks import refuse_not_finite

MOST_SPANS = 64
"""Most parts of an answer: more words are taken together as phrases, more sentences as passages."""
EMPTY = ("", ".")
"""The texts that may stand for an empty answer; the first that can be read does. Some templates refuse an empty one."""


@dataclass(frozen=True, slots=True)
class SpanEffect:
    """The effect of one part of an answer, its characters `start` to before `end`, in logits."""

    start: int
    end: int
    removed: float
    alone: float | None
    """None by word."""
    share: float
    seen: bool
    """Whether the model reads the part; where the limit of length cuts it off, it has no effect: zeros."""


@dataclass(frozen=True, slots=True)
class Effects:
    """One answer taken apart."""

    unit: Unit
    spans: tuple[SpanEffect, ...]
    """They tile the answer, in order."""
    total: float
    """Reward of the answer, in logits."""
    base: float
    """Reward of the empty answer."""
    empty: str
    """The text that stood for the empty answer, see `EMPTY`."""
    interaction: float
    """The rest that the shares leave: total - base - their sum."""
    num_cut: int
    """Tokens of prompt and answer that the limit of length cut off."""

    def ranked(self) -> list[SpanEffect]:
        """The parts that the model reads, largest share first."""
        return sorted((one for one in self.spans if one.seen), key=lambda one: -one.share)


@dataclass(frozen=True, slots=True)
class _Apart:
    """An answer taken apart, before anything is scored."""

    answer: str
    spans: list[Span]
    num_seen: int
    """The first of the spans are seen."""
    num_cut: int

    def texts(self, unit: Unit) -> Iterator[str]:
        """The texts to be scored: without each span that is seen and, by sentence, each alone."""
        seen = self.spans[: self.num_seen]
        visible = self.answer[: seen[-1].end] if seen else ""
        everything = set(range(len(seen)))
        for place in range(len(seen)):
            yield text_of(visible, seen, everything - {place})
        if unit == "sentence":
            for place in range(len(seen)):
                yield text_of(visible, seen, {place})


def span_effects(
    rm: SideScorer, sides: Sequence[tuple[Prompt, str]], unit: Unit, *, most: int = MOST_SPANS, report: Report = silent
) -> list[Effects]:
    """Measure what each part of N answers adds to its reward.

    All texts of all answers are scored in one call, so those of one answer share the prompt where rows are packed; an
    answer of n sentences costs 2n + 2 rewards, one of n words n + 2.

    Args:
        rm: a reward model, here or served.
        sides: N (prompt, answer).
        unit: by sentence or by word.
        most: most parts of an answer, from 1 on.
        report: told of the texts scored.

    Raises:
        DataError: the model cannot read a side, or what is left of it without a part.
        ModelError: a reward is not finite.
    """
    whole = rm.renderer.tokenize_sides(sides)
    apart = [_take_apart(rm, *both, unit, most) for both in zip(sides, whole, strict=True)]
    empty, bases = _empty_sides(rm, [prompt for prompt, _ in sides])
    texts = [[text or empty for text in one.texts(unit)] for one in apart]
    ablated = [(prompt, text) for (prompt, _), made in zip(sides, texts, strict=True) for text in made]
    tokens = [*whole, *bases, *rm.renderer.tokenize_sides(ablated)]
    rewards = rm.score_sides(tokens, report=report).astype(np.float64)
    refuse_not_finite(rewards, lambda place: _name(place, len(sides)))
    rest = iter(rewards[2 * len(sides) :])
    found = []
    for one, total, base in zip(apart, rewards, rewards[len(sides) :], strict=False):
        removed = [float(total - next(rest)) for _ in range(one.num_seen)]
        alone = [float(next(rest) - base) for _ in range(one.num_seen)] if unit == "sentence" else None
        found.append(_effects(one, unit, float(total), float(base), empty, removed, alone))
    return found


def _take_apart(rm: SideScorer, side: tuple[Prompt, str], tokens: TokenizedSide, unit: Unit, most: int) -> _Apart:
    answer = side[1]
    end = rm.renderer.place_side(*side).end if tokens.num_cut else len(answer)
    if not answer[end:].strip():
        spans = spans_of(answer, unit, most=most)
        return _Apart(answer, spans, len(spans), tokens.num_cut)
    # The part in which the model stops reading becomes two, so that what it reads of it has its effect.
    seen = spans_of(answer[:end], unit, most=most)
    unseen = [Span(end + start, end + stop) for start, stop in spans_of(answer[end:], unit, most=most)]
    return _Apart(answer, seen + unseen, len(seen), tokens.num_cut)


def _empty_sides(rm: SideScorer, prompts: Sequence[Prompt]) -> tuple[str, list[TokenizedSide]]:
    """The text that stands for an empty answer, and its sides with each prompt."""
    for text in EMPTY:
        found = rm.renderer.try_sides([(prompt, text) for prompt in prompts])
        read = [side for side in found if isinstance(side, TokenizedSide) and side.ids]
        if len(read) == len(prompts):
            return text, read
    reason = next((str(side) for side in found if isinstance(side, DataError)), "it comes out without a token")
    raise DataError(
        f"this model reads neither an empty answer nor one of a full stop ({reason}), so there is nothing that parts "
        "of an answer could be measured from; let the template or the render_fn take short answers."
    )


def _effects(
    apart: _Apart, unit: Unit, total: float, base: float, empty: str, removed: list[float], alone: list[float] | None
) -> Effects:
    spans = []
    for place, span in enumerate(apart.spans):
        seen = place < apart.num_seen
        taken = removed[place] if seen else 0.0
        put = (alone[place] if seen else 0.0) if alone is not None else None
        share = taken if put is None else (taken + put) / 2
        spans.append(SpanEffect(span.start, span.end, taken, put, share, seen))
    interaction = total - base - sum(one.share for one in spans)
    return Effects(unit, tuple(spans), total, base, empty, interaction, apart.num_cut)


def _name(place: int, num_sides: int) -> str:
    if place < 2 * num_sides:
        return f"{'empty ' if place >= num_sides else ''}answer {place % num_sides}"
    return f"text {place - 2 * num_sides} of what answers are without a part"
