"""What labels say against one another, on files in which that is known."""

import numpy as np

from rmcore.data.pair import PreferencePair
from rmcore.noise.contradictions import contradicted, couples, in_cycles, near_copies, repeated

LONG = "Please explain in simple words how the tides of the sea follow the moon and why there are two of them a day"


def pairs_of(*rows):
    return [PreferencePair(*row) for row in rows]


def test_both_orders_contradict_whatever_the_case_and_another_prompt_does_not():
    pairs = pairs_of(
        ("p", "good", "bad"), ("p", "Bad ", "good"), ("q", "bad", "good"), ("p", "good", "other"), ("p", "good", "bad")
    )
    texts = couples(pairs)
    assert contradicted(texts).tolist() == [True, True, False, False, True]
    assert repeated(texts).tolist() == [True, False, False, False, True]


def test_circles_are_found_within_a_prompt_and_an_order_is_none():
    circle = [("p", "a", "b"), ("p", "b", "c"), ("p", "c", "a"), ("p", "a", "d")]
    order = [("q", "a", "b"), ("q", "b", "c"), ("q", "a", "c")]
    two = [("r", "a", "b"), ("r", "b", "a")]
    across = [("s", "a", "b"), ("s", "b", "c"), ("t", "c", "a")]
    found = in_cycles(couples(pairs_of(*circle, *order, *two, *across)))
    assert found.tolist() == [True, True, True, False] + [False] * 8


def test_a_near_copy_counts_across_folds_alone():
    pairs = pairs_of(
        (f"{LONG}?", "a", "b"), (f"{LONG}, then?", "c", "d"), (f"{LONG} now?", "e", "f"), ("What is red?", "a", "b")
    )
    assert near_copies(pairs, np.array([0, 1, 1, 0])).tolist() == [True, True, True, False]
    assert near_copies(pairs, np.array([0, 0, 0, 1])).tolist() == [False] * 4
