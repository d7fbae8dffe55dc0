"""Everything that is said of one pair or answer: its parts, the edit that turns it, the training pairs behind it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rmcore.core.errors import DataError, ModelError
from rmcore.core.progress import Report, prefixed, silent
from rmcore.data.pair import PreferencePair, Prompt, prompt_text
from rmcore.explain.counterfactual import Counterfactual, turn_preferences
from rmcore.explain.effects import Effects, span_effects
from rmcore.explain.gradients import Gradients, integrated_gradients
from rmcore.explain.spans import Span
from rmcore.models.reward_model import BradleyTerryRM


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer taken apart."""

    prompt: str
    text: str
    reward: float
    """In logits."""
    sentences: Effects
    words: Effects
    gradients: tuple[float, ...] | None
    """Integrated gradients summed over each sentence; None where they cannot be taken."""
    gradients_note: str
    """How much of the reward they miss, or why there are none."""


@dataclass(frozen=True, slots=True)
class TrainingPair:
    """A training pair, and what its presence did to a margin."""

    pair_id: str
    prompt: str
    chosen: str
    rejected: str
    effect: float
    """Change of the explained margin, in logits: above 0, it helped to prefer the answer that is labelled better."""
    margin: float
    """Its own, in logits."""


@dataclass(frozen=True, slots=True)
class Behind:
    """The training pairs that moved one margin most."""

    helpful: tuple[TrainingPair, ...]
    """Those that raised it most, most first."""
    harmful: tuple[TrainingPair, ...]
    """Those that lowered it most."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """One pair explained."""

    pair_id: str
    chosen: Answer
    rejected: Answer
    counterfactual: Counterfactual
    behind: dict[str, Behind] = field(default_factory=dict)
    """By `weights` and by `head`; empty where no training pairs were given."""

    @property
    def margin(self) -> float:
        """reward_chosen - reward_rejected, in logits."""
        return self.chosen.reward - self.rejected.reward

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready record."""
        return {**asdict(self), "margin": self.margin}


def explain_answers(
    rm: BradleyTerryRM, sides: Sequence[tuple[Prompt, str]], *, report: Report = silent
) -> list[Answer]:
    """Take N answers apart, by sentence and by word.

    Args:
        rm: the reward model.
        sides: N (prompt, answer).
        report: told of texts scored, then of answers whose gradients are taken.

    Raises:
        DataError: the model cannot read a side.
        ModelError: a reward is not finite.
    """
    sentences = span_effects(rm, sides, "sentence", report=prefixed(report, "sentences"))
    words = span_effects(rm, sides, "word", report=prefixed(report, "words"))
    found = []
    for number, (side, by_sentence, by_word) in enumerate(zip(sides, sentences, words, strict=True), 1):
        sums, note = _gradients(rm, side, by_sentence)
        found.append(Answer(prompt_text(side[0]), side[1], by_sentence.total, by_sentence, by_word, sums, note))
        report(number, len(sides), "integrated gradients")
    return found


def _gradients(
    rm: BradleyTerryRM, side: tuple[Prompt, str], sentences: Effects
) -> tuple[tuple[float, ...] | None, str]:
    try:
        found: Gradients = integrated_gradients(rm, *side)
    except (DataError, ModelError) as refusal:  # a second opinion, without which the first one stands
        return None, str(refusal)
    spans = [Span(one.start, one.end) for one in sentences.spans]
    missed = f"{found.num_steps} steps miss {found.error:+.2g} of {found.total - found.base:+.3g} logits"
    return tuple(found.by_span(spans)), missed


def explain_pairs(
    rm: BradleyTerryRM, pairs: Sequence[PreferencePair], *, seed: int, report: Report = silent
) -> list[Explanation]:
    """Take both answers of P pairs apart and look for the smallest edit that turns each, without training pairs.

    Args:
        rm: the reward model.
        pairs: P pairs.
        seed: of what edits draw.
        report: told of each part.

    Raises:
        DataError: the model cannot read a side.
        ModelError: a reward is not finite.
    """
    turned = turn_preferences(rm, pairs, seed=seed, report=prefixed(report, "edits"))
    answers = explain_answers(
        rm, [(pair.prompt, text) for pair in pairs for text in (pair.chosen, pair.rejected)], report=report
    )
    return [
        Explanation(pair.pair_id, chosen, rejected, found)
        for pair, chosen, rejected, found in zip(pairs, answers[::2], answers[1::2], turned, strict=True)
    ]
