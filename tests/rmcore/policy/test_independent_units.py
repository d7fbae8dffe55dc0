"""Which prompts of a policy count as one: near-copies and topics, against all couples compared one by one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rmcore.policy import independent_units as module
from rmcore.policy.independent_units import NEAR, independent_units


def test_equal_prompts_and_those_of_one_topic_are_one_unit():
    prompts = ["Sort 3, 1, 2", "sort  3, 1, 2", "Sort 3, 1, 4", "Why?", "And then?"]
    assert independent_units(prompts, [None] * 5) == [0, 0, 1, 2, 3]
    assert independent_units(prompts, ["a", None, "b", "b", "a"]) == [0, 0, 1, 1, 0]
    assert independent_units([*prompts, "Why?"], [*["a", None, "b", "b", None], "a"]) == [0, 0, 0, 0, 1, 0]
    assert independent_units([], []) == []


def test_a_template_of_all_prompts_makes_none_a_copy():
    template = "You are a careful assistant who reads the whole question before the answer is written down, so: {}"
    ends = [" ".join(f"w{place}x{number}" for number in range(14)) for place in range(40)]
    assert independent_units([template.format(end) for end in ends], [None] * 40) == list(range(40))


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sets(st.integers(0, 19), max_size=4)), max_size=9))
def test_units_are_those_of_all_couples(drawn):
    """Copies of two texts of twenty words, in which some words are others: one of them keeps a half of all fives."""
    prompts = [
        " ".join(f"new{number}x{at}" if at in changed else f"{text}{at}" for at in range(20))
        for number, (text, changed) in enumerate(drawn)
    ]
    grams = [module._grams(prompt) for prompt in prompts]
    unit = list(range(len(prompts)))
    for _ in prompts:
        for one in range(len(prompts)):
            for other in range(one):
                a, b = grams[one], grams[other]
                if len(a & b) >= NEAR * len(a | b):
                    unit[one] = unit[other] = min(unit[one], unit[other])
    assert independent_units(prompts, [None] * len(prompts)) == np.unique(unit, return_inverse=True)[1].tolist()
