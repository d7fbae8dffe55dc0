"""What each sentence of an answer adds to its reward, and where sentences end."""

import copy
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from random_models import model_of
from rmcore.core.errors import ModelError
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.probes.effects import explain_mistakes, sentence_effects, sentences, without
from text_scorer import TextScorer

SENTENCES = ("Alpha is.", "Beta is.", "Gamma is.", "Delta is.", "Omega is.")
ANSWER = " ".join(SENTENCES)
PIECES = (
    *("Dr. ", "e.g. ", "3.5 ", "It ends. ", "Does it? ", "no", " ", "\n", "\n\n", "- item\n", "1. ", "```\n"),
    *("x = 1.\n", "你好。", "走吧", "U.S. ", "...", '"Yes!" ', "ok. ", "\t", "\u00a0", "\u0e2a\u0e27\u0e31"),
)
TEXTS = st.one_of(st.text(max_size=60), st.lists(st.sampled_from(PIECES), max_size=14).map("".join))


def test_an_effect_is_what_the_answer_loses_without_the_sentence():
    worths = dict(zip(SENTENCES, (1.0, -2.0, 0.5, 0.0, 3.0), strict=True))

    def worth(text):
        return sum(value for one, value in worths.items() if one in text) + 8.0 * ("Alpha" in text and "Beta" in text)

    scorer = TextScorer(worth)
    found, *others = sentence_effects(scorer, [("Which?", ANSWER), ("?", "One only."), ("?", "   "), ("?", "")])
    assert [one["text"] for one in found] == list(SENTENCES)
    assert [one["effect"] for one in found] == [9.0, 6.0, 0.5, 0.0, 3.0]
    assert others == [[], [], []]
    assert scorer.num_calls == 1


def test_what_the_limit_of_length_cuts_off_is_named_and_has_no_effect():
    scorer = TextScorer(lambda text: float(len(text.split())), max_seq_len=40)
    (found,) = sentence_effects(scorer, [("Which?", " ".join(SENTENCES * 8))])
    are_read = [one["effect"] is not None for one in found]
    assert any(are_read)
    assert are_read == sorted(are_read, reverse=True)
    assert not are_read[-1]
    assert [one["text"] for one in found] == list(SENTENCES * 8)


@pytest.mark.parametrize("kind", ["tiny", "bert", "gpt2"])
def test_effects_are_those_of_texts_scored_one_by_one(kind, rm, gold_pairs):
    rm = rm if kind == "tiny" else model_of(kind)
    alone = BradleyTerryRM.of(copy.deepcopy(rm.model), rm.tokenizer, rm.renderer.rendering)
    alone.allow_packing = False
    assert rm.packing() is not None
    longest = sorted(gold_pairs, key=lambda pair: -len(sentences(pair.chosen)))[:2]
    sides = [(pair.prompt, pair.chosen) for pair in longest]
    for (prompt, answer), found in zip(sides, sentence_effects(rm, sides), strict=True):
        total, parts = alone.score([prompt], [answer])[0], sentences(answer)
        assert len(found) == len(parts) > 1
        for place, one in enumerate(found):
            left = alone.score([prompt], [without(parts, place)])[0]
            assert one["effect"] == pytest.approx(total - left, abs=1e-5)


def test_a_reward_that_is_not_finite_is_refused_with_its_place():
    scorer = TextScorer(lambda text: math.nan if text.startswith("Alpha is. Gamma") else 1.0)
    with pytest.raises(ModelError, match="text 2 of 1 answers and what each is without a sentence"):
        sentence_effects(scorer, [("?", ANSWER)])


def test_the_mistakes_with_the_largest_wrong_margins_are_explained(rm, gold_pairs):
    rewards = rm.score_pairs(gold_pairs)
    margins = sorted(rewards[:, 0] - rewards[:, 1])
    right = [pair for pair, (chosen, rejected) in zip(gold_pairs, rewards, strict=True) if chosen > rejected]
    assert explain_mistakes(rm, right) == []
    found = explain_mistakes(rm, gold_pairs, most=3)
    assert [one["margin"] for one in found] == pytest.approx(margins[:3], abs=1e-5)
    pairs = {pair.pair_id: pair for pair in gold_pairs}
    for one in found:
        pair = pairs[one["pair_id"]]
        assert (one["chosen"], one["rejected"]) == (pair.chosen, pair.rejected)
        for side in ("chosen", "rejected"):
            [expected] = sentence_effects(rm, [(pair.prompt, one[side])])
            assert [part["text"] for part in one["effects"][side]] == [part["text"] for part in expected]
            measured = [part["effect"] for part in one["effects"][side]]
            assert measured == pytest.approx([part["effect"] for part in expected], abs=1e-5)


@given(TEXTS, st.integers(1, 9), st.data())
def test_sentences_tile_the_text_and_all_but_one_are_there_in_order(text, most, data):
    parts = sentences(text, most)
    assert "".join(parts) == text
    assert len(parts) <= most
    assert all(part.strip() for part in parts) or not text.strip()
    if len(parts) > 1:
        gone = data.draw(st.integers(0, len(parts) - 1))
        left = "".join(part for place, part in enumerate(parts) if place != gone)
        assert "".join(without(parts, gone).split()) == "".join(left.split())


@given(st.lists(st.sampled_from(["One is.", "Two is!", "Is it three?", "Four."]), min_size=2, max_size=6), st.data())
def test_what_is_left_reads_on(parts, data):
    """One space between sentences, none at an end, and the paragraphs stay."""
    gone = data.draw(st.integers(0, len(parts) - 1))
    left = parts[:gone] + parts[gone + 1 :]
    for gap in (" ", "\n\n"):
        assert without(sentences(gap.join(parts)), gone) == gap.join(left)
    apart = sentences("One. Two.\n\nThree. Four.")
    assert [without(apart, place) for place in (1, 2)] == ["One.\n\nThree. Four.", "One. Two.\n\nFour."]


@pytest.mark.parametrize(
    "parts",
    [
        ["Dr. Smith paid 3.5 dollars, e.g. to J. Doe. ", "He left! ", '"Really?" he asked. ', "Good."],
        ["U.S. law is old. ", "It is I. ", "so it is. ", "well... ", "yes"],
        ["Steps:\n", "1. Do this. ", "Then that.\n", "2. Rest\n", "   - inner\n\n", "a wrapped\nline. ", "End."],
        ["See:\n\n", "```py\nx = 1. \n\nprint(x). \n```\n", "After."],
        ["See:\n", "```\nx = 1. \nIt breaks off. "],
        ["你好。", "今天天气很好！", "「走吧。」", "好"],
        ["यह है। ", "वह था।"],
        ["هل هذا؟ ", "نعم."],
        ["  Led in. ", "By space.  "],
        [" \n "],
        [],
    ],
)
def test_sentences(parts):
    assert sentences("".join(parts)) == parts
