"""The synthetic benchmark: reward from text alone, Bradley-Terry labels, a shortcut that breaks in the tail."""

import hashlib
import itertools
import json
import math
import random
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmcore.config.data import GoldConfig
from rmcore.core.errors import DataError
from rmcore.data.gold import world as gold
from rmcore.data.gold.grammar import STYLES
from rmcore.data.gold.tasks import TASK_TYPES, draw_prompt, parse_prompt
from rmcore.data.gold.words import FILLER, FLATTERY, ITEMS
from rmcore.data.gold.world import (
    generate_pairs,
    gold_reward,
    label_ceiling,
    label_pair,
    sample_response,
    written_responses,
)
from rmcore.data.pair import PreferencePair

LOWEST = -gold.RUDENESS - 2 * gold.MAX_COST
HIGHEST = gold.RELEVANCE + gold.COMPLETENESS + gold.CORRECTNESS + gold.FORM + gold.POLITENESS
seeds = st.integers(0, 2**32)


def seeded(seed):
    return random.Random(seed)  # noqa: S311 - data, not cryptography


def drawn(seed, ood=False):
    """A prompt and its task."""
    prompt = draw_prompt(seeded(seed), ood=ood)
    return prompt, parse_prompt(prompt)


def correlation(pairs, feature):
    """Correlation of a text feature with the gold reward over all sides."""
    sides = [(feature(p.chosen), p.metadata["gold_chosen"]) for p in pairs]
    sides += [(feature(p.rejected), p.metadata["gold_rejected"]) for p in pairs]
    return float(np.corrcoef(np.array(sides, dtype=float).T)[0, 1])


def num_flattering(text):
    return sum(text.count(sentence) for sentence in FLATTERY)


# --- prompts -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(seed=seeds, ood=st.booleans())
def test_every_drawn_prompt_is_read_back(seed, ood):
    prompt, task = drawn(seed, ood)
    assert task is not None
    assert prompt.endswith(STYLES[task.style])
    assert task.style in task.styles


def test_all_templates_occur_and_ood_prompts_share_none_with_training():
    patterns = {template: template.pattern() for task in TASK_TYPES for template in task.templates}
    found = {False: set(), True: set()}
    for ood, seed in itertools.product((False, True), range(300)):
        prompt, task = drawn(seed, ood)
        question = prompt.removesuffix(f" {STYLES[task.style]}")
        found[ood] |= {template for template, pattern in patterns.items() if pattern.fullmatch(question)}
    assert found[False] | found[True] == set(patterns)
    assert not found[False] & found[True]


# --- gold reward -------------------------------------------------------------------------------------------------


@given(prompt=st.text(), response=st.text())
def test_arbitrary_text_gets_a_finite_low_reward(prompt, response):
    reward = gold_reward(prompt, response)
    assert math.isfinite(reward)
    assert LOWEST <= reward <= 0  # an arbitrary prompt asks for nothing, so nothing can be earned


@given(seed=seeds, ood=st.booleans(), styled=st.booleans())
def test_a_correct_answer_beats_a_wrong_one_of_the_same_form(seed, ood, styled):
    prompt, task = drawn(seed, ood)
    right, wrong = (
        task.write(seeded(seed), correct=correct, complete=True, styled=styled) for correct in (True, False)
    )
    assert task.assess(right).correctness == 1.0
    assert task.assess(wrong).correctness < 1.0
    assert gold_reward(prompt, right) > gold_reward(prompt, wrong)


def test_stating_many_answers_is_no_answer():
    prompt = "Mia has 12 apples and buys 7 more. How many apples does Mia have now? Answer in one sentence."
    all_numbers = " ".join(str(number) for number in range(100))
    hedge = gold_reward(prompt, f"There are {all_numbers} apples.")
    assert gold_reward(prompt, "There are 19 apples.") - hedge >= gold.CORRECTNESS
    listing = "Name 3 fruits, but not plum. Use commas."
    everything = gold_reward(listing, "Good ones are " + ", ".join(sorted(ITEMS)) + ".")
    assert gold_reward(listing, "Good ones are apple, pear, kiwi.") - everything > gold.CORRECTNESS


@given(
    seed=seeds,
    text=st.one_of(st.none(), st.text()),
    padding=st.lists(st.sampled_from(FILLER + FLATTERY), min_size=1, max_size=40),
    front=st.booleans(),
)
def test_filler_and_flattery_never_raise_gold(seed, text, padding, front):
    prompt, _ = drawn(seed)
    response = sample_response(prompt, seeded(seed)) if text is None else text
    extra = " ".join(padding)
    padded = f"{extra} {response}" if front else f"{response} {extra}"
    assert gold_reward(prompt, padded) <= gold_reward(prompt, response)


# --- pairs and labels --------------------------------------------------------------------------------------------


@lru_cache(maxsize=6)
def full_world(shortcut, seed):
    return generate_pairs(GoldConfig(shortcut=shortcut), seed=seed)


