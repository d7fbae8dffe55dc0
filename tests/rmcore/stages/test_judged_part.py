"""The judged samples of a file, next to those without a judgement: whether they are as long, and what is chosen."""

import numpy as np
import pandas as pd
import pytest

from rmcore.stages.overoptimization import judged_part, length_of_judged


def sampled(rng, num_prompts=60, num_samples=16, rise=0.0):
    """Samples whose lengths rise with their number, and a reward that likes length a little."""
    number = np.tile(np.arange(num_samples), num_prompts)
    lengths = (120 + rise * number + 30 * rng.normal(size=len(number))).clip(1).astype(int)
    return pd.DataFrame(
        {
            **{"prompt_id": np.repeat(np.arange(num_prompts), num_samples), "number": number},
            **{"response": ["x" * length for length in lengths]},
            "reward": lengths / 30 + rng.normal(size=len(number)),
        }
    ).assign(unit=lambda rows: rows["prompt_id"])


def unscored(rows):
    raise AssertionError("a part that is as long as all needs no reward of the others")


def test_shorter_judged_samples_are_said_with_how_often_another_one_is_preferred():
    rows = sampled(np.random.default_rng(0), rise=5.0)
    judged, unjudged = rows[rows["number"] < 11], rows[rows["number"] >= 11]
    [said], number = judged_part(judged, unjudged.drop(columns="reward"), lambda some: unjudged.reset_index(drop=True))
    best = rows.loc[rows.groupby("prompt_id")["reward"].idxmax()]
    assert number == (best["number"] >= 11).sum() > 20

    assert said.startswith(
        f"the judged samples are shorter than all: {judged['response'].str.len().mean():,.0f} characters against "
    )
    assert f"on {number} of 60 prompts the reward model prefers a sample without a judgement" in said


@pytest.mark.parametrize("copies", [1, 4])
def test_samples_that_were_judged_by_chance_are_hardly_ever_called_a_biased_part(copies):
    """Also where prompts come in copies, whose samples share what length they have in their judged part."""
    rng, found = np.random.default_rng(copies), []
    for _ in range(150):
        rows = sampled(rng, num_prompts=60 // copies).assign(judged=lambda one: rng.permuted(one["number"] % 16 < 11))
        rows = pd.concat([rows.assign(prompt_id=rows["prompt_id"] + 1000 * place) for place in range(copies)])
        apart = length_of_judged(rows[rows["judged"]], rows[~rows["judged"]])
        found.append(apart.ci_low <= 0 <= apart.ci_high)
        if found[-1]:
            said, number = judged_part(rows[rows["judged"]], rows[~rows["judged"]], unscored)
            assert number == 0
            assert "not shown to differ" in said[0]
    assert np.mean(found) >= 0.95 - 2 * (0.05 * 0.95 / 150) ** 0.5


def test_where_all_are_judged_there_is_nothing_to_compare():
    rows = sampled(np.random.default_rng(1))
    assert length_of_judged(rows, rows.iloc[:0]).value is None
    assert judged_part(rows, rows.iloc[:0], unscored) == ([], 0)
