"""Stage population: small reward models of differing defects, what readiness sees of each, and what each really gains.

Trains the backbones one after the other and fits heads on each. Writes `rows_BACKBONE.parquet` after
`rewards_BACKBONE.npy` (of the samples, by the head that it was trained with), from which an interrupted run continues,
and `rows.parquet`, one row a reward model; `summary.json`.
"""

import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from rmcore.config.validation import ValidationConfig
from rmcore.core.arrays import FloatArray
from rmcore.core.errors import DataError
from rmcore.core.files import atomic_file, write_json
from rmcore.core.progress import Report, within
from rmcore.core.tracking import METRICS_FILE, JsonlTracker, Tracker
from rmcore.data.pair import PreferencePair
from rmcore.data.table import read_pairs
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.policy.grpo.defects import BackboneRecipe, backbones
from rmcore.policy.readiness.population import backbone_features, rows_of, seed_shares
from rmcore.stages.interface import Upstream, policy_place
from rmcore.stages.samples import SAMPLES_FILE
from rmcore.stages.settings import PopulationSettings, TrainSettings
from rmcore.stages.train import train_into

ROWS_FILE = "rows.parquet"
HEAD_PAIRS, TEST_PAIRS = 1000, 400
"""Pairs that heads are fitted on, and that accuracy is taken on, at most."""


@dataclass(frozen=True, slots=True)
class Material:
    """The data that every backbone is trained and measured on."""

    policy: str
    training: Sequence[PreferencePair]
    test: Sequence[PreferencePair]
    samples: pd.DataFrame


def run(settings: PopulationSettings, upstream: Upstream, out: Path, tracker: Tracker, report: Report) -> None:
    """Train, fit, measure."""
    study = settings.validation
    prepared = upstream["prepare"]
    material = Material(
        policy_place(settings.name, upstream["policy"]),
        read_pairs(prepared / "train.parquet"),
        read_pairs(prepared / "test.parquet", TEST_PAIRS),
        pd.read_parquet(upstream["samples"] / SAMPLES_FILE),
    )
    num_prompts = material.samples["prompt_id"].nunique()
    if num_prompts - study.measured_prompts < 2:
        raise DataError(
            f"{num_prompts} prompts have samples and the scores may see {study.measured_prompts} of them, so fewer "
            "than two are left to take the gain on; raise policy.num_prompts, or lower validation.measured_prompts."
        )
    recipes = backbones(settings.train.model_copy(update={"steps": study.steps}), settings.shortcut)
    recipes = recipes[: study.num_backbones]
    tables = []
    for index, recipe in enumerate(recipes):
        place = out / f"rows_{recipe.name}.parquet"
        if not place.is_file():
            told = within(report, index, len(recipes), recipe.name)
            rows, rewards = _backbone_rows(settings, recipe, material, told)
            with atomic_file(_rewards_file(out, recipe)) as unfinished, unfinished.open("wb") as file:
                np.save(file, rewards)
            with atomic_file(place) as unfinished:
                rows.to_parquet(unfinished)
        tables.append(pd.read_parquet(place))
    table = pd.concat(tables, ignore_index=True)
    measured = material.samples["prompt_id"].isin(material.samples["prompt_id"].unique()[: study.measured_prompts])
    shares = seed_shares(
        {recipe.name: np.load(_rewards_file(out, recipe))[measured.to_numpy()] for recipe in recipes},
        {recipe.name: recipe.recipe for recipe in recipes},
        material.samples[measured],
    )
    table["signal_share_seeds"] = table["backbone"].map(shares).where(table["head"] == "own")
    table.to_parquet(out / ROWS_FILE)
    write_json(out / "summary.json", {"metrics": {"ready/num_models": len(table)}})


def train_backbone(
    settings: TrainSettings,
    study: ValidationConfig,
    recipe: BackboneRecipe,
    training: Sequence[PreferencePair],
    policy: str,
    place: Path,
    report: Report,
) -> None:
    """Train one backbone with its defect into `place/best`; the same for the same arguments.

    Args:
        settings: of the study; the recipe changes some.
        study: how many steps.
        recipe: the defect.
        training: pairs without it.
        policy: folder of the policy, which some recipes start from.
        place: a folder.
        report: what is being done.
    """
    start = {"name": policy} if recipe.from_policy else {}
    changed = settings.model_copy(
        update={
            "seed": settings.seed + (recipe.again is not None),
            "train": settings.train.to_the_end(**{"steps": study.steps} | dict(recipe.train)),
            "model": settings.model.model_copy(update=start | dict(recipe.model)),
        }
    )
    rng = random.Random(f"population {settings.seed} {recipe.name}")  # noqa: S311 - data, not cryptography
    tracker = JsonlTracker(place / METRICS_FILE)
    pairs = recipe.change(training, rng)
    train_into(
        changed, pairs, [], place, tracker, lambda done, total, _: report(done, total, f"step {done} of {total}")
    )
    tracker.close()


def _backbone_rows(
    settings: PopulationSettings,
    recipe: BackboneRecipe,
    material: Material,
    report: Report,
) -> tuple[pd.DataFrame, FloatArray]:
    with tempfile.TemporaryDirectory(prefix="rm-opt-population-") as scratch:
        train_backbone(settings, settings.validation, recipe, material.training, material.policy, Path(scratch), report)
        rm = BradleyTerryRM.from_pretrained(Path(scratch) / "best", device=settings.device)
    # Heads are fitted on the pairs as they are: the defects of the backbone's pairs stay in its features.
    seen = backbone_features(
        rm, material.training[:HEAD_PAIRS], material.test, material.samples, settings.shortcut, report
    )
    rows = rows_of(
        recipe,
        seen,
        material.samples,
        measured_prompts=settings.validation.measured_prompts,
        planned_kl=settings.planned_kl,
        seed=settings.seed,
    )
    return rows, seen.samples @ seen.own_head


def _rewards_file(out: Path, recipe: BackboneRecipe) -> Path:
    return out / f"rewards_{recipe.name}.npy"
