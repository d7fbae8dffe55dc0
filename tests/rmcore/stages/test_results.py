"""The next step of a finished run is planned over all runs of the home on its held-out prompts."""

import shlex

import numpy as np
import pandas as pd
import pytest

import report_sample
from experiments.presets import PRESETS
from flows.settings import load_config
from rmcore.stages.results import planned_step

OWN = PRESETS["minilm"].model_copy(
    update={"data": PRESETS["minilm"].data.model_copy(update={"source": "pairs.csv", "pairs_per_prompt": 1})}
)
PROMPTS = 120


@pytest.fixture
def ended(tmp_path):
    """A run that ordered the first `right` of its held-out pairs as labelled, as its record says it."""

    def record(minute, right, *, config=OWN, is_gone=False):
        folder = tmp_path / str(minute)
        if not is_gone:
            folder.mkdir()
            number = np.arange(PROMPTS)
            pd.DataFrame(
                {
                    "pair_id": [f"pair{one}" for one in number],
                    "prompt_id": [f"prompt{one}" for one in number],
                    "reward_chosen": np.where(number < right, 1.0, -1.0),
                    "reward_rejected": 0.0,
                    "chosen_chars": 100,
                    "rejected_chars": 101,
                    "subset": "",
                    "split": "test",
                }
            ).to_parquet(folder / "rewards.parquet")
        half, found = 0.05, report_sample.results()
        accuracy = {"value": right / PROMPTS, "ci_low": right / PROMPTS - half, "ci_high": right / PROMPTS + half}
        found["training"] |= {
            "max_positions": 512,
            "truncation": {"test": {"num_pairs": PROMPTS, "num_cut_sides": PROMPTS}},
        }
        return found | {
            "created": f"2026-11-29T10:{minute:02}:00+00:00",
            "verdict": {"rung": 1, "evidence": "labelled pairs", "status": "unclear", "headline": "", "reasons": []},
            "config": config.model_dump(mode="json"),
            "diagnoses": [],
            "stages": [{"name": "evaluate", "path": str(folder)}],
            "metrics": found["metrics"] | {"pairwise_accuracy": accuracy | {"num": PROMPTS, "reason": None}},
            "audit": {"sources": [{"num_over_cap": 990}]},
        }

    return record


def test_it_starts_from_the_best_run_and_says_by_how_much_it_is_better(ended):
    earlier = {"mine-seed0-aaaa00000000": ended(1, 60), "mine-seed0-bbbb00000000": ended(2, 90)}
    more = planned_step("mine-seed0-cccc00000000", ended(3, 70), earlier)
    assert shlex.split(more["command"])[3] == "mine-seed0-bbbb"
    assert "3 runs" in more["so_far"]
    assert "than mine-seed0-aaaa, the first: +25.0" in more["so_far"]


def test_a_run_on_other_prompts_and_one_that_is_no_run_of_the_pipeline_do_not_count(ended):
    other = OWN.model_copy(update={"data": OWN.data.model_copy(update={"test_fraction": 0.3})})
    earlier = {"mine-seed0-aaaa00000000": ended(1, 110, config=other), "mine-seed0-bbbb00000000": {"config": {}}}
    more = planned_step("mine-seed0-cccc00000000", ended(3, 70), earlier)
    assert shlex.split(more["command"])[3] == "mine-seed0-cccc"
    assert "so_far" not in more


def test_a_recipe_whose_rewards_are_gone_was_run_all_the_same(ended):
    first = ended(2, 70)
    more = planned_step("mine-seed0-cccc00000000", first, {})
    changes = [word for word in shlex.split(more["command"]) if "=" in word]
    gone = ended(1, 119, config=load_config(None, None, changes, OWN), is_gone=True)
    after = planned_step("mine-seed0-cccc00000000", first, {"mine-seed0-aaaa00000000": gone})
    assert shlex.split(after["command"])[3] == "mine-seed0-cccc"
    assert after["command"] != more["command"]
