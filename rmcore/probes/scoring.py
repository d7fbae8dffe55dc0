"""Rewards of the answers in preference pairs, and of what rules make of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rmcore.core.arrays import FloatArray, IntArray
from rmcore.core.errors import DataError
from rmcore.core.progress import Report, silent
from rmcore.data.pair import PreferencePair, Prompt, with_text_answers
from rmcore.data.rendering import TokenizedSide
from rmcore.ensembles.score import SideScorer
from rmcore.models.checks import refuse_not_finite
from rmcore.probes.rule import Answer, Rule


@dataclass(frozen=True, slots=True)
class Answers:
    """The A different (prompt, answer) of P pairs over C prompts, and their rewards.

    A prompt is a conversation here, as `prompt_id` names it: what intervals are drawn over.
    """

    sides: list[tuple[Prompt, str]]
    rewards: FloatArray
    """(A,) logits."""
    cluster: IntArray
    """(A,) prompt of each, 0 to C-1."""
    chosen: IntArray
    """(P,) which answer is the chosen one of each pair."""
    rejected: IntArray
    """(P,) which one is the rejected one."""
    num_unreadable: int = 0
    """Answers that the model cannot read; pairs with one are left out."""

    @property
    def num_prompts(self) -> int:
        """C."""
        return int(self.cluster.max()) + 1


@dataclass(frozen=True, slots=True)
class Edits:
    """The E answers that a rule applies to, edited."""

    rule: Rule
    texts: list[str]
    place: IntArray
    """(E,) which answer each was, rising."""
    rewards: FloatArray
    """(E,) logits."""
    num_unseen: int = 0
    """Answers left out because the limit of length took away all that the edit changed."""
    num_unreadable: int = 0
    """Edited answers that the model cannot read."""


def score_answers(
    rm: SideScorer, pairs: Sequence[PreferencePair], *, report: Report = silent
) -> tuple[Answers, list[TokenizedSide]]:
    """Score the different answers of pairs; with their (A,) tokens. Answers that are no texts alone are left out.

    Raises:
        DataError: the model can read none of the pairs.
        ModelError: a reward is not finite.
    """
    pairs = with_text_answers(pairs, "edited")
    every = list(dict.fromkeys((pair.prompt, text) for pair in pairs for text in (pair.chosen, pair.rejected)))
    found = dict(zip(every, rm.renderer.try_sides(every, report=report), strict=True))
    read = {side: one for side, one in found.items() if isinstance(one, TokenizedSide)}
    kept = [pair for pair in pairs if (pair.prompt, pair.chosen) in read and (pair.prompt, pair.rejected) in read]
    if not kept:
        why = next((str(one) for one in found.values() if isinstance(one, DataError)), "there are none")
        raise DataError(f"none of the {len(pairs)} pairs can be read as this model reads text: {why}")
    place: dict[tuple[Prompt, str], int] = {}
    for pair in kept:
        for text in (pair.chosen, pair.rejected):
            place.setdefault((pair.prompt, text), len(place))
    tokens = [read[side] for side in place]
    chosen = np.array([place[pair.prompt, pair.chosen] for pair in kept])
    rejected = np.array([place[pair.prompt, pair.rejected] for pair in kept])
    cluster = np.empty(len(place), dtype=np.int64)
    cluster[chosen] = cluster[rejected] = np.unique([pair.prompt_id for pair in kept], return_inverse=True)[1]
    rewards = _score(rm, tokens, "answer", report)
    return Answers(list(place), rewards, cluster, chosen, rejected, len(every) - len(read)), tokens


def score_edits(
    rm: SideScorer,
    answers: Answers,
    tokens: Sequence[TokenizedSide],
    rule: Rule,
    *,
    seed: int = 0,
    report: Report = silent,
) -> Edits:
    """Edit the answers that a rule is about, and score what comes out.

    Raises:
        DataError: the rule, one of the user's own, failed.
        ModelError: a reward is not finite.
    """
    wanted = np.unique(answers.chosen) if rule.expects == "lower" else np.arange(len(answers.sides))
    elsewhere = other_answers(answers)
    applied: list[tuple[int, str]] = []
    for at in map(int, wanted):
        prompt, text = answers.sides[at]
        edited = rule.apply(Answer(prompt, text, elsewhere[at]), seed=seed)
        if edited is not None:
            applied.append((at, edited))
    found = rm.renderer.try_sides([(answers.sides[at][0], text) for at, text in applied], report=report)
    read = [(at, text, one) for (at, text), one in zip(applied, found, strict=True) if isinstance(one, TokenizedSide)]
    seen = [one for one in read if not _is_unseen(tokens[one[0]], one[2])]
    return Edits(
        rule=rule,
        texts=[text for _, text, _ in seen],
        place=np.array([at for at, _, _ in seen], dtype=np.int64),
        rewards=_score(rm, [side for *_, side in seen], f"answer edited by {rule.name}", report),
        num_unseen=len(read) - len(seen),
        num_unreadable=len(applied) - len(read),
    )


def other_answers(answers: Answers) -> list[str | None]:
    """(A,) an answer to another prompt for each one: that of half of all prompts further on, so that none serves twice
    as often as others. None where there is one prompt only.
    """
    number = answers.num_prompts
    if number < 2:
        return [None] * len(answers.sides)
    preferred = np.full(number, -1)
    preferred[answers.cluster[answers.chosen][::-1]] = answers.chosen[::-1]  # the first pair's of each prompt
    return [answers.sides[preferred[(at + number // 2) % number]][1] for at in answers.cluster]


def _is_unseen(before: TokenizedSide, after: TokenizedSide) -> bool:
    """Whether both are the same to the model, because the limit of length cut at least one of them."""
    return before.ids == after.ids and bool(before.num_cut or after.num_cut)


def _score(rm: SideScorer, tokens: Sequence[TokenizedSide], what: str, report: Report) -> FloatArray:
    if not tokens:
        return np.zeros(0)
    rewards = rm.score_sides(tokens, report=report).astype(np.float64)
    refuse_not_finite(rewards, lambda place: f"{what}, number {place + 1} of {len(tokens)}")
    return rewards
