"""Everything that is said of one pair or answer: its parts, and the edit that turns the preference."""

from collections.abc import Sequence
from dataclasses import dataclass

from rmcore.core.progress import Report, prefixed, silent
from rmcore.data.pair import PreferencePair, Prompt, prompt_text, with_text_answers
from rmcore.explain.counterfactual import Counterfactual, turn_preferences
from rmcore.explain.effects import Effects, span_effects
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


def explain_answers(
    rm: BradleyTerryRM, sides: Sequence[tuple[Prompt, str]], *, report: Report = silent
) -> list[Answer]:
    """Take N answers apart, by sentence and by word.

    Args:
        rm: the reward model.
        sides: N (prompt, answer).
        report: told of texts scored.

    Raises:
        DataError: the model cannot read a side.
        ModelError: a reward is not finite.
    """
    sentences = span_effects(rm, sides, "sentence", report=prefixed(report, "sentences"))
    words = span_effects(rm, sides, "word", report=prefixed(report, "words"))
    return [
        Answer(prompt_text(prompt), text, by_sentence.total, by_sentence, by_word)
        for (prompt, text), by_sentence, by_word in zip(sides, sentences, words, strict=True)
    ]


def explain_pairs(
    rm: BradleyTerryRM, pairs: Sequence[PreferencePair], *, seed: int, report: Report = silent
) -> list[Explanation]:
    """Take both answers of P pairs apart and look for the smallest edit that turns each.

    Args:
        rm: the reward model.
        pairs: P pairs.
        seed: of what edits draw.
        report: told of each part.

    Raises:
        DataError: the model cannot read a side, or no pair has answers that are texts.
        ModelError: a reward is not finite.
    """
    pairs = with_text_answers(pairs, "taken apart")
    turned = turn_preferences(rm, pairs, seed=seed, report=prefixed(report, "edits"))
    answers = explain_answers(
        rm, [(pair.prompt, text) for pair in pairs for text in (pair.chosen, pair.rejected)], report=report
    )
    return [
        Explanation(pair.pair_id, chosen, rejected, found)
        for pair, chosen, rejected, found in zip(pairs, answers[::2], answers[1::2], turned, strict=True)
    ]
