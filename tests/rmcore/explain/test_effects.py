import copy
import itertools
import math

import numpy as np
import pytest

from random_models import model_of
from rmcore.core.errors import DataError, ModelError
from rmcore.data.gold.words import FILLER
from rmcore.data.gold.world import gold_reward
from rmcore.data.pair import prompt_text
from rmcore.data.render_fn import RenderFn
from rmcore.data.rendering import Renderer, Rendering
from rmcore.explain.effects import span_effects
from rmcore.explain.spans import Span, spans_of, text_of
from rmcore.models.packing.layout import group_tokens
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.models.tiny import tiny_tokenizer
from text_scorer import TextScorer

SENTENCES = ("Alpha is.", "Beta is.", "Gamma is.", "Delta is.", "Omega is.")
ANSWER = " ".join(SENTENCES)


def game(*orders):
    """A reward with a random interaction for each set of so many sentences; and its dividends."""
    rng = np.random.default_rng(0)
    dividends = {
        members: float(rng.integers(-16, 17)) / 8  # exact in float32
        for order in orders
        for members in itertools.combinations(range(len(SENTENCES)), order)
    }

    def worth(text):
        there = {place for place, sentence in enumerate(SENTENCES) if sentence in text}
        return sum(value for members, value in dividends.items() if there.issuperset(members))

    return worth, dividends


def shapley(worth):
    """By the definition: the mean gain of each sentence over all orders in which they can come."""
    orders = list(itertools.permutations(range(len(SENTENCES))))
    spans = spans_of(ANSWER, "sentence", most=64)
    value = {
        kept: worth(text_of(ANSWER, spans, kept))
        for size in range(len(spans) + 1)
        for kept in itertools.combinations(range(len(spans)), size)
    }
    gains = np.zeros(len(SENTENCES))
    for order in orders:
        for place, own in enumerate(order):
            gains[own] += value[tuple(sorted(order[: place + 1]))] - value[tuple(sorted(order[:place]))]
    return gains / len(orders)


def test_effects_of_an_additive_reward_are_its_terms():
    worth, dividends = game(0, 1)
    scorer = TextScorer(worth)
    (found,) = span_effects(scorer, [("Which?", ANSWER)], "sentence")
    terms = [dividends[(place,)] for place in range(len(SENTENCES))]
    for name in ("removed", "alone", "share"):
        assert [getattr(one, name) for one in found.spans] == pytest.approx(terms)
    assert found.interaction == pytest.approx(0)
    assert found.base == dividends[()]
    assert found.total == pytest.approx(sum(dividends.values()))
    assert [ANSWER[one.start : one.end].strip() for one in found.spans] == list(SENTENCES)
    assert found.ranked()[0].share == max(terms)
    assert scorer.num_calls == 1


def test_shares_are_shapleys_value_where_spans_interact_in_pairs():
    worth, _ = game(0, 1, 2)
    (found,) = span_effects(TextScorer(worth), [("Which?", ANSWER)], "sentence")
    assert [one.share for one in found.spans] == pytest.approx(shapley(worth))
    assert found.interaction == pytest.approx(0, abs=1e-6)
    removed = [one.removed for one in found.spans]
    assert removed != pytest.approx([one.share for one in found.spans])  # the pairs matter in this game


def test_what_is_left_over_is_the_interactions_of_three_and_more():
    worth, dividends = game(0, 1, 2, 3, 4)
    (found,) = span_effects(TextScorer(worth), [("Which?", ANSWER)], "sentence")
    rest = sum((1 - len(members) / 2) * value for members, value in dividends.items() if len(members) > 2)
    assert abs(rest) > 0.5
    assert found.interaction == pytest.approx(rest)
    assert [one.share for one in found.spans] != pytest.approx(shapley(worth))


def test_by_word_a_part_is_taken_away_and_nothing_else():
    weights = {"Alpha": 1.0, "is.": 0.5, "Beta": -2.0}

    def worth(text):
        return sum(weights.get(word, 0.0) for word in text.split()) + math.prod(
            word in text for word in ("Gamma", "Delta")
        )

    (found,) = span_effects(TextScorer(worth), [("Which?", ANSWER)], "word")
    by_word = [(ANSWER[one.start : one.end].strip(), one.removed, one.alone, one.share) for one in found.spans]
    assert by_word[:3] == [("Alpha", 1.0, None, 1.0), ("is.", 0.5, None, 0.5), ("Beta", -2.0, None, -2.0)]
    assert [one[1] for one in by_word[4:8:2]] == [1.0, 1.0]
    assert found.interaction == pytest.approx(-1.0)  # the pair is counted twice


@pytest.mark.parametrize("answer", ["One only.", "   "])
def test_an_answer_of_one_part_is_all_of_its_reward(answer):
    (found,) = span_effects(TextScorer(lambda text: 2.0 + len(text)), [("Which?", answer)], "sentence")
    (only,) = found.spans
    assert only.removed == only.alone == only.share == found.total - found.base
    assert (only.start, only.end) == (0, len(answer))
    assert found.interaction == 0


def test_an_empty_answer_has_no_parts():
    (found,) = span_effects(TextScorer(lambda text: 2.0 + len(text)), [("Which?", "")], "sentence")
    assert found.spans == ()
    assert found.total == found.base == 2


