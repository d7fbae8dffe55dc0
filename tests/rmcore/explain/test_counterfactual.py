import difflib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmcore.core.errors import DataError, ModelError
from rmcore.data.pair import PreferencePair
from rmcore.explain.counterfactual import WITHOUT, changed_words, turn_preferences
from rmcore.explain.spans import spans_of, text_of
from rmcore.probes.rule import Answer, Rule
from rmcore.probes.rules import RULES
from text_scorer import TextScorer

PAIRS = [
    PreferencePair("How many is 2 + 2?", "It is 4. That is what it is. Good luck.", "I do not know. It could be 5."),
    PreferencePair("Name two fruits.", "Two fruits are apples and pears. They are sweet.", "Apples. What a question!"),
]
WEIGHTS = {"It": 0.5, "not": -1.25, "4.": 2.0, "5.": -0.25, "Great": 3.0, "apples": 1.5, "luck.": 0.75, "Apples.": 1.0}


def worth(text):
    return sum(WEIGHTS.get(word, 0.125) for word in text.split())


def every_edit(pair, elsewhere, seed):
    """(edited side, rule, text, margin) of each rule and each sentence, one by one."""
    for which, text in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        tried = [(rule.name, rule.apply(Answer(pair.prompt, text, elsewhere), seed=seed)) for rule in RULES.values()]
        spans = spans_of(text, "sentence", most=64)
        if len(spans) > 1:
            left = [set(range(len(spans))) - {place} for place in range(len(spans))]
            tried += [(WITHOUT, text_of(text, spans, kept)) for kept in left]
        for rule, edited in tried:
            if edited is not None:
                both = (edited, pair.rejected) if which == "chosen" else (pair.chosen, edited)
                yield which, rule, edited, worth(both[0]) - worth(both[1])


@pytest.mark.parametrize("seed", range(4))
def test_the_edit_is_the_smallest_that_turns_the_sign(seed):
    scorer, num_turned = TextScorer(worth), 0
    for place, (pair, found) in enumerate(zip(PAIRS, turn_preferences(scorer, PAIRS, seed=seed), strict=True)):
        before = worth(pair.chosen) - worth(pair.rejected)
        assert found.margin == pytest.approx(before)
        edits = list(every_edit(pair, PAIRS[1 - place].chosen, seed))
        turning = [one for one in edits if one[3] * before < 0]
        assert found.turned == bool(turning)
        assert found.num_tried == len({one[:1] + one[2:3] for one in edits})
        assert found.num_turning == len({one[:1] + one[2:3] for one in turning})
        num_turned += found.turned
        if not turning:
            continue
        sizes = {
            text: changed_words(pair.chosen if which == "chosen" else pair.rejected, text)
            for which, _, text, _ in edits
        }
        assert found.edit.num_words == min(sizes[one[2]] for one in turning)
        assert (found.edit.edited, found.edit.rule, found.edit.text) in [one[:3] for one in turning]
        assert found.edit.margin * before < 0
    assert num_turned > 0
    assert scorer.num_calls == 1


def test_where_nothing_turns_it_the_edit_that_goes_farthest_is_given():
    rules = [RULES[name] for name in ("flattery", "bold", "heading", "exclamation")]
    pair = PreferencePair(PAIRS[0].prompt, "It is 4.", "I do not know. It could be 5.")
    (found,) = turn_preferences(TextScorer(lambda text: 50.0 * ("4" in text) + worth(text)), [pair], rules=rules)
    assert (found.turned, found.num_turning) == (False, 0)
    margins = []
    for which, text in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        for edited in [
            *(rule.apply(Answer(pair.prompt, text), seed=0) for rule in rules),
            "I do not know.",
            "It could be 5.",
        ]:
            if edited is not None and (which == "rejected" or "4" in edited):
                both = (edited, pair.rejected) if which == "chosen" else (pair.chosen, edited)
                margins.append(50.0 + worth(both[0]) - worth(both[1]))
    assert found.edit.margin == pytest.approx(min(margins))
    assert 0 < found.edit.margin < found.margin


def test_a_margin_of_zero_and_an_edit_that_changes_nothing_turn_nothing():
    rules = [RULES["heading"]]
    pair = PreferencePair("Which?", "This.", "That.")
    (equal,) = turn_preferences(TextScorer(lambda text: 1.0), [pair], rules=rules)
    assert (equal.margin, equal.turned, equal.edit, equal.num_tried) == (0.0, False, None, 2)
    (fixed,) = turn_preferences(TextScorer(lambda text: float("This" in text)), [pair], rules=rules)
    assert (fixed.margin, fixed.turned, fixed.edit) == (1.0, False, None)


def test_of_edits_of_equally_many_words_the_one_that_leaves_the_margin_farther_is_given():
    pair = PreferencePair("Which?", "One. Two. Three.", "None.")
    scorer = TextScorer(
        lambda text: 1.0 if text == pair.chosen else {"One. Three.": -2.0}.get(text, 0.0) - 0.5 * ("One" in text)
    )
    (found,) = turn_preferences(scorer, [pair], rules=[])
    assert (found.edit.text, found.edit.num_words, found.num_turning) == ("One. Three.", 1, 2)


def test_edits_that_the_model_cannot_read_are_counted_and_a_users_failing_rule_is_said():
    def blocked(answer, rng):
        """Put in what cannot be read."""
        return "no" * 3

    scorer = TextScorer(worth)
    read = scorer.renderer.try_sides
    scorer.renderer.try_sides = lambda sides: [
        DataError("unreadable") if text == "nonono" else side
        for (_, text), side in zip(sides, read(sides), strict=True)
    ]
    (found,) = turn_preferences(scorer, PAIRS[:1], rules=[Rule("blocked", "lower", blocked, "")])
    assert found.num_unreadable == 2
    assert found.num_tried == len(list(spans_of(PAIRS[0].chosen, "sentence", most=9))) + 2

    def broken(answer, rng):
        raise ValueError("oh")

    with pytest.raises(DataError, match="oh"):
        turn_preferences(scorer, PAIRS[:1], rules=[Rule("broken", "lower", broken, "")])
    with pytest.raises(ModelError, match=f"pair {PAIRS[0].pair_id}"):
        turn_preferences(TextScorer(lambda text: float("nan")), PAIRS[:1])


WORDS = st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=9).map(" ".join)


@given(WORDS, WORDS)
def test_changed_words_are_a_distance(before, after):
    """None where the words are the same, the length against nothing, never less than the difference in length."""
    count = changed_words(before, after)
    first, second = before.split(), after.split()
    assert (count == 0) == (first == second)
    assert abs(len(first) - len(second)) <= count <= max(len(first), len(second))
    assert changed_words("", after) == len(second)
    kept = sum(
        block.size for block in difflib.SequenceMatcher(None, first, second, autojunk=False).get_matching_blocks()
    )
    assert count >= max(len(first), len(second)) - kept


def test_changed_words_counts_what_is_replaced_put_in_and_taken_away():
    assert changed_words("It is 4 now.", "It is not 5.") == 2
    assert changed_words("one two three", "one three") == 1
    assert changed_words("one  two", "one\ntwo") == 0
    words = [f"w{number}" for number in range(60)]
    assert changed_words(" ".join(words), " ".join(reversed(words))) > 30
