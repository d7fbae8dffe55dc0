"""Findings against the formulas written out, and how often they err where the truth is known."""

import numpy as np
import pytest

from capability_samples import sample_of
from rmcore.core.errors import DataError
from rmcore.data.pair import Message, PreferencePair, as_answer, as_json
from rmcore.probes.measure import (
    LEVEL,
    MAX_VIOLATIONS,
    SHIFT_TOLERANCE,
    Answers,
    judge,
    other_answers,
    probe,
    score_answers,
    score_edits,
    shortened,
)
from rmcore.probes.rules import RULES

sample = sample_of("probes")
drawn_answers, edits_of = sample.drawn_answers, sample.edits_of


def test_every_quantity_is_its_formula():
    rng = np.random.default_rng(0)
    answers = drawn_answers(rng, num_prompts=12)
    place = np.sort(rng.choice(len(answers.sides), 30, replace=False))
    gain = rng.normal(0.3, 0.5, size=len(place))
    found = judge(answers, [edits_of(answers, "invariant", gain, place)], num_resamples=200)
    squares, freedom = 0.0, 0
    for prompt in range(12):
        own = answers.rewards[answers.cluster == prompt]
        squares, freedom = squares + float(((own - own.mean()) ** 2).sum()), freedom + len(own) - 1
    spread = np.sqrt(squares / freedom)
    assert found.spread.value == pytest.approx(spread)
    [one] = found.findings
    assert one.shift.value == pytest.approx(gain.mean() / spread)
    assert one.violations is None
    assert one.num_answers == 30
    assert one.num_prompts == len(set(answers.cluster[place]))
    chosen = np.unique(answers.chosen)
    [fault] = judge(answers, [edits_of(answers, "lower", np.where(chosen % 3, -1.0, 0.0), chosen)]).findings
    assert fault.violations.value == pytest.approx(np.mean(chosen % 3 == 0))  # no lower is not lower


@pytest.mark.parametrize(
    ("expects", "gain", "verdict"),
    [
        ("invariant", 0.0, "holds"),
        ("invariant", 1.5, "violated"),
        ("invariant", -1.5, "violated"),
        ("not_higher", -1.5, "holds"),
        ("not_higher", 1.5, "violated"),
        ("lower", -1.5, "holds"),
        ("lower", 0.0, "violated"),
    ],
)
def test_large_effects_are_judged_by_what_was_expected(expects, gain, verdict):
    rng = np.random.default_rng(2)
    answers = drawn_answers(rng)
    place = np.unique(answers.chosen) if expects == "lower" else None
    noise = 0.05 * rng.normal(size=len(answers.sides) if place is None else len(place))
    [found] = judge(answers, [edits_of(answers, expects, gain + noise, place)]).findings
    assert found.verdict == verdict
    if verdict == "violated":
        gains = [one.edited_reward - one.reward for one in found.worst]
        assert len(gains) == 3
        assert sorted(gains, key=abs, reverse=True) == gains
        assert all(one < 0 for one in gains) if gain < 0 else all(one >= 0 for one in gains)


def test_few_prompts_show_nothing():
    answers = drawn_answers(np.random.default_rng(3), num_prompts=9)
    [found] = judge(answers, [edits_of(answers, "invariant", np.full(36, 9.0))]).findings
    assert (found.verdict, found.p) == ("unclear", None)
    [none] = judge(answers, [edits_of(answers, "invariant", np.zeros(0), np.zeros(0, dtype=np.int64))]).findings
    assert (none.verdict, none.shift.value, none.num_pairs) == ("not applied", None, 0)


def test_a_model_without_any_spread_is_judged_on_nothing():
    answers = drawn_answers(np.random.default_rng(4))
    flat = Answers(answers.sides, np.zeros(len(answers.sides)), answers.cluster, answers.chosen, answers.rejected)
    [found] = judge(flat, [edits_of(flat, "invariant", np.zeros(len(flat.sides)))]).findings
    assert (found.verdict, found.shift.reason) == ("unclear", "all rewards are equal")


