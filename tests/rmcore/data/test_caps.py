"""A cap on the pairs of one prompt keeps the first ones and counts the rest."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rmcore.config import DataConfig
from rmcore.data.pair import PreferencePair
from rmcore.data.sources import LoadedPairs, cap_prompts
from rmcore.data.table import write_pairs
from rmcore.stages.prepare import load_splits


def pair(prompt, number):
    return PreferencePair(f"prompt {prompt}", f"good {number}", f"bad {number}")


@given(st.lists(st.integers(0, 4), max_size=30), st.integers(1, 5))
def test_each_prompt_keeps_its_first_pairs_in_order(prompts, most):
    pairs = [pair(prompt, number) for number, prompt in enumerate(prompts)]
    capped = cap_prompts(LoadedPairs(pairs, [], len(pairs), "plain", "x"), most)
    counts = Counter(one.prompt for one in pairs)
    assert Counter(one.prompt for one in capped.pairs) == {name: min(most, count) for name, count in counts.items()}
    assert capped.pairs == [one for one in pairs if one in capped.pairs]
    assert capped.num_over_cap == len(pairs) - len(capped.pairs)
    for prompt in counts:
        own = [one for one in pairs if one.prompt == prompt]
        assert [one for one in capped.pairs if one.prompt == prompt] == own[:most]


@pytest.mark.parametrize(("caps", "expected"), [((None, None), (40, 40)), ((2, None), (20, 40)), ((None, 1), (40, 10))])
def test_both_sources_have_their_own_cap(tmp_path: Path, caps, expected):
    pairs = [pair(number % 10, number) for number in range(40)]
    held_out = [PreferencePair(f"other {number % 10}", f"good {number}", "bad") for number in range(40)]
    write_pairs(pairs, tmp_path / "a.parquet")
    write_pairs(held_out, tmp_path / "b.parquet")
    config = DataConfig(
        source=str(tmp_path / "a.parquet"),
        eval_source=str(tmp_path / "b.parquet"),
        pairs_per_prompt=caps[0],
        eval_pairs_per_prompt=caps[1],
    )
    splits, _ = load_splits(config, seed=0)
    assert (len(splits["train"]) + len(splits["validation"]), len(splits["test"])) == expected
