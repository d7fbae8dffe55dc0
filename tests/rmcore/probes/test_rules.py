"""Rules are pure functions that say where they do not apply, and change what they say they change."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rmcore.core.errors import ConfigError, DataError
from rmcore.data.pair import Message, is_blank
from rmcore.probes.rule import Answer, Rule, load_rule
from rmcore.probes.rules import RULES, find_rules

PROSE = (
    "The city of Paris is in France. It has 2 airports, and Berlin has 1. "
    "Is it large? Yes, about 2,100,000 people live there."
)
QUESTION = "What can you tell me about the capital of France?"
LIST = "Some fruits:\n- apple\n- pear\n- plum\nThat is all."
CODE = "Use this. It works.\n```python\nx = 1\n```\nIt has 2 lines. Done."
TEXTS = st.one_of(st.text(max_size=80), st.sampled_from([PROSE, LIST, CODE, "1. one\n2. two", "**a** b. c"]))


def apply(name, text, prompt=QUESTION, elsewhere="Bananas are yellow.", seed=0):
    return RULES[name].apply(Answer(prompt, text, elsewhere), seed=seed)


def words(text):
    return re.findall(r"\w+", text)


@pytest.mark.slow
@given(
    name=st.sampled_from(list(RULES)),
    text=TEXTS,
    question=st.one_of(st.text(max_size=40), st.just(QUESTION)),
    seed=st.integers(0, 3),
)
@settings(max_examples=300)
def test_any_text_is_edited_alike_each_time_or_left_out(name, text, question, seed):
    """Whatever the text and in whatever form the prompt is: the question is the last turn."""
    turns = (Message("user", "hello"), Message("assistant", "hello to you"), Message("user", question))
    for prompt in (question, turns):
        answer = Answer(prompt, text, "another answer")
        edited = RULES[name].apply(answer, seed=seed)
        assert edited == RULES[name].apply(answer, seed=seed)
        assert edited is None or (edited != text and not is_blank(edited))


@pytest.mark.parametrize("name", RULES)
def test_each_rule_applies_to_some_plain_text(name):
    assert apply(name, LIST if name == "item_order" else PROSE) is not None
    assert RULES[name].meaning.endswith(".")


@given(TEXTS)
def test_changed_manner_leaves_every_word_in_its_place(text):
    for name in ("whitespace", "bullets", "bold", "exclamation"):
        edited = apply(name, text)
        assert edited is None or words(edited) == words(text)
    for name in ("heading", "opening", "flattery"):
        edited = apply(name, text)
        assert edited is None or edited.endswith(text)
    for name in ("authority", "padding", "injection", "control_text", "repeated"):
        edited = apply(name, text)
        assert edited is None or edited.startswith(text.rstrip())  # of a blank one, nothing can be seen
    edited = apply("item_order", text)
    assert edited is None or sorted(edited.split("\n")) == sorted(text.split("\n"))


def test_code_and_lists_are_left_alone():
    for name in ("whitespace", "bullets", "bold", "exclamation", "citations", "wrong_number"):
        assert apply(name, CODE) is None
    assert apply("bullets", LIST) is None
    assert apply("item_order", PROSE) is None
    assert apply("item_order", LIST) == "Some fruits:\n- plum\n- pear\n- apple\nThat is all."


@pytest.mark.parametrize("seed", range(20))
def test_a_wrong_number_is_another_one_and_list_markers_stay(seed):
    text = "1. There are 12 eggs, not 3,500.\n2) Twice 12 is 24."
    edited = apply("wrong_number", text, seed=seed)
    assert re.sub(r"(?<!,)\b\d+(?![,)\d]|[.] )", "N", edited) == re.sub(r"(?<!,)\b\d+(?![,)\d]|[.] )", "N", text)
    pairs = zip(re.findall(r"\d+", text), re.findall(r"\d+", edited), strict=True)
    changed = {old: new for old, new in pairs if old != new}
    assert len(changed) == 1
    assert set(changed) <= {"12", "24"}


def test_names_change_places_everywhere():
    text = "We saw that Alice met Bob. Then it was Bob who paid for Alice."
    assert apply("swapped_names", text) == "We saw that Bob met Alice. Then it was Alice who paid for Bob."
    assert apply("swapped_names", "We saw Alice. Bob came.") is None  # what begins a sentence may be no name


def test_faults_are_silent_where_they_might_be_none():
    assert apply("refusal", PROSE, prompt="How can I build a bomb?") is None
    assert apply("refusal", "I'm sorry, I can't help.", prompt=QUESTION) is None
    assert apply("refusal", PROSE, prompt="Wie heißt die Hauptstadt?") is None
    assert apply("other_language", PROSE, prompt="Translate this to German, will you?") is None
    assert apply("off_topic", PROSE, elsewhere=None) is None
    assert apply("truncated", "Too short to break off.") is None
    assert apply("echo", f"You asked: {QUESTION}") is None
    turns = (Message("user", "How can I build a bomb?"), Message("assistant", "No."), Message("user", QUESTION))
    assert apply("refusal", PROSE, prompt=turns) is not None
    assert apply("echo", PROSE, prompt=turns) == QUESTION


def test_truncated_keeps_two_fifths_of_the_words():
    edited = apply("truncated", PROSE)
    assert PROSE.startswith(edited)
    assert len(edited.split()) == 2 * len(PROSE.split()) // 5 + 1


def test_control_text_stays_text(rm):
    """The strings of control tokens in an edit give none of their tokens."""
    edited = apply("control_text", "Fine.")
    plain, marked = (rm.renderer.tokenize_sides([(QUESTION, text)])[0].ids for text in ("Fine.", edited))
    ends = rm.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>"])
    assert [sum(one in ends for one in ids) for ids in (plain, marked)] == [4, 4]


def test_rules_are_found_by_name_and_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_rules_of_a_test.py").write_text(
        "from rmcore.probes.rule import lower\n"
        "@lower\ndef shorter(answer, rng):\n    '''Half of it.'''\n    return answer.text[: len(answer.text) // 2]\n"
        "def undecided(answer, rng):\n    return None\n"
        "@lower\ndef broken(answer, rng):\n    return 1 / 0\n"
        "@lower\ndef no_text(answer, rng):\n    return 5\n"
    )
    assert find_rules([]) == list(RULES.values())
    assert len(RULES) >= 15
    named, own = find_rules(["padding", "own_rules_of_a_test:shorter"])
    assert named is RULES["padding"]
    assert isinstance(own, Rule)
    assert (own.name, own.expects, own.meaning) == ("own_rules_of_a_test:shorter", "lower", "Half of it.")
    assert own.apply(Answer("p", "abcd"), seed=0) == "ab"
    with pytest.raises(ConfigError, match="there is no rule 'shout'; name one of whitespace"):
        find_rules(["shout"])
    with pytest.raises(ConfigError, match="named twice"):
        find_rules(["padding", "padding"])
    with pytest.raises(ConfigError, match="says not what it expects; decorate it with @invariant"):
        load_rule("own_rules_of_a_test:undecided")
    with pytest.raises(DataError, match=r"broken failed with ZeroDivisionError"):
        load_rule("own_rules_of_a_test:broken").apply(Answer("p", "abcd"), seed=0)
    with pytest.raises(DataError, match=r"no_text returned int for the answer 'abcd'"):
        load_rule("own_rules_of_a_test:no_text").apply(Answer("p", "abcd"), seed=0)


def test_the_seed_draws_the_edit():
    drawn = {apply("padding", PROSE, seed=seed) for seed in range(10)}
    assert len(drawn) > 3
