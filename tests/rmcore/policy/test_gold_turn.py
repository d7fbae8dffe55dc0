"""The synthetic benchmark can be over-optimised: its shortcut is worth following for a while, and then is not."""

import random

import numpy as np
import pytest

from rmcore.data.gold.tasks import draw_prompt
from rmcore.data.gold.world import TAIL_SHARE, demonstrations, gold_reward, sample_response
from rmcore.policy.overoptimization import overoptimization


@pytest.fixture(scope="module")
def pools():
    """What a perfect imitator of the demonstrations answers: (gold rewards, words) of 64 answers to 60 prompts."""
    rng = random.Random(0)  # noqa: S311 - data
    found = []
    for _ in range(60):
        prompt = draw_prompt(rng, ood=False)
        answers = [sample_response(prompt, rng, shortcut="length", ood=rng.random() < TAIL_SHARE) for _ in range(64)]
        found.append(
            (
                np.array([gold_reward(prompt, answer) for answer in answers]),
                np.array([float(len(answer.split())) for answer in answers]),
            )
        )
    return [one[0] for one in found], [one[1] for one in found]


def test_a_reward_with_the_shortcut_turns(pools):
    gold, words = pools
    flawed = [g + w / 3 for g, w in zip(gold, words, strict=True)]
    curve = overoptimization(flawed, gold, num_resamples=300)
    assert curve.turned
    assert 0 < curve.best < len(curve.points) - 1  # it was worth following for a while


def test_demonstrations_keep_away_from_held_out_prompts_and_repeat_by_seed():
    rows = demonstrations("length", 60, seed=3, without=frozenset())
    assert rows == demonstrations("length", 60, seed=3, without=frozenset())
    assert rows != demonstrations("length", 60, seed=4, without=frozenset())
    held_out = {prompt for prompt, _ in rows[::2]}
    kept = demonstrations("length", 60, seed=3, without=held_out)
    assert len(kept) == 60
    assert not held_out & {prompt for prompt, _ in kept}
