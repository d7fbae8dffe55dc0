"""One record for page and report of all that explains a model's worst mistakes, single pairs and single answers."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from rmcore.core.errors import DataError, ModelError
from rmcore.core.progress import Report, prefixed, silent
from rmcore.data.pair import PreferencePair, Prompt, prompt_text, with_text_answers
from rmcore.ensembles.features import head_of, pair_features
from rmcore.ensembles.score import readable_pairs
from rmcore.explain.counterfactual import Counterfactual, turn_preferences
from rmcore.explain.effects import Effects, span_effects
from rmcore.explain.kinds import FEWEST_MISTAKES, NUM_SIMULATED, Kind, kinds_of_mistakes
from rmcore.models.reward_model import BradleyTerryRM

MOST_GROUPED = 400
"""Mistakes that are grouped into kinds, the worst ones: grouping takes a distance between every two."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer taken apart."""

    prompt: str
    text: str
    reward: float
    """In logits."""
    sentences: Effects
    words: Effects


@dataclass(frozen=True, slots=True)
class Explanation:
    """One pair explained."""

    pair_id: str
    chosen: Answer
    rejected: Answer
    counterfactual: Counterfactual

    @property
    def margin(self) -> float:
        """reward_chosen - reward_rejected, in logits."""
        return self.chosen.reward - self.rejected.reward


@dataclass(frozen=True)
class Explained:
    """Everything that the page shows.

    Attributes:
        num_pairs: held-out pairs among which the mistakes were found; None where single ones were named.
        num_mistakes: of those, ranked against their label.
        kinds: of mistakes.
        kinds_note: how they were found, in words.
        pairs: explanations of pairs.
        kind_of: for each of them its kind's place in `kinds`, or None.
        answers: of answers that stand alone.
    """

    num_pairs: int | None = None
    num_mistakes: int = 0
    kinds: list[Kind] = field(default_factory=list)
    kinds_note: str = ""
    pairs: list[Explanation] = field(default_factory=list)
    kind_of: list[int | None] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready record."""
        pairs = [
            {**asdict(one), "margin": one.margin, "kind": kind}
            for one, kind in zip(self.pairs, self.kind_of, strict=True)
        ]
        rest = asdict(replace(self, pairs=[]))
        del rest["kind_of"]
        return {**rest, "pairs": pairs}


def explain_mistakes(
    rm: BradleyTerryRM, held_out: Sequence[PreferencePair], *, most: int, seed: int, report: Report = silent
) -> Explained:
    """Explain the held-out pairs with the largest wrong margins, one a prompt, and group mistakes into kinds.

    Args:
        rm: the reward model.
        held_out: pairs that it was not trained on; those that it cannot read are left out and said on stderr.
        most: mistakes that are explained.
        seed: of edits and grouping.
        report: told of each part.

    Raises:
        DataError: there are no pairs, or none can be read.
        ModelError: a reward is not finite.
    """
    if not held_out:
        raise DataError("there are no held-out pairs, so there is no mistake to explain; give some.")
    pairs = with_text_answers(readable_pairs(rm, held_out), "taken apart")
    rewards = rm.score_pairs(pairs, report=prefixed(report, "held-out pairs")).astype(np.float64)
    margins = rewards[:, 0] - rewards[:, 1]
    wrong = np.flatnonzero(margins < 0)
    wrong = wrong[np.argsort(margins[wrong], kind="stable")]
    grouped = [pairs[place] for place in wrong[:MOST_GROUPED]]
    kinds, note = _kinds(rm, grouped, len(wrong), pairs, seed, report)
    first_of_prompt: dict[str, int] = {}
    for place in wrong:
        first_of_prompt.setdefault(pairs[place].prompt_id, int(place))
    worst = list(first_of_prompt.values())[:most]
    at = {int(place): rank for rank, place in enumerate(wrong)}
    kind_of = [next((k for k, kind in enumerate(kinds) if at[place] in kind.members), None) for place in worst]
    found = explain_named(rm, [pairs[place] for place in worst], seed=seed, report=report)
    return replace(found, num_pairs=len(pairs), num_mistakes=len(wrong), kinds=kinds, kinds_note=note, kind_of=kind_of)


def explain_named(
    rm: BradleyTerryRM, pairs: Sequence[PreferencePair], *, seed: int, report: Report = silent
) -> Explained:
    """Take both answers of P pairs apart, whichever side is preferred, and look for the smallest edit that turns each.

    Raises:
        DataError: a pair cannot be read, or none has answers that are texts.
        ModelError: a reward is not finite.
    """
    if not pairs:
        return Explained()
    pairs = with_text_answers(pairs, "taken apart")
    turned = turn_preferences(rm, pairs, seed=seed, report=prefixed(report, "edits"))
    sides = [(pair.prompt, text) for pair in pairs for text in (pair.chosen, pair.rejected)]
    answers = _taken_apart(rm, sides, report)
    found = [
        Explanation(pair.pair_id, chosen, rejected, edit)
        for pair, chosen, rejected, edit in zip(pairs, answers[::2], answers[1::2], turned, strict=True)
    ]
    return Explained(pairs=found, kind_of=[None] * len(found))


def explain_alone(rm: BradleyTerryRM, prompt: Prompt, answer: str, *, report: Report = silent) -> Explained:
    """Take one answer apart that there is no other to compare with.

    Raises:
        DataError: the model cannot read it.
        ModelError: a reward is not finite.
    """
    return Explained(answers=_taken_apart(rm, [(prompt, answer)], report))


def _taken_apart(rm: BradleyTerryRM, sides: Sequence[tuple[Prompt, str]], report: Report) -> list[Answer]:
    """N answers by sentence and by word."""
    sentences = span_effects(rm, sides, "sentence", report=prefixed(report, "sentences"))
    words = span_effects(rm, sides, "word", report=prefixed(report, "words"))
    return [
        Answer(prompt_text(prompt), text, by_sentence.total, by_sentence, by_word)
        for (prompt, text), by_sentence, by_word in zip(sides, sentences, words, strict=True)
    ]


def _kinds(
    rm: BradleyTerryRM,
    mistakes: Sequence[PreferencePair],
    num_mistakes: int,
    held_out: Sequence[PreferencePair],
    seed: int,
    report: Report,
) -> tuple[list[Kind], str]:
    """Kinds of the worst mistakes, and how they were found; none where the head is not linear in features."""
    if not mistakes:
        return [], ""
    try:
        head = head_of(rm).weight.detach().double().cpu().numpy()[0]
        chosen, rejected = pair_features(rm, mistakes, report=prefixed(report, "kinds of mistakes"))
    except ModelError as refusal:
        return [], f"No kinds were looked for: {refusal}"
    found = kinds_of_mistakes(mistakes, chosen - rejected, head, held_out, seed=seed)
    of = "All mistakes" if len(mistakes) == num_mistakes else f"The {len(mistakes)} worst mistakes"
    num_prompts = len({pair.prompt_id for pair in mistakes})
    if num_prompts < FEWEST_MISTAKES:
        how = f"{of} are of {num_prompts} prompts, too few to look for groups ({FEWEST_MISTAKES} are needed)."
    elif len(found) > 1:
        how = (
            f"{of} fall into {len(found)} groups by what the model sees of them, more distinct than in "
            f"{NUM_SIMULATED} simulations without groups."
        )
    else:
        how = f"{of} are one kind: no groups stand out by what the model sees of them."
    counts = "Numbers are prompts with the word on that side alone : on the other alone; of prompts, here : elsewhere."
    return found, f"{how} {counts}"
