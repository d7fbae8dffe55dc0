"""Which pairs are trained on: a prompt never crosses, caps keep the first ones, what is held out is not trained on."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from unicodedata import normalize

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmcore.config.data import DataConfig
from rmcore.core.errors import ConfigError, DataError
from rmcore.data.pair import Message, PreferencePair, cap_pairs, is_blank
from rmcore.data.readers.sources import LoadedPairs
from rmcore.data.splits import (
    cap_prompts,
    conversation,
    exclude_held_out_conversations,
    normalized_prompt,
    split_by_prompt,
)
from rmcore.data.table import write_pairs
from rmcore.stages.prepare import prepare
from rmcore.stages.prepared import one_each

FRACTIONS = {"train": 0.75, "validation": 0.1, "test": 0.15}


def make_pairs(prompts):
    return [PreferencePair(prompt, f"a{i}", f"b{i}") for i, prompt in enumerate(prompts)]


def place_of(splits):
    return {normalized_prompt(pair.prompt): name for name, pairs in splits.items() for pair in pairs}


@given(st.lists(st.integers(0, 30), min_size=2, max_size=80).filter(lambda x: len(set(x)) > 1), st.integers(0, 2**31))
def test_every_pair_is_in_one_split_in_order_and_no_prompt_in_two(numbers, seed):
    pairs = make_pairs([f"prompt {number}" for number in numbers])
    splits = split_by_prompt(pairs, fractions=FRACTIONS, seed=seed)
    assert list(splits) == list(FRACTIONS)
    assert sorted(pair.chosen for part in splits.values() for pair in part) == sorted(pair.chosen for pair in pairs)
    prompts = [{pair.prompt for pair in part} for part in splits.values()]
    assert sum(map(len, prompts)) == len(set.union(*prompts)) == len(set(numbers))
    order = {pair.chosen: position for position, pair in enumerate(pairs)}
    for part in splits.values():
        assert [order[pair.chosen] for pair in part] == sorted(order[pair.chosen] for pair in part)
    assert splits["train"]
    assert splits["test"]
    assert splits["validation"] or len(set(numbers)) == 2


@pytest.mark.slow
@given(st.integers(100, 300), st.permutations(range(100)), st.integers(0, 5))
def test_a_prompt_stays_where_it_is_when_pairs_are_added_or_reordered(num_more, order, seed):
    few = split_by_prompt(make_pairs([f"prompt {i}" for i in range(100)]), fractions=FRACTIONS, seed=seed)
    many = split_by_prompt(
        make_pairs([f"prompt {i}" for i in (*order, *range(100, num_more))]), fractions=FRACTIONS, seed=seed
    )
    assert place_of(few).items() <= place_of(many).items()


@given(
    st.text(min_size=1).filter(lambda text: not is_blank(text)) | st.just("A PROMPT"),
    st.sampled_from(["\u200b", "\ufeff", "\u00ad", "\u2060", "\u200d", "\ufe0f", "\u034f", "\U000e0041", "\u202e"]),
    st.data(),
)
def test_case_white_space_normal_form_and_invisible_characters_do_not_matter(text, unseen, data):
    place = data.draw(st.integers(0, len(text)))
    variants = [text, text[:place] + unseen + text[place:], *(normalize(form, text) for form in ("NFC", "NFD"))]
    variants += [f"  {text}\n", text.replace(" ", " \t"), text.lower() if text.lower().upper() == text else text]
    assert len(set(map(conversation, variants))) == 1


def dialogue(*turns):
    return tuple(Message(("user", "assistant")[place % 2], turn) for place, turn in enumerate(turns))


@pytest.mark.slow
@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.booleans()), min_size=10, max_size=30),
    st.integers(0, 1000),
)
def test_turns_of_a_conversation_stay_together(cuts, seed):
    prompts = []
    for talk, num_answers, has_system in cuts:
        turns = dialogue(*(f"talk {talk} turn {turn}" for turn in range(2 * num_answers + 1)))
        prompts.append((Message("system", "Be brief."), *turns) if has_system else turns)
    try:
        splits = split_by_prompt(make_pairs(prompts), fractions=FRACTIONS, seed=seed)
    except DataError:
        assert len({talk for talk, *_ in cuts}) == 1
        return
    talks = [{conversation(pair.prompt) for pair in part} for part in splits.values()]
    assert sum(map(len, talks)) == len(set.union(*talks)) == len({talk for talk, *_ in cuts})


@given(st.text().filter(lambda text: not is_blank(text)))
def test_a_prompt_of_one_turn_is_a_conversation_of_its_own(text):
    assert conversation(text) == normalized_prompt(text)
    as_dialogue = PreferencePair((*dialogue(text, "Hm."), Message("user", "Go on.")), "a", "b")
    alone = PreferencePair(text, "a", "b")
    assert alone.prompt_id == as_dialogue.prompt_id
    assert alone.pair_id != as_dialogue.pair_id
    assert one_each([as_dialogue, alone]) == [as_dialogue.prompt]


def test_shares_come_out_as_asked_and_the_seed_changes_the_split():
    pairs = make_pairs([f"prompt {i}" for i in range(4000)])
    first, second = (split_by_prompt(pairs, fractions=FRACTIONS, seed=seed) for seed in (0, 1))
    for name, fraction in FRACTIONS.items():
        assert len(first[name]) / 4000 == pytest.approx(fraction, abs=0.03)  # more than 4 standard errors
    before, after = place_of(first), place_of(second)
    moved = sum(before[prompt] != after[prompt] for prompt in before)
    assert moved / 4000 == pytest.approx(1 - sum(f**2 for f in FRACTIONS.values()), abs=0.04)


@pytest.mark.parametrize("seed", range(30))
def test_two_prompts_give_train_and_test_one_each_and_three_fill_all(seed):
    two = split_by_prompt(make_pairs(["p", "q"]), fractions=FRACTIONS, seed=seed)
    assert {name: len(pairs) for name, pairs in two.items()} == {"train": 1, "validation": 0, "test": 1}
    three = split_by_prompt(make_pairs(["p", "q", "r"]), fractions=FRACTIONS, seed=seed)
    assert {name: len(pairs) for name, pairs in three.items()} == {"train": 1, "validation": 1, "test": 1}


def test_one_prompt_is_enough_for_one_split_and_too_few_for_two():
    assert len(split_by_prompt(make_pairs(["p", "P "]), fractions={"train": 1.0}, seed=0)["train"]) == 2
    with pytest.raises(DataError, match="1 different prompts cannot be split into train, validation, test"):
        split_by_prompt(make_pairs(["p", "P "]), fractions=FRACTIONS, seed=0)
    with pytest.raises(DataError, match="0 pairs"):
        split_by_prompt([], fractions=FRACTIONS, seed=0)


@pytest.mark.parametrize("fractions", [{"train": 0.5}, {"train": 1.2, "test": -0.2}, {}, {"train": float("nan")}])
def test_fractions_that_are_no_shares_are_refused(fractions):
    with pytest.raises(ConfigError, match="not shares of a whole"):
        split_by_prompt(make_pairs(["p", "q"]), fractions=fractions, seed=0)


def pair(prompt, number):
    return PreferencePair(f"prompt {prompt}", f"good {number}", f"bad {number}")


@given(st.lists(st.integers(0, 4), max_size=30), st.integers(1, 5))
def test_each_prompt_keeps_its_first_pairs_in_order(prompts, most):
    pairs = [pair(prompt, number) for number, prompt in enumerate(prompts)]
    capped = cap_prompts(LoadedPairs(pairs, [], len(pairs), "plain", "x"), most)
    counts = Counter(one.prompt for one in pairs)
    assert Counter(one.prompt for one in capped.pairs) == {name: min(most, count) for name, count in counts.items()}
    assert capped.pairs == [one for one in pairs if one in capped.pairs]
    assert capped.num_over_cap == len(pairs) - len(capped.pairs)
    assert cap_pairs(pairs, most) == capped.pairs
    assert cap_pairs(pairs, None) == pairs
    for prompt in counts:
        own = [one for one in pairs if one.prompt == prompt]
        assert [one for one in capped.pairs if one.prompt == prompt] == own[:most]


@pytest.mark.parametrize("extra", [{}, {"test_seed": 3}, {"eval_limit": 9}])
def test_held_out_prompts_of_the_same_source_keep_their_pairs_whatever_the_cap(tmp_path: Path, extra):
    write_pairs([pair(number % 30, number) for number in range(120)], tmp_path / "a.parquet")
    config = DataConfig(source=str(tmp_path / "a.parquet"), test_fraction=0.3, **extra)
    every = prepare(config, seed=0).pairs
    for most in (1, 2):
        splits, _, (loaded,) = prepare(config.model_copy(update={"pairs_per_prompt": most}), seed=0)
        assert splits["test"] == every["test"]
        for name in ("train", "validation"):
            assert splits[name] == cap_pairs(every[name], most)
        if "eval_limit" not in extra:
            assert loaded.num_over_cap == sum(len(every[name]) - len(splits[name]) for name in ("train", "validation"))


def dialogue_of_caps(number, *, later):
    turns = (Message("user", f"prompt {number}"), Message("assistant", "Hm."), Message("user", "Go on."))
    return PreferencePair(turns if later else turns[:1], f"good {number}", "bad")


def test_a_cap_is_of_prompts_and_not_of_conversations():
    pairs = [dialogue_of_caps(1, later=later) for later in (False, True, True)]
    capped = cap_prompts(LoadedPairs(pairs, [], 3, "message lists", "x"), 1)
    assert (capped.pairs, capped.num_over_cap) == (pairs[:2], 1)


@given(st.sets(st.integers(0, 59), max_size=40), st.booleans())
def test_training_pairs_of_held_out_conversations_are_taken_out_and_counted(tested, later):
    training = LoadedPairs([pair(number, number) for number in range(60)], [], 60, "plain", "a")
    held_out = LoadedPairs(
        [dialogue_of_caps(number, later=later) for number in tested], [], len(tested), "message lists", "b"
    )
    left = exclude_held_out_conversations(training, held_out)
    assert left.pairs == [one for one in training.pairs if int(one.prompt.split()[1]) not in tested]
    assert left.num_held_out == len(tested)
    assert left.notices() == (
        [f"{len(tested)} of 60 pairs of a share their prompt, or a dialogue's first user turn, with held-out pairs: "
         "taken out of training."]
        if tested
        else []
    )  # fmt: skip


def test_too_little_left_to_train_on_is_refused():
    training = LoadedPairs([pair(number, number) for number in range(30)], [], 30, "plain", "a.csv")
    few = replace(training, pairs=training.pairs[:5])
    other = LoadedPairs([PreferencePair("other", "good", "bad")], [], 1, "plain", "b.csv")
    assert exclude_held_out_conversations(few, other) == few  # few, but nothing was taken out
    with pytest.raises(DataError, match=r"11 of 30 pairs of a.csv .* Without them 19 prompts are left"):
        exclude_held_out_conversations(training, replace(training, pairs=training.pairs[:11], source="b.csv"))
