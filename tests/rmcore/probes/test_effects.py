"""What each sentence of an answer adds to its reward, and where sentences end."""

import copy
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from random_models import model_of
from rmcore.core.errors import ModelError
from rmcore.data.gold.words import FILLER
from rmcore.data.gold.world import gold_reward
from rmcore.data.pair import prompt_text
from rmcore.models.packing.layout import group_tokens
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.probes.effects import explain_mistakes, sentence_effects, sentences, without
from text_scorer import TextScorer

SENTENCES = ("Alpha is.", "Beta is.", "Gamma is.", "Delta is.", "Omega is.")
ANSWER = " ".join(SENTENCES)
PIECES = (
    *(
        "Dr. ",
        "e.g. ",
        "3.5 ",
        "It ends. ",
        "Does it? ",
        "no",
        " ",
        "\n",
        "\n\n",
        "- item\n",
        "1. ",
        "```\n",
        "x = 1.\n",
    ),
    *("你好。", "走吧", "U.S. ", "...", '"Yes!" ', "ok. ", "\t", "\u00a0", "\u0e2a\u0e27\u0e31"),
)
TEXTS = st.one_of(st.text(max_size=60), st.lists(st.sampled_from(PIECES), max_size=14).map("".join))


def test_an_effect_is_what_the_answer_loses_without_the_sentence():
    worths = dict(zip(SENTENCES, (1.0, -2.0, 0.5, 0.0, 3.0), strict=True))

    def worth(text):
        return sum(value for one, value in worths.items() if one in text) + 8.0 * ("Alpha" in text and "Beta" in text)

    scorer = TextScorer(worth)
    (found,) = sentence_effects(scorer, [("Which?", ANSWER)])
    assert [one.text for one in found] == list(SENTENCES)
    assert [one.effect for one in found] == [9.0, 6.0, 0.5, 0.0, 3.0]
    assert scorer.num_calls == 1


@pytest.mark.parametrize("answer", ["One only.", "   ", ""])
def test_an_answer_of_one_sentence_or_none_has_no_effects(answer):
    assert sentence_effects(TextScorer(lambda text: 2.0 + len(text)), [("Which?", answer)]) == [[]]


def test_what_the_limit_of_length_cuts_off_is_named_and_has_no_effect():
    scorer = TextScorer(lambda text: float(len(text.split())), max_seq_len=40)
    answer = " ".join(SENTENCES * 8)
    (found,) = sentence_effects(scorer, [("Which? " * 5, answer)])
    assert [one.effect is None for one in found] == [False] * (len(found) - 1) + [True]
    assert all(one.effect > 0 for one in found[:-1])
    assert "".join("".join(one.text for one in found).split()) == "".join(answer.split())


def sides_of(gold_pairs, count):
    longest = sorted(gold_pairs, key=lambda pair: -len(sentences(pair.chosen)))[:count]
    return [(pair.prompt, pair.chosen) for pair in longest]


@pytest.mark.parametrize("kind", ["tiny", "bert", "gpt2"])
def test_effects_are_those_of_texts_scored_one_by_one(kind, rm, gold_pairs):
    rm = rm if kind == "tiny" else model_of(kind)
    alone = BradleyTerryRM.of(copy.deepcopy(rm.model), rm.tokenizer, rm.renderer.rendering)
    alone.allow_packing = False
    assert rm.packing() is not None
    sides = sides_of(gold_pairs, 2)
    for (prompt, answer), found in zip(sides, sentence_effects(rm, sides), strict=True):
        total, spans = alone.score([prompt], [answer])[0], sentences(answer)
        for place, one in enumerate(found):
            left = alone.score([prompt], [without(answer, spans, place)])[0]
            assert one.effect == pytest.approx(total - left, abs=1e-5)


