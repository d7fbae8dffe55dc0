"""The smallest edit that turns a preference: which of two answers is better by a model, changed by a few words.

The edits are those of the rules of `rmcore.probes` and the removal of one sentence, each of either answer of a pair.
How far an edit goes is the number of words that it changes: of the longer of the two sides of each place in which
`difflib` finds the answers different, word by word. An edit of white space alone changes none. Among the edits that
turn the sign of the margin the one of fewest words is given; of equals the one that leaves the margin farther on the
other side. It is the smallest of the edits that are tried, not of all there are.
"""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rmcore.core.progress import Report, silent
from rmcore.data.pair import PreferencePair, is_blank
from rmcore.data.rendering import TokenizedSide
from rmcore.ensembles.score import SideScorer
from rmcore.explain.spans import spans_of, text_of
from rmcore.models.checks import refuse_not_finite
from rmcore.probes.rule import Answer, Rule
from rmcore.probes.rules import RULES

WITHOUT = "without a sentence"
"""Name of the edit that is no rule's."""
MOST_SENTENCES = 32
"""Most sentences of an answer that are taken away one by one; of a longer answer, passages."""

Edited = Literal["chosen", "rejected"]


@dataclass(frozen=True, slots=True)
class Edit:
    """One answer of a pair edited, and the margin that comes of it."""

    edited: Edited
    rule: str
    """The rule's name, or `WITHOUT`."""
    meaning: str
    text: str
    """The edited answer."""
    num_words: int
    """Words that it changes."""
    margin: float
    """reward_chosen - reward_rejected with the edited answer, in logits."""


@dataclass(frozen=True, slots=True)
class Counterfactual:
    """The preference of one pair, and the edit that it takes to turn it."""

    pair_id: str
    margin: float
    """reward_chosen - reward_rejected, in logits."""
    turned: bool
    """Whether an edit turns the sign of the margin. Nothing turns a margin of zero, which prefers neither."""
    edit: Edit | None
    """The smallest edit that turns the margin; where none does, the one that moves it farthest towards the other sign,
    and None where none moves it that way or no edit applies."""
    num_tried: int
    """Different edits that were scored."""
    num_turning: int
    """How many of them turn the margin."""
    num_unreadable: int
    """Edits left out because the model cannot read what came out."""


def changed_words(before: str, after: str) -> int:
    """Count the words that are replaced, taken away or put in between two texts; white space counts nothing."""
    old, new = before.split(), after.split()
    same = next((at for at, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    old, new = old[same:], new[same:]  # what they begin and end with is most of them, and difflib is quadratic
    last = next((at for at, (a, b) in enumerate(zip(old[::-1], new[::-1], strict=False)) if a != b), None)
    last = min(len(old), len(new)) if last is None else last
    matcher = difflib.SequenceMatcher(None, old[: len(old) - last], new[: len(new) - last], autojunk=False)
    return sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal")


def turn_preferences(
    rm: SideScorer,
    pairs: Sequence[PreferencePair],
    *,
    rules: Sequence[Rule] = tuple(RULES.values()),
    seed: int = 0,
    report: Report = silent,
) -> list[Counterfactual]:
    """Find the smallest edit that turns the preference of each of P pairs; all edits are scored in one call.

    Args:
        rm: a reward model, here or served.
        pairs: P pairs. A rule that puts an answer to another prompt in place takes it from the others among them.
        rules: the edits that are tried next to the removal of a sentence.
        seed: of what the rules draw.
        report: told of the sides scored.

    Raises:
        DataError: the model cannot read a pair, or a rule, one of the user's own, failed.
        ModelError: a reward is not finite.
    """
    tokens = [side for one in rm.renderer.tokenize_pairs(pairs) for side in (one.chosen, one.rejected)]
    edits = [
        list(_edits(pair, _elsewhere(pairs, place), rules, seed)) for place, pair in enumerate(pairs)
    ]  # for each pair: edited side, rule, meaning, text
    flat = [(pair.prompt, text) for pair, made in zip(pairs, edits, strict=True) for *_, text in made]
    found = iter(rm.renderer.try_sides(flat))
    read = [[(made, side) for made in tried for side in [next(found)]] for tried in edits]
    sides = [side for tried in read for _, side in tried if isinstance(side, TokenizedSide)]
    rewards = rm.score_sides([*tokens, *sides], report=report).astype(np.float64)
    refuse_not_finite(rewards, lambda place: f"pair {pairs[place // 2].pair_id}" if place < len(tokens) else "an edit")
    edited = iter(rewards[len(tokens) :])
    result = []
    for pair, (chosen, rejected), tried in zip(pairs, rewards[: len(tokens)].reshape(-1, 2), read, strict=True):
        scored = []
        for (which, rule, meaning, text), side in tried:
            if not isinstance(side, TokenizedSide):
                continue
            margin = float(next(edited) - rejected if which == "chosen" else chosen - next(edited))
            before = pair.chosen if which == "chosen" else pair.rejected
            scored.append(Edit(which, rule, meaning, text, changed_words(before, text), margin))
        result.append(_judged(pair, float(chosen - rejected), scored, len(tried) - len(scored)))
    return result


def _judged(pair: PreferencePair, margin: float, edits: list[Edit], num_unreadable: int) -> Counterfactual:
    sign = np.sign(margin)
    turning = [one for one in edits if one.margin * sign < 0]
    if turning:
        best: Edit | None = min(turning, key=lambda one: (one.num_words, one.margin * sign))
    else:
        towards = [one for one in edits if one.margin * sign < margin * sign]
        best = min(towards, key=lambda one: (one.margin * sign, one.num_words), default=None)
    return Counterfactual(pair.pair_id, margin, bool(turning), best, len(edits), len(turning), num_unreadable)


def _edits(
    pair: PreferencePair, elsewhere: str | None, rules: Sequence[Rule], seed: int
) -> Iterator[tuple[Edited, str, str, str]]:
    both: tuple[tuple[Edited, str], ...] = (("chosen", pair.chosen), ("rejected", pair.rejected))
    for which, text in both:
        made = {text}
        answer = Answer(pair.prompt, text, elsewhere)
        found = [(rule.name, rule.meaning, rule.apply(answer, seed=seed)) for rule in rules]
        for name, meaning, edited in [*found, *_without_one(text)]:
            if edited is not None and edited not in made:
                made.add(edited)
                yield which, name, meaning, edited


def _without_one(text: str) -> Iterator[tuple[str, str, str]]:
    spans = spans_of(text, "sentence", most=MOST_SENTENCES)
    for place, span in enumerate(spans):
        left = text_of(text, spans, set(range(len(spans))) - {place})
        if not is_blank(left):
            yield WITHOUT, f"Without {span.of(text)!r}.", left


def _elsewhere(pairs: Sequence[PreferencePair], place: int) -> str | None:
    """The preferred answer to the next other prompt."""
    others = (pairs[(place + step) % len(pairs)] for step in range(1, len(pairs)))
    return next((other.chosen for other in others if other.prompt_id != pairs[place].prompt_id), None)
