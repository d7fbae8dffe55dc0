"""One seed of the study: the same pool, seed set and test pairs for every acquisition function, and their curves."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rmcore.active.differences import CachedDifferences
from rmcore.active.labellers import Labeller, blind
from rmcore.active.learner import ActiveLearner
from rmcore.active.retraining import Fitted, HeadRetrainer
from rmcore.config.active import ActiveConfig
from rmcore.core.errors import ConfigError
from rmcore.core.progress import Report, silent
from rmcore.data.pair import PreferencePair
from rmcore.evaluation.ranking import correctness

MARGIN_FOR_UNEVEN_PROMPTS = 0.9
"""Prompts have differently many pairs, so the test prompts of a seed may take more pairs than their share."""


@dataclass(frozen=True, slots=True)
class Splits:
    """The pairs that one seed works with, in four disjoint sets. No prompt of the test pairs is among the others."""

    test: Sequence[PreferencePair]
    validation: Sequence[PreferencePair]
    seed_set: Sequence[PreferencePair]
    pool: Sequence[PreferencePair]


def pool_size(num_pairs: int, config: ActiveConfig) -> int:
    """Pairs of the pool, the same for every seed.

    Raises:
        ConfigError: there are too few pairs for any.
    """
    rest = int((1 - config.test_share) * num_pairs * MARGIN_FOR_UNEVEN_PROMPTS)
    size = min(config.pool_pairs, rest - config.seed_pairs - config.validation_pairs)
    if size < 2:
        raise ConfigError(
            f"of {num_pairs} pairs about {rest} are left beside the test prompts, and active.seed_pairs="
            f"{config.seed_pairs} with active.validation_pairs={config.validation_pairs} leave no pool; lower them, or "
            "take more data."
        )
    return size


def draw_splits(pairs: Sequence[PreferencePair], config: ActiveConfig, *, seed: int) -> Splits:
    """Draw test, validation, seed set and pool of one seed.

    Args:
        pairs: all there are.
        config: sizes.
        seed: of the draw.

    Raises:
        ConfigError: there are too few pairs.
    """
    rng = random.Random(f"active study {seed}")  # noqa: S311 - data, not cryptography
    prompts = sorted({pair.prompt_id for pair in pairs})
    rng.shuffle(prompts)
    tested = set(prompts[: max(1, round(config.test_share * len(prompts)))])
    rest = [pair for pair in pairs if pair.prompt_id not in tested]
    rng.shuffle(rest)
    size = pool_size(len(pairs), config)
    first, second = config.validation_pairs, config.validation_pairs + config.seed_pairs
    if len(rest) < second + size:
        raise ConfigError(
            f"seed {seed} leaves {len(rest)} pairs beside its test prompts, and {second + size} are needed: some "
            f"prompts have very many pairs. Set active.pool_pairs to {max(0, len(rest) - second)} or less, or "
            "data.pairs_per_prompt."
        )
    test = [pair for pair in pairs if pair.prompt_id in tested]
    return Splits(test, rest[:first], rest[first:second], rest[second : second + size])


def label_counts(config: ActiveConfig, num_pool: int) -> list[int]:
    """Labels after each round, the seed set's first; the last round takes what is left."""
    last = config.seed_pairs + num_pool if config.max_labels is None else config.max_labels
    last = max(min(last, config.seed_pairs + num_pool), config.seed_pairs + 1)
    counts = [config.seed_pairs]
    while counts[-1] < last:
        # A last round of a few pairs would be a point on top of the one before.
        following = math.ceil(counts[-1] * config.growth)
        counts.append(last if following * math.sqrt(config.growth) > last else following)
    return counts


def seed_record(
    pairs: Sequence[PreferencePair],
    differences: CachedDifferences,
    labeller: Labeller,
    config: ActiveConfig,
    *,
    seed: int,
    report: Report = silent,
) -> dict[str, Any]:
    """Run every acquisition function under one seed.

    Args:
        pairs: all there are, with the labels that accuracy is measured against.
        differences: their features.
        labeller: who labels, with the study's noise.
        config: settings.
        seed: of everything drawn.
        report: told what runs.

    Returns:
        {"num_labels": (R,) with the validation labels counted, "accuracy": {name: (R,)}, "end": accuracy with the
        labels of the whole pool, "num_pool", "num_test_pairs", "num_test_prompts"}, JSON-ready.

    Raises:
        ConfigError: there are too few pairs.
    """
    splits = draw_splits(pairs, config, seed=seed)
    retrainer = HeadRetrainer(
        differences, num_members=config.num_members, validation=_answers(labeller, splits.validation, seed)
    )
    seed_set = _answers(labeller, splits.seed_set, seed)
    pool = blind(splits.pool, seed=seed)
    counts = label_counts(config, len(pool))
    following = dict(zip(counts, np.diff(counts).tolist(), strict=False))
    found: dict[str, list[float]] = {}
    for done, name in enumerate(config.acquisitions):
        report(done, len(config.acquisitions), name)
        learner = ActiveLearner(
            retrainer, name, seed_set, k=following.__getitem__, max_per_prompt=config.max_per_prompt, seed=seed
        )
        rounds = learner.run_active_loop(pool, labeller, len(counts) - 1)
        found[name] = [accuracy(one.model, splits.test) for one in rounds]
    whole = retrainer.fit([*seed_set, *labeller(pool)], seed=seed, before=None, with_members=False)
    return {
        "num_labels": [count + config.validation_pairs for count in counts],
        "accuracy": found,
        "end": accuracy(whole, splits.test),
        "num_pool": len(pool),
        "num_test_pairs": len(splits.test),
        "num_test_prompts": len({pair.prompt_id for pair in splits.test}),
    }


def accuracy(model: Fitted, pairs: Sequence[PreferencePair]) -> float:
    """Share of P pairs whose margin is above 0, ties half."""
    return float(correctness(model.margins(pairs)).mean())


def _answers(labeller: Labeller, pairs: Sequence[PreferencePair], seed: int) -> list[PreferencePair]:
    return list(labeller(blind(pairs, seed=seed))) if pairs else []


Records = Mapping[float, Sequence[Mapping[str, Any]]]
"""Records of all seeds in order, by noise."""