@pytest.mark.parametrize("unit", ["sentence", "word"])
def test_parts_that_the_limit_of_length_cuts_off_are_named_and_have_no_effect(unit):
    scorer = TextScorer(lambda text: float(len(text.split())), max_seq_len=40)
    (found,) = span_effects(scorer, [("Which? " * 5, " ".join(SENTENCES * 8))], unit, most=200)
    assert found.num_cut > 0
    seen = [one.seen for one in found.spans]
    assert seen == sorted(seen, reverse=True)
    assert 0 < sum(seen) < len(seen)
    assert all(one.share == one.removed == 0 for one in found.spans if not one.seen)
    assert all(one.removed > 0 for one in found.spans if one.seen)
    assert [one.start for one in found.spans[1:]] == [one.end for one in found.spans[:-1]]
    assert found.spans[-1].end == len(" ".join(SENTENCES * 8))
    (as_read,) = span_effects(scorer, [("", "")], unit)
    visible = next(one.end for one in reversed(found.spans) if one.seen)
    assert as_read.total == 0
    assert found.total == len(" ".join(SENTENCES * 8)[:visible].split())


def test_a_full_stop_stands_for_an_answer_where_an_empty_one_cannot_be_read():
    def render(prompt, completion):
        if not completion:
            raise ValueError("an answer, please")
        return f"{prompt}\n\nResponse: {completion}"

    scorer = TextScorer(lambda text: float(len(text)))
    scorer.renderer = Renderer(tiny_tokenizer(), Rendering("custom", 64, "own:render"), RenderFn("own:render", render))
    (found,) = span_effects(scorer, [("Which?", "One only.")], "sentence")
    assert (found.empty, found.base, found.spans[0].removed) == (".", 1.0, 8.0)

    def refuse(prompt, completion):
        if len(completion) < 5:
            raise ValueError("more, please")
        return f"{prompt}\n\nResponse: {completion}"

    scorer.renderer = Renderer(tiny_tokenizer(), Rendering("custom", 64, "own:render"), RenderFn("own:render", refuse))
    with pytest.raises(DataError, match=r"reads neither an empty answer.*more, please.*short answers"):
        span_effects(scorer, [("Which?", "One only.")], "sentence")


def sides_of(gold_pairs, count):
    longest = sorted(gold_pairs, key=lambda pair: -len(spans_of(pair.chosen, "sentence", most=64)))[:count]
    return [(pair.prompt, pair.chosen) for pair in longest]


@pytest.mark.parametrize("kind", ["tiny", "bert", "gpt2"])
def test_effects_are_those_of_texts_scored_one_by_one(kind, rm, gold_pairs):
    rm = rm if kind == "tiny" else model_of(kind)
    alone = BradleyTerryRM(copy.deepcopy(rm.model), rm.tokenizer, rm.renderer.rendering)
    alone.allow_packing = False
    assert rm.packing() is not None
    sides = sides_of(gold_pairs, 2)
    for (prompt, answer), found in zip(sides, span_effects(rm, sides, "sentence"), strict=True):
        spans = [Span(one.start, one.end) for one in found.spans]
        total, base = alone.score([prompt], [answer])[0], alone.score([prompt], [""])[0]
        for place, one in enumerate(found.spans):
            without = alone.score([prompt], [text_of(answer, spans, set(range(len(spans))) - {place})])[0]
            only = alone.score([prompt], [text_of(answer, spans, {place})])[0]
            assert one.removed == pytest.approx(total - without, abs=1e-5)
            assert one.alone == pytest.approx(only - base, abs=1e-5)


def test_all_texts_of_an_answer_share_the_prompt_in_packed_rows(rm, gold_pairs, monkeypatch):
    """The prompt is computed once a row, and a row holds as many texts as the budget allows."""
    rows = []
    laid_out = rm._rows_of
    monkeypatch.setattr(
        rm, "_rows_of", lambda sides, chunk, packing: rows.append((sides, chunk)) or laid_out(sides, chunk, packing)
    )
    ((prompt, answer),) = sides_of(gold_pairs, 1)
    (found,) = span_effects(rm, [(prompt, answer)], "sentence")
    ((sides, chunk),) = rows
    assert len(sides) == 2 * len(found.spans) + 2
    assert all(len(group) > 1 for group in chunk)
    prefix = len(rm.renderer.tokenize_sides([(prompt, "")])[0].ids) - 2
    tokens = sum(group_tokens([sides[at].ids for at in group], rm.packing()) for group in chunk)
    answers = sum(len(side.ids) - prefix for side in sides)
    assert tokens <= answers + len(chunk) * prefix
    assert len(chunk) <= 4


def test_a_reward_that_is_not_finite_is_refused_with_its_place():
    with pytest.raises(ModelError, match="text 1 of what answers are without a part"):
        span_effects(
            TextScorer(lambda text: math.nan if text.startswith("Alpha is. Gamma") else 1.0),
            [("?", ANSWER)],
            "sentence",
        )


def test_the_gold_reward_is_taken_apart_into_what_it_pays_for(gold_pairs):
    """Sentences of the filler's bank, which the gold reward cuts out before it reads, are worth nothing in it."""
    pair = next(pair for pair in gold_pairs if sum(one in pair.chosen for one in FILLER) > 1)
    prompt = prompt_text(pair.prompt)
    (found,) = span_effects(TextScorer(lambda text: gold_reward(prompt, text)), [(prompt, pair.chosen)], "sentence")
    by_text = {pair.chosen[one.start : one.end].strip(): one.share for one in found.spans}
    fillers = [share for text, share in by_text.items() if text in FILLER]
    assert len(fillers) > 1
    assert fillers == pytest.approx([0.0] * len(fillers), abs=1e-6)
    assert max(by_text.values()) > 0
