"""Files as public preference data are, of any size, answered and judged in the gold world.

Answers are those of its writer; what annotators say of them is their gold reward with noise, in the form of each file.
"""

import json
import random
from pathlib import Path

from rmcore.data.gold.tasks import draw_prompt
from rmcore.data.gold.world import gold_reward, sample_response

ASPECTS = ("helpfulness", "honesty", "instruction_following", "truthfulness")
ATTRIBUTES = ("helpfulness", "correctness", "coherence", "complexity", "verbosity")
LEVELS = (-1.0, 1.0, 3.0, 5.0)
"""Bounds between ratings: gold rewards go from about -3 to 7.5."""


def gold_answers(num_prompts: int, num_answers: int, *, seed: int = 0) -> list[tuple[str, dict[str, float]]]:
    """(prompt, answer -> gold reward) of different prompts, each with so many different answers."""
    rng = random.Random(f"preference files {seed}")  # noqa: S311 - data
    found: dict[str, dict[str, float]] = {}
    while len(found) < num_prompts:
        prompt = draw_prompt(rng, ood=False)
        answers: dict[str, float] = {}
        while len(answers) < num_answers:
            answer = sample_response(prompt, rng)
            answers[answer] = gold_reward(prompt, answer)
        found.setdefault(prompt, answers)
    return list(found.items())


def write_ultrafeedback(
    path: Path, num_prompts: int, *, num_answers: int = 4, noise: float = 0.7, seed: int = 0
) -> str:
    """Write JSON Lines of instruction and completions with ratings from 1 to 5 of four aspects; gives the path."""
    rng = random.Random(f"ultrafeedback {seed}")  # noqa: S311 - data
    rows = [
        {
            "source": "gold",
            "instruction": prompt,
            "completions": [
                {
                    "model": f"m{place}",
                    "response": answer,
                    "annotations": {aspect: {"Rating": str(_rating(gold, noise, rng) + 1)} for aspect in ASPECTS},
                }
                for place, (answer, gold) in enumerate(answers.items())
            ],
        }
        for prompt, answers in gold_answers(num_prompts, num_answers, seed=seed)
    ]
    return _written(rows, path)


def write_helpsteer2(path: Path, num_prompts: int, *, num_answers: int = 2, noise: float = 0.7, seed: int = 0) -> str:
    """Write JSON Lines of one graded answer a row, five attributes from 0 to 4; gives the path.

    Helpfulness and correctness follow the gold reward, coherence half of it, complexity nothing, verbosity the length.
    """
    rng = random.Random(f"helpsteer2 {seed}")  # noqa: S311 - data
    rows = []
    for prompt, answers in gold_answers(num_prompts, num_answers, seed=seed):
        for answer, gold in answers.items():
            follows = (gold, gold, gold / 2 + 2, rng.gauss(2, 2), len(answer) / 40 - 2)
            grades = {name: _rating(value, noise, rng) for name, value in zip(ATTRIBUTES, follows, strict=True)}
            rows.append({"prompt": prompt, "response": answer, **grades})
    return _written(rows, path)


def write_arena(
    path: Path,
    num_prompts: int,
    *,
    noise: float = 0.7,
    tie_width: float = 0.8,
    num_judges: int = 0,
    num_votes: int = 1,
    seed: int = 0,
) -> str:
    """Write JSON Lines of battles of two answers, a tie where gold rewards with noise are close; gives the path.

    Args:
        path: where to.
        num_prompts: battles; each has a prompt of its own.
        noise: standard deviation of what a judge adds to each gold reward.
        tie_width: closer ones are a tie.
        num_judges: how many judges a column `judge` names; 0: there is none.
        num_votes: rows of each battle; by different judges where they are named.
        seed: another seed, other battles.
    """
    rng = random.Random(f"arena {seed}")  # noqa: S311 - data
    rows = []
    for number, (prompt, answers) in enumerate(gold_answers(num_prompts, 2, seed=seed)):
        (first, gold), (second, other) = answers.items()
        judges: list[int | None] = list(rng.sample(range(num_judges), num_votes)) if num_judges else [None] * num_votes
        for judge in judges:
            gap = gold - other + rng.gauss(0, noise * 2**0.5)
            wins = {"winner_model_a": int(gap > tie_width), "winner_model_b": int(gap < -tie_width)}
            row = {"id": number, "model_a": "m1", "model_b": "m2", "prompt": json.dumps([prompt])}
            row |= {"response_a": json.dumps([first]), "response_b": json.dumps([second]), **wins}
            row["winner_tie"] = 1 - sum(wins.values())
            rows.append(row if judge is None else row | {"judge": f"judge {judge}"})
    return _written(rows, path)


def _rating(value: float, noise: float, rng: random.Random) -> int:
    """0 to 4: how many of `LEVELS` are below the value with noise."""
    noisy = value + rng.gauss(0, noise)
    return sum(level < noisy for level in LEVELS)


def _written(rows: list[dict[str, object]], path: Path) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)
