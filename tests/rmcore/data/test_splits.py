"""Splitting: a prompt never crosses, its place depends on itself and the seed only, and no needed split is empty."""

from unicodedata import normalize

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmcore.core.errors import ConfigError, DataError
from rmcore.data.pair import Message, PreferencePair, is_blank, prompt_messages
from rmcore.data.splits import conversation, normalized_prompt, normalized_text, split_by_prompt
from rmcore.stages.samples import one_each

FRACTIONS = {"train": 0.75, "validation": 0.1, "test": 0.15}


def make_pairs(prompts):
    return [PreferencePair(prompt, f"a{i}", f"b{i}") for i, prompt in enumerate(prompts)]


def place_of(splits):
    return {normalized_prompt(pair.prompt): name for name, pairs in splits.items() for pair in pairs}


@settings(deadline=None)
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
@settings(deadline=None)
@given(st.integers(100, 300), st.permutations(range(100)), st.integers(0, 5))
def test_a_prompt_stays_where_it_is_when_pairs_are_added_or_reordered(num_more, order, seed):
    few = split_by_prompt(make_pairs([f"prompt {i}" for i in range(100)]), fractions=FRACTIONS, seed=seed)
    many = split_by_prompt(
        make_pairs([f"prompt {i}" for i in (*order, *range(100, num_more))]), fractions=FRACTIONS, seed=seed
    )
    assert place_of(few).items() <= place_of(many).items()


@settings(deadline=None)
@given(st.text(min_size=1).filter(lambda text: not is_blank(text)), st.integers(0, 1000))
def test_case_and_white_space_do_not_matter(text, seed):
    variants = [text, f"  {text}\n", text.replace(" ", " \t"), text.lower() if text.lower().upper() == text else text]
    others = [f"other {i}" for i in range(20)]
    splits = split_by_prompt(make_pairs([*variants, *others]), fractions={"train": 0.5, "test": 0.5}, seed=seed)
    homes = {name for name, pairs in splits.items() for pair in pairs if pair.prompt in variants}
    assert len(homes) == 1


@settings(deadline=None)
@given(
    st.text(min_size=1).filter(lambda text: not is_blank(text)),
    st.sampled_from(["\u200b", "\ufeff", "\u00ad", "\u2060", "\u200d", "\ufe0f", "\u034f", "\U000e0041", "\u202e"]),
    st.data(),
)
def test_normal_form_and_invisible_characters_do_not_matter(text, unseen, data):
    place = data.draw(st.integers(0, len(text)))
    variants = [text, text[:place] + unseen + text[place:], *(normalize(form, text) for form in ("NFC", "NFD"))]
    assert len(set(map(conversation, variants))) == 1


def dialogue(*turns):
    return tuple(Message(("user", "assistant")[place % 2], turn) for place, turn in enumerate(turns))


def num_turns_of_training_dialogues(splits):
    """Test pairs whose prompt a dialogue of training begins or continues with."""
    trained = [prompt_messages(pair.prompt) for pair in splits["train"]]
    beginnings = {prompt[: end + 1] for prompt in trained for end in range(len(prompt))}
    tested = [prompt_messages(pair.prompt) for pair in splits["test"]]
    return sum(
        prompt in beginnings or any(prompt[:end] in set(trained) for end in range(1, len(prompt))) for prompt in tested
    )


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
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
    assert num_turns_of_training_dialogues(splits) == 0
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


def test_a_share_of_zero_gives_an_empty_split():
    fractions = {"train": 0.5, "validation": 0.0, "test": 0.5}
    assert split_by_prompt(make_pairs("abcdef"), fractions=fractions, seed=0)["validation"] == []


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


@given(st.text(st.characters(max_codepoint=127)))
def test_ascii_text_is_normalized_as_its_words_in_small_letters(text):
    assert normalized_text(text) == " ".join(text.casefold().split())
