"""The study: what its seeds share, what they do not, and what becomes of a known advantage."""

import numpy as np
import pytest

from rmcore.active.analysis import analyse
from rmcore.active.differences import CachedDifferences
from rmcore.active.efficiency import claims_of
from rmcore.active.labellers import HiddenLabels, NoisyLabels
from rmcore.active.study import draw_splits, label_counts, seed_record
from rmcore.config.active import ActiveConfig
from rmcore.config.data import GoldConfig
from rmcore.core.errors import ConfigError
from rmcore.data.gold.world import generate_pairs

PAIRS = generate_pairs(GoldConfig(num_prompts=120, pairs_per_prompt=2), 0).pairs
RNG = np.random.default_rng(0)
FEATURES = RNG.normal(size=(len(PAIRS), 6))
FEATURES *= np.sign(FEATURES @ RNG.normal(size=6))[:, None]  # a head that is always right exists
SMALL = ActiveConfig(
    num_seeds=2, noise=(0.0, 0.25), seed_pairs=8, validation_pairs=6, growth=2.0, targets=(0.5, 0.8), num_members=2
)


def record(config=SMALL, noise=0.0, seed=0):
    cache = CachedDifferences.of(PAIRS, FEATURES)
    return seed_record(PAIRS, cache, NoisyLabels(HiddenLabels(PAIRS), noise, seed=seed), config, seed=seed)


def test_parts_share_nothing_and_test_prompts_are_nowhere_else():
    splits = draw_splits(PAIRS, SMALL, seed=0)
    groups = [splits.test, splits.validation, splits.seed_set, splits.pool]
    ids = [pair.pair_id for group in groups for pair in group]
    assert len(set(ids)) == len(ids)
    assert [len(group) for group in groups] == [60, 6, 8, 148]
    tested = {pair.prompt_id for pair in splits.test}
    assert not tested & {pair.prompt_id for group in groups[1:] for pair in group}
    assert draw_splits(PAIRS, SMALL, seed=0) == splits
    assert draw_splits(PAIRS, SMALL, seed=1).test != splits.test


@pytest.mark.parametrize("growth", [1.05, 1.3, 2.0, 4.0])
@pytest.mark.parametrize("num_pool", [2, 10, 148, 3000])
def test_label_counts_rise_to_the_whole_pool(growth, num_pool):
    counts = label_counts(SMALL.model_copy(update={"growth": growth}), num_pool)
    assert (counts[0], counts[-1]) == (8, 8 + num_pool)
    assert (np.diff(counts) > 0).all()
    assert label_counts(SMALL.model_copy(update={"max_labels": 9}), num_pool)[-1] == 9


@pytest.mark.slow
def test_all_functions_start_and_end_alike_and_validation_labels_count():
    found = record()
    assert found["num_labels"][0] == 8 + 6
    assert found["num_labels"][-1] == 8 + 6 + 148
    starts = {values[0] for values in found["accuracy"].values()}
    ends = {values[-1] for values in found["accuracy"].values()} | {found["end"]}
    assert len(starts) == len(ends) == 1
    assert found["end"] > 0.9
    assert record() == found
    assert record(seed=1) != found
    assert record(noise=0.25)["accuracy"] != found["accuracy"]


@pytest.mark.slow
def test_the_analysis_of_a_study_has_every_curve_saving_and_verdict():
    records = {noise: [record(noise=noise, seed=seed) for seed in (0, 1)] for noise in SMALL.noise}
    found = analyse(records, SMALL)
    assert [level["noise"] for level in found["noise"]] == [0.0, 0.25]
    level = found["noise"][0]
    assert set(level["curves"]) == set(SMALL.acquisitions)
    assert {len(rows) for rows in level["curves"].values()} == {len(level["num_labels"])}
    assert set(level["savings"]) == set(SMALL.acquisitions) - {"random"}
    assert [claim["name"] for claim in found["claims"]] == [claim.name for claim in claims_of(SMALL)]
    assert {claim["verdict"] for claim in found["claims"]} == {"inconclusive"}  # two seeds claim nothing
    assert found["headline"].startswith("40% fewer labels: inconclusive for every acquisition function")


def made_up(cost, seed, counts=(100, 200, 400, 800, 1600)):
    """A seed in which bald needs `cost` times random's labels."""
    n, noise = np.array(counts, dtype=float), np.random.default_rng(seed).normal(size=(2, len(counts))) * 0.002

    def value(labels):
        return 0.8 - 2 / np.sqrt(labels)

    random, bald = value(n) + noise[0], value(n / cost) + noise[1]
    bald[0] = random[0]
    return {
        "num_labels": list(counts), "accuracy": {"random": random.tolist(), "bald": bald.tolist()},
        "end": value(1600.0), "num_pool": 1500, "num_test_pairs": 100, "num_test_prompts": 50,
    }  # fmt: skip


@pytest.mark.parametrize(("cost", "verdicts"), [(0.35, ["supported"] * 2), (0.8, ["refuted", "supported"])])
def test_a_known_advantage_is_judged_as_it_is(cost, verdicts):
    config = ActiveConfig(acquisitions=("random", "bald"), noise=(0.0,), num_seeds=12)
    found = analyse({0.0: [made_up(cost, seed) for seed in range(12)]}, config)
    assert [claim["verdict"] for claim in found["claims"]] == verdicts
    assert found["claims"][0]["saving"]["value"] == pytest.approx(1 - cost, abs=0.08)
    assert "bald" in found["headline"]


def test_too_few_pairs_are_refused_before_anything_runs():
    with pytest.raises(ConfigError, match="leave no pool"):
        draw_splits(PAIRS, SMALL.model_copy(update={"seed_pairs": 400}), seed=0)
    with pytest.raises(ValueError, match="add random"):
        ActiveConfig(acquisitions=("bald",))
    with pytest.raises(ValueError, match="none of the targets"):
        ActiveConfig(claimed_target=0.3)
    with pytest.raises(ValueError, match="repeats a value"):
        ActiveConfig(noise=(0.1, 0.1))