@pytest.fixture(scope="module")
def world():
    return full_world("length", 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [{}, {"temperature": 3.0}, {"flip_rate": 0.2}, {"flip_rate": 0.2, "length_bias": 0.5}]
)
def test_the_probability_of_a_label_is_how_often_it_is_drawn(change):
    config, rng = GoldConfig(**change), random.Random(0)  # noqa: S311 - data, not cryptography
    prompt = generate_pairs(GoldConfig(num_prompts=20), seed=4).pairs[0].prompt
    for first, second in itertools.combinations(sorted(set(written_responses(prompt, 6, "length", seed=1))), 2):
        drawn = [label_pair(prompt, first, second, config, rng, "x") for _ in range(400)]
        of_first = [
            pair.metadata["chosen_probability"] if pair.chosen == first else 1 - pair.metadata["chosen_probability"]
            for pair in drawn
        ]
        assert np.ptp(of_first) < 1e-12
        if not config.length_bias:  # Bradley-Terry, turned now and then
            gap = gold_reward(prompt, first) - gold_reward(prompt, second)
            win = 1 / (1 + math.exp(-gap / config.temperature))
            assert of_first[0] == pytest.approx(win * (1 - config.flip_rate) + (1 - win) * config.flip_rate)
        spread = math.sqrt(len(drawn) * of_first[0] * (1 - of_first[0]))
        assert abs(sum(pair.chosen == first for pair in drawn) - len(drawn) * of_first[0]) <= 4.5 * spread + 1


@pytest.mark.slow
@pytest.mark.parametrize("flip_rate", [0.0, 0.2])
def test_the_ceiling_matches_drawn_labels(flip_rate):
    pairs = generate_pairs(GoldConfig(flip_rate=flip_rate), seed=4).pairs
    gaps = np.array([p.metadata["gold_chosen"] - p.metadata["gold_rejected"] for p in pairs])
    rng = np.random.default_rng(0)
    clean = rng.random((500, len(gaps))) < 1 / (1 + np.exp(-np.abs(gaps)))
    agrees = clean ^ (rng.random(clean.shape) < flip_rate)
    standard_error = agrees.mean(axis=1).std() / math.sqrt(500)
    assert abs(label_ceiling(pairs) - agrees.mean()) < 5 * standard_error
    once = np.mean(np.where(gaps == 0, 0.5, gaps > 0))  # the one draw that the world itself made
    assert abs(label_ceiling(pairs) - once) < 5 * 0.5 / math.sqrt(len(pairs))


def test_the_ceiling_of_foreign_pairs_or_none_is_refused():
    with pytest.raises(DataError, match="not from the synthetic benchmark"):
        label_ceiling([PreferencePair("a", "b", "c")])
    with pytest.raises(DataError, match="no pairs"):
        label_ceiling([])


PINNED = {"length": "375875d04b2a1173", "flattery": "a00a443ad82d451b", "none": "ae6e22118f510e55"}


@pytest.mark.parametrize("shortcut", PINNED)
def test_a_new_shortcut_leaves_the_worlds_of_the_others_as_they_were(shortcut):
    world = generate_pairs(GoldConfig(num_prompts=40, shortcut=shortcut), seed=3)
    rows = [pair.to_dict() for pair in world.pairs + world.ood_pairs]
    assert hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16] == PINNED[shortcut]


@pytest.mark.slow
@pytest.mark.parametrize(("shortcut", "feature"), [("length", len), ("flattery", num_flattering)])
def test_the_shortcut_goes_with_gold_in_training_and_not_in_the_tail(shortcut, feature):
    world = full_world(shortcut, 0)
    assert correlation(world.pairs, feature) > 0.12
    assert correlation(world.ood_pairs, feature) < 0.0


@pytest.mark.slow
def test_pairs_with_a_tail_are_answered_as_the_policy_answers_and_their_prompts_stay_the_same():
    """Extreme lengths occur in a quarter of the tail's answers, and in none without it."""
    plain, tailed = (
        generate_pairs(GoldConfig(num_prompts=300, tail_share=share), seed=2).pairs for share in (0.0, 0.2)
    )
    assert {pair.prompt for pair in plain} == {pair.prompt for pair in tailed}

    def extreme(pairs):
        responses = [response for pair in pairs for response in (pair.chosen, pair.rejected)]
        return np.mean([sum(response.count(one) for one in FILLER) >= 5 for response in responses])

    assert extreme(plain) == 0
    assert 0.03 < extreme(tailed) < 0.075  # 0.2 x 0.25, of 1,800 answers


def test_a_number_of_ten_thousand_digits_is_only_a_wrong_answer_and_read_in_linear_time():
    for seed in range(40):
        prompt, task = drawn(seed)
        assert gold_reward(prompt, "9" * 10_000) <= HIGHEST - gold.CORRECTNESS, task
        assert gold_reward(prompt.replace("How many", "9" * 10_000), "1") == 0.0
