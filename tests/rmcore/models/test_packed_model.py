"""A reward model whose rows are packed: scored, saved, copied and differentiated as any other."""

import numpy as np
import pytest

from rmcore.config.model import LoraSettings
from rmcore.models.packing.layout import group_tokens
from tests.support.random_models import adapted

PROMPT = "Name a fruit that is good in winter, and say in one sentence why you think so."
ANSWERS = ["Pears.", "Gladly: apples keep well in a cool cellar.", "No.", "A lemon, for tea", "Pears, they are sweet."]


@pytest.fixture(params=[None, LoraSettings(rank=4)], ids=["full", "lora"])
def reward_model(request, tiny_folder):
    return adapted(tiny_folder, request.param, max_seq_len=128)


def padded_rewards(rm, sides):
    rm.allow_packing = False
    try:
        return np.concatenate([rm.score_sides([side]) for side in sides])
    finally:
        rm.allow_packing = True


def sides_of(rm):
    """Five answers to one prompt, mixed with sides of other prompts."""
    requests = [(PROMPT, answer) for answer in ANSWERS] + [("Hello", "Hi"), ("Sort: b, a", "a, b")]
    sides = rm.renderer.tokenize_sides(requests)
    return [sides[index] for index in (5, 0, 3, 6, 1, 4, 2)]


def test_answers_to_one_prompt_are_scored_together_and_exactly(reward_model):
    sides = sides_of(reward_model)
    expected = padded_rewards(reward_model, sides)
    packing = reward_model.packing()
    assert packing is not None
    found = reward_model.score_sides(sides)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert np.ptp(found) > 1e-2
    (chunk,) = reward_model.scoring_chunks(sides, token_budget=8192, precision="fp32")
    assert sorted([1, 2, 4, 5, 6]) in [sorted(group) for group in chunk]
    row_tokens = group_tokens([sides[index].ids for index in (1, 2, 4, 5, 6)], packing)
    assert row_tokens < 0.5 * sum(len(sides[index].ids) for index in (1, 2, 4, 5, 6))


def test_equal_sides_have_equal_rewards_to_the_last_bit_wherever_they_stand(rm, gold_pairs):
    sides = [side for pair in rm.renderer.tokenize_pairs(gold_pairs[:12]) for side in (pair.chosen, pair.rejected)]
    done: list[int] = []
    rewards = rm.score_sides(
        [*sides, *reversed(sides), sides[5]], report=lambda number, total, text: done.append(number)
    )
    assert np.array_equal(rewards[: len(sides)], rewards[len(sides) : -1][::-1])
    assert rewards[-1] == rewards[5]
    assert done == sorted(done)
    assert done[-1] == 2 * len(sides) + 1
