"""Kinds of mistakes: planted groups come back with their words, and noise is one kind in nineteen worlds of twenty."""

import numpy as np
import pytest

from rmcore.data.pair import PreferencePair
from rmcore.explain.kinds import directions, group_of_each, kinds_of_mistakes, words_of

DIM = 24


def planted(rng, number, axis, spread=0.3):
    """Differences of `number` mistakes that point along an axis, and against the head, which is the first one."""
    found = rng.normal(scale=spread, size=(number, DIM))
    found[:, axis] += 3
    found[:, 0] = -rng.exponential(size=number)
    return found


def mistake(place, prompt_word, model_word, label_word):
    return PreferencePair(
        f"Tell {place} of {prompt_word}.", f"It is {label_word}.", f"Well, it is {model_word}, friend."
    )


@pytest.mark.slow
def test_planted_kinds_come_back_with_their_words():
    rng = np.random.default_rng(0)
    pairs = [mistake(place, "birds", "surely", "fine") for place in range(30)]
    pairs += [mistake(place, "ships", "maybe", "good") for place in range(30, 50)]
    others = [mistake(place, "trees", "so", "thus") for place in range(50, 150)]
    differences = np.concatenate([planted(rng, 30, 3), planted(rng, 20, 7)])
    order = rng.permutation(50)
    found = kinds_of_mistakes(
        [pairs[place] for place in order], differences[order], np.eye(DIM)[0], [*pairs, *others], seed=0
    )
    assert [len(kind.members) for kind in found] == [30, 20]
    assert {order[place] for place in found[0].members} == set(range(30))
    for kind, prompt, model, label in zip(
        found, ("birds", "ships"), ("surely", "maybe"), ("fine", "good"), strict=True
    ):
        assert [one.word for one in kind.prompt_words] == [prompt]
        assert model in {one.word for one in kind.model_words}
        assert label in {one.word for one in kind.label_words}
        assert kind.longer == 1
        assert all(one.num == len(kind.members) and one.against == 0 for one in kind.model_words)


def test_directions_leave_the_head_out():
    rng = np.random.default_rng(1)
    differences, head = rng.normal(size=(40, DIM)), rng.normal(size=DIM)
    moved = differences + np.outer(rng.normal(size=40), head)  # along the head only
    unit = head / np.linalg.norm(head)

    def across(found):
        return found - np.outer(found @ unit, unit)

    scaled = moved * (np.linalg.norm(across(differences), axis=1) / np.linalg.norm(across(moved), axis=1))[:, None]
    ours, theirs = directions(differences, head), directions(scaled, head)
    np.testing.assert_allclose(ours @ ours.T, theirs @ theirs.T, atol=1e-9)


@pytest.mark.slow
def test_noise_is_one_kind_at_the_stated_level():
    rng = np.random.default_rng(2)
    worlds = 40
    clouds = (directions(rng.normal(size=(40, 8)) * np.arange(1, 9), np.eye(8)[0]) for _ in range(worlds))
    split = sum(group_of_each(cloud, seed=world).any() for world, cloud in enumerate(clouds))
    # One in twenty is expected: 2 of 40; 7 or more come by chance with probability 0.003.
    assert split <= 6


@pytest.mark.parametrize("number", [0, 1, 5])
def test_few_mistakes_are_one_kind_or_none(number):
    rng = np.random.default_rng(3)
    pairs = [mistake(place, "birds", "surely", "fine") for place in range(number)]
    found = kinds_of_mistakes(pairs, planted(rng, number, 3), np.eye(DIM)[0], pairs, seed=0)
    assert [kind.members for kind in found] == ([tuple(range(number))] if number else [])


def test_a_prompt_with_many_pairs_counts_once():
    pairs = [PreferencePair("The same.", f"It is {place}.", f"It is surely {place}.") for place in range(40)]
    (kind,) = kinds_of_mistakes(pairs, np.random.default_rng(4).normal(size=(40, 3)), np.eye(3)[0], pairs, seed=0)
    assert kind.num_prompts == 1
    assert kind.model_words == ()


def test_words_are_words():
    assert words_of("Don't say 42, SAY it's well-known: naïve.") == {"don't", "say", "it's", "well-known", "naïve"}


@pytest.mark.slow
def test_pairs_of_one_prompt_make_no_kind():
    rng = np.random.default_rng(5)
    prompts = rng.normal(size=(20, 12))
    split = 0
    for world in range(10):
        draws = np.random.default_rng(100 + world)
        places = np.repeat(np.arange(20), 4)
        differences = prompts[places] + draws.normal(scale=0.3, size=(80, 12))
        pairs = [
            PreferencePair(f"Tell of {place}.", f"Yes {number}.", f"No {number}.")
            for number, place in enumerate(places)
        ]
        split += len(kinds_of_mistakes(pairs, differences, np.eye(12)[0], pairs, seed=world)) > 1
    assert split <= 2


def test_every_mistake_is_of_one_kind():
    rng = np.random.default_rng(6)
    pairs = [PreferencePair(f"Tell of {place % 25}.", f"Yes {place}.", f"No {place}.") for place in range(50)]
    differences = np.concatenate([planted(rng, 25, 3), planted(rng, 25, 3)])
    found = kinds_of_mistakes(pairs, differences, np.eye(DIM)[0], pairs, seed=0)
    assert sorted(place for kind in found for place in kind.members) == list(range(50))
