"""What a set of observations holds, and where the likelihood of ties begins."""

import random

import pytest

from rmcore.data.observation import Observation
from rmcore.data.survey import Scale, better_weights, survey


def judged(at: int, *ranks: int, **more) -> Observation:
    return Observation(f"prompt {at}", tuple(f"answer {number}" for number in range(len(ranks))), ranks=ranks, **more)


def test_the_odds_of_a_tie_of_two_give_the_share_of_ties() -> None:
    """Davidson's nu of two equal answers: P(tie) = nu / (2 + nu)."""
    found = survey([judged(at, *((1, 1) if at < 31 else (1, 2))) for at in range(200)])
    nu = found.tie_odds[1]
    assert nu / (2 + nu) == pytest.approx(31 / 200, abs=0.003)
    assert len(found.tie_odds) == 2


def test_the_odds_of_equal_answers_are_those_that_drew_the_rankings() -> None:
    """Rankings of four equally good answers, drawn choice by choice with known widths."""
    rng, widths = random.Random(0), {1: 1.0, 2: 0.3, 3: 0.1, 4: 0.05}  # noqa: S311 - data
    made = []
    for at in range(4000):
        left, ranks, rank = [0, 1, 2, 3], [0] * 4, 1
        while left:
            sizes = range(1, len(left) + 1)
            sets = {1: [len(left)], 2: [6, 3, 1], 3: [4, 1], 4: [1]}
            number = [sets[size][4 - len(left)] if size > 1 else len(left) for size in sizes]
            weights = [widths[size] * count for size, count in zip(sizes, number, strict=True)]
            [size] = rng.choices(list(sizes), weights)
            for place in rng.sample(left, size):
                ranks[place] = rank
                left.remove(place)
            rank += 1
        made.append(judged(at, *ranks))
    found = survey(made)
    assert found.tie_odds == pytest.approx([1.0, 0.3, 0.1, 0.05], rel=0.12)


def test_without_ties_there_are_no_odds() -> None:
    assert survey([judged(0, 1, 2), judged(1, 2, 1, 3)]).tie_odds == (1.0,)
    assert survey([judged(0, 1, 2, 2, top_only=True)]).tie_odds == (1.0,)  # the others are not compared


def test_scales_are_told_by_their_values() -> None:
    assert Scale.of("a", {1.0: 5}) is None
    counts = ({0.0: 3, 1.0: 1}, {1.0: 1, 2.0: 2, 5.0: 1}, {0.1: 1, 0.25: 1, 3.0: 1})
    binary, ordinal, real = (Scale.of("a", one) for one in counts)
    assert [one.link for one in (binary, ordinal, real)] == ["binary", "ordinal", "real"]
    assert binary.shares == (0.75, 0.25)
    assert (ordinal.code(5.0), ordinal.code(4.0)) == (2.0, None)
    codes = [real.code(value) for value in (0.1, 0.25, 3.0)]
    assert sum(codes) == pytest.approx(0)
    assert sum(code * code for code in codes) / 3 == pytest.approx(1)


def test_what_is_counted_of_grades() -> None:
    graded = [
        Observation(f"p{at}", ("a", "b"), grades={"good": (float(at % 3), 1.0), "safe": (1.0, None)}, annotator="x")
        for at in range(6)
    ]
    found = survey([*graded, judged(9, 1, 1, 2, weight=2.0)])
    assert found.single_valued == ("safe",)
    assert found.annotators == {"x": 18}  # grades, of which each is a term
    assert found.num_weighted == 1


def test_what_better_means() -> None:
    assert better_weights(["coherence", "helpfulness", "verbosity"], None) == {"helpfulness": 1.0}
    assert better_weights(["a", "b"], None) == {"a": 0.5, "b": 0.5}
    assert better_weights(["a", "b"], {"a": 2.0, "b": 0.0, "c": 1.0}) == {"a": 2.0}