@pytest.mark.slow
def test_at_the_border_rules_are_called_violated_as_rarely_as_promised():
    """Eight rules whose true shift, or share, is exactly what is tolerated, with errors that prompts share."""
    trials, num_prompts, wrong, covered = 150, 50, 0, []
    for trial in range(trials):
        rng = np.random.default_rng([5, trial])
        answers = drawn_answers(rng, num_prompts)
        chosen = np.unique(answers.chosen)
        edits = []
        for place in range(6):
            by_prompt = 0.5 * rng.normal(size=num_prompts)[answers.cluster] + 0.3 * rng.normal(size=len(answers.sides))
            sign = -1 if place == 5 else 1
            edits.append(
                edits_of(answers, "invariant" if place > 3 else "not_higher", sign * SHIFT_TOLERANCE + by_prompt)
            )
        for _ in range(2):
            chance = rng.beta(0.5, 1.5, size=num_prompts)  # with the mean 1/4
            fails = rng.random(len(chosen)) < chance[answers.cluster[chosen]]
            edits.append(edits_of(answers, "lower", np.where(fails, 1.0, -1.0), chosen))
        found = judge(answers, edits, seed=trial, num_resamples=1000)
        wrong += bool(found.violated)
        truths = [SHIFT_TOLERANCE] * 5 + [-SHIFT_TOLERANCE] + [MAX_VIOLATIONS] * 2
        covered += [
            one.decisive.ci_low <= truth <= one.decisive.ci_high
            for one, truth in zip(found.findings, truths, strict=True)
        ]
    assert wrong / trials <= LEVEL + 2.5 * np.sqrt(LEVEL * (1 - LEVEL) / trials)
    assert 0.92 <= np.mean(covered) <= 0.98


@pytest.mark.slow
def test_a_real_model_is_probed_on_prompts_of_one_turn_and_of_several(rm, gold_pairs):
    pairs = gold_pairs[:40]
    turns = (Message("user", "Hello."), Message("assistant", "Hello!"), Message("user", "Which one, please?"))
    pairs = [*pairs, PreferencePair(turns, "The first one is right.", "None of them."), pairs[0]]
    found = probe(rm, pairs, [RULES["padding"], RULES["off_topic"], RULES["item_order"]])
    padding, off_topic, item_order = found.findings
    assert found.num_pairs == 42
    assert padding.num_answers == len({(p.prompt, text) for p in pairs for text in (p.chosen, p.rejected)})
    assert off_topic.num_answers == len({(p.prompt, p.chosen) for p in pairs})
    assert item_order.verdict == "not applied"
    assert padding.num_prompts == found.num_prompts == len({pair.prompt_id for pair in pairs})
    again = probe(rm, pairs, [RULES["padding"], RULES["off_topic"], RULES["item_order"]])
    assert again == found
    example = padding.worst[0]
    rewards = rm.score([example.prompt] * 2, [example.original, example.edited])
    assert rewards == pytest.approx([example.reward, example.edited_reward], abs=1e-5)


def test_an_edit_that_the_limit_cuts_away_is_not_counted(rm, gold_pairs):
    long = PreferencePair("Say something long, please.", "word " * 300, "other " * 300)
    answers, tokens = score_answers(rm, [*gold_pairs[:4], long])
    behind, before = (score_edits(rm, answers, tokens, RULES[name]) for name in ("authority", "flattery"))
    assert (behind.num_unseen, before.num_unseen) == (2, 0)
    assert len(behind.place) == len(before.place) - 2 == len(answers.sides) - 2


def test_answers_that_cannot_be_read_take_their_pairs_along(rm, gold_pairs):
    """Turns that the template refuses, as a real one does that knows users and assistants only."""
    rm.tokenizer.chat_template = (
        "{%- for m in messages -%}{%- if m.role not in ('user', 'assistant') -%}{{ raise_exception('no such role') }}"
        "{%- endif -%}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{%- endfor -%}"
    )
    broken = PreferencePair((Message("narrator", "Once."), Message("user", "And?")), "then", "fine")
    answers, _ = score_answers(rm, [*gold_pairs[:3], broken])
    assert (len(answers.chosen), answers.num_unreadable) == (3, 2)
    with pytest.raises(DataError, match="none of the 1 pairs can be read"):
        score_answers(rm, [broken])
    call = Message("assistant", "", as_json({"tool_calls": [{"function": {"name": "weather", "arguments": {}}}]}))
    with pytest.raises(DataError, match="all 1 pairs are more than texts"):
        score_answers(rm, [PreferencePair("Is it warm?", as_answer(call), "Yes.")])


def test_an_answer_from_elsewhere_is_a_chosen_one_of_another_prompt():
    answers = drawn_answers(np.random.default_rng(6), num_prompts=5)
    taken = other_answers(answers)
    place = {text: at for at, (_, text) in enumerate(answers.sides)}
    for at, text in enumerate(taken):
        assert answers.cluster[place[text]] != answers.cluster[at]
        assert place[text] in answers.chosen
    assert len(set(taken)) == 5
    assert other_answers(drawn_answers(np.random.default_rng(6), num_prompts=1)) == [None] * 4


def test_long_texts_keep_both_ends():
    text = "".join(map(str, range(300)))
    short = shortened(text, 100)
    assert len(short) <= 100
    assert text.startswith(short[:40])
    assert text.endswith(short[-40:])
    assert shortened("short", 100) == "short"
