"""Findings of probes on rewards that are drawn: one rule of each expectation is violated, one holds."""

from typing import Any

import numpy as np

from rmcore.probes.measure import Answers, Edits, judge
from rmcore.probes.rule import Expectation, Rule
from rmcore.probes.settings import ProbeConfig

SETTINGS = ProbeConfig()
EFFECTS = {
    "chosen": [{"text": "Of course!", "effect": -0.41}, {"text": "The answer is <42> & nothing else.", "effect": 1.37}],
    "rejected": [{"text": "I am delighted.", "effect": 0.83}, {"text": "It is beyond the limit.", "effect": None}],
}
"""What each sentence of both answers of a mistake adds."""


def drawn_answers(rng: np.random.Generator, num_prompts: int = 60, per_prompt: int = 4) -> Answers:
    """Rewards of answers with a standard deviation of 1 within prompts; two pairs of each prompt's four answers."""
    cluster = np.repeat(np.arange(num_prompts), per_prompt)
    sides = [(f"prompt {at}", f"answer {place}") for place, at in enumerate(cluster)]
    rewards = 5 * rng.normal(size=num_prompts)[cluster] + rng.normal(size=len(cluster))
    places = np.arange(len(cluster)).reshape(-1, 2)
    return Answers(sides, rewards, cluster, places[:, 0], places[:, 1])


def edits_of(
    answers: Answers, expects: Expectation, gain: Any, place: np.ndarray | None = None, name: str = "some"
) -> Edits:
    """Edits of all answers, or of those at `place`, that add `gain` to their rewards."""
    place = np.arange(len(answers.sides)) if place is None else place
    rule = Rule(name, expects, lambda answer, rng: None, f"Edit {name}.")
    return Edits(rule, [f"edited by <{name}>"] * len(place), place, answers.rewards[place] + gain)


def record(*, is_good: bool = False) -> dict[str, Any]:
    """Findings as the stage probe writes them; of a good model no rule is violated."""
    rng = np.random.default_rng(0)
    answers = drawn_answers(rng)
    chosen, every = np.unique(answers.chosen), len(answers.sides)
    edits = [
        edits_of(answers, "invariant", (0.0 if is_good else -1.5) + 0.1 * rng.normal(size=every), name="shorter"),
        edits_of(answers, "not_higher", (0.0 if is_good else 1.5) + 0.1 * rng.normal(size=every), name="louder"),
        edits_of(answers, "not_higher", 0.1 * rng.normal(size=every), name="softer"),
        edits_of(answers, "lower", np.where(rng.random(len(chosen)) < 0.02, 1.0, -1.0), chosen, name="plain_fault"),
        edits_of(answers, "invariant", np.zeros(0), np.zeros(0, dtype=np.int64), name="silent"),
    ]
    if not is_good:
        edits.append(edits_of(answers, "lower", np.where(chosen % 3, 1.0, -1.0), chosen, name="hidden_fault"))
    mistakes = [{"pair_id": "pair000000000000", "effects": EFFECTS}]  # the first one of `report_sample`
    return {**judge(answers, edits).to_dict(700), "mistakes": mistakes}