def test_all_texts_of_an_answer_share_the_prompt_in_packed_rows(rm, gold_pairs, monkeypatch):
    """The prompt is computed once a row, and a row holds as many texts as the budget allows."""
    rows = []
    laid_out = rm._rows_of
    monkeypatch.setattr(
        rm, "_rows_of", lambda sides, chunk, packing: rows.append((sides, chunk)) or laid_out(sides, chunk, packing)
    )
    ((prompt, answer),) = sides_of(gold_pairs, 1)
    (found,) = sentence_effects(rm, [(prompt, answer)])
    ((sides, chunk),) = rows
    assert len(sides) == len(found) + 1
    assert all(len(group) > 1 for group in chunk)
    prefix = len(rm.renderer.tokenize_sides([(prompt, "")])[0].ids) - 2
    tokens = sum(group_tokens([sides[at].ids for at in group], rm.packing()) for group in chunk)
    answers = sum(len(side.ids) - prefix for side in sides)
    assert tokens <= answers + len(chunk) * prefix
    assert len(chunk) <= 4


def test_a_reward_that_is_not_finite_is_refused_with_its_place():
    with pytest.raises(ModelError, match="text 1 of what answers are without a sentence"):
        sentence_effects(
            TextScorer(lambda text: math.nan if text.startswith("Alpha is. Gamma") else 1.0), [("?", ANSWER)]
        )


def test_the_gold_reward_is_taken_apart_into_what_it_pays_for(gold_pairs):
    """Sentences of the filler's bank, which the gold reward cuts out before it reads, are worth nothing in it."""
    pair = next(pair for pair in gold_pairs if sum(one in pair.chosen for one in FILLER) > 1)
    prompt = prompt_text(pair.prompt)
    (found,) = sentence_effects(TextScorer(lambda text: gold_reward(prompt, text)), [(prompt, pair.chosen)])
    fillers = [one.effect for one in found if one.text in FILLER]
    assert len(fillers) > 1
    assert fillers == pytest.approx([0.0] * len(fillers), abs=1e-6)
    assert max(one.effect for one in found) > 0


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
        expected = sentence_effects(rm, [(pair.prompt, pair.chosen), (pair.prompt, pair.rejected)])
        for side, effects in zip(("chosen", "rejected"), expected, strict=True):
            assert [part["text"] for part in one["effects"][side]] == [part.text for part in effects]
            assert [part["effect"] for part in one["effects"][side]] == pytest.approx(
                [part.effect for part in effects], abs=1e-5
            )


@given(TEXTS, st.integers(1, 9))
def test_sentences_tile_the_text_and_are_no_more_than_requested(text, most):
    spans = sentences(text, most)
    assert "".join(text[start:end] for start, end in spans) == text
    assert len(spans) <= most
    if text.strip():
        assert all(text[start:end].strip() for start, end in spans)


@given(TEXTS, st.data())
def test_what_is_left_is_there_in_order_and_nothing_else(text, data):
    spans = sentences(text)
    if len(spans) > 1:
        gone = data.draw(st.integers(0, len(spans) - 1))
        left = "".join(text[start:end] for place, (start, end) in enumerate(spans) if place != gone)
        assert "".join(without(text, spans, gone).split()) == "".join(left.split())


@given(st.lists(st.sampled_from(["One is.", "Two is!", "Is it three?", "Four."]), min_size=2, max_size=6), st.data())
def test_what_is_left_reads_on(parts, data):
    """One space between sentences, none at an end, and the paragraphs stay."""
    gone = data.draw(st.integers(0, len(parts) - 1))
    left = parts[:gone] + parts[gone + 1 :]
    for gap in (" ", "\n\n"):
        text = gap.join(parts)
        assert without(text, sentences(text), gone) == gap.join(left)


def test_the_wider_gap_stays():
    text = "One. Two.\n\nThree. Four."
    assert without(text, sentences(text), 1) == "One.\n\nThree. Four."
    assert without(text, sentences(text), 2) == "One. Two.\n\nFour."


@pytest.mark.parametrize(
    "parts",
    [
        ["Dr. Smith paid 3.5 dollars, e.g. to J. Doe. ", "He left! ", '"Really?" he asked. ', "Good."],
        ["U.S. law is old etc. ", "The end."],
        ["No. ", "It is no. 5 of them. ", "I met her at 5 p.m. ", "She left."],
        ["It is I. ", "so it is. ", "well... ", "yes"],
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
    text = "".join(parts)
    assert [text[start:end] for start, end in sentences(text)] == parts
