"""The population of one world and the judgement over two: resumed one backbone at a time."""

import json

import numpy as np
import pandas as pd
import pytest

from experiments.presets import PRESETS
from policy_chain import Chain, changed
from rmcore.config.validation import ValidationConfig
from rmcore.core.progress import silent
from rmcore.core.store import Store
from rmcore.core.tracking import NullTracker
from rmcore.data.table import read_pairs
from rmcore.policy.grpo.defects import backbones
from rmcore.policy.readiness.claims import claims_digest
from rmcore.stages import population, validation
from rmcore.stages.interface import POPULATIONS
from rmcore.stages.settings import PopulationSettings, ValidationSettings

pytestmark = pytest.mark.slow

STUDY = ValidationConfig(num_backbones=2, steps=3, measured_prompts=4)
CONFIG = changed(
    PRESETS["validation-smoke"],
    device="cpu",
    policy={"num_prompts": 8, "max_new_tokens": 24},
    readiness={"planned_kl": 0.4, "min_gain": 0.02},
    validation=STUDY,
)
TRAINED: list[str] = []


@pytest.fixture(scope="module")
def upstream(tmp_path_factory):
    """Of the stage population, in each world; the gold is drawn, for so small a policy never earns any."""
    store = Store(tmp_path_factory.mktemp("study") / "store")
    found = {}
    for world in STUDY.worlds:
        chain = Chain(store, CONFIG.in_world(world))
        found[world] = {name: chain.folder(name) for name in ("prepare", "policy")}
        samples = pd.read_parquet(chain.folder("samples") / "samples.parquet")
        judged = samples.assign(gold=np.random.default_rng(0).normal(size=len(samples)))
        found[world]["samples"] = tmp_path_factory.mktemp("samples")
        judged.to_parquet(found[world]["samples"] / "samples.parquet")
    return found


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    """The backbones that are trained, in order."""
    TRAINED.clear()
    train = population.train_backbone

    def counting(settings, study, recipe, *rest):
        TRAINED.append(recipe.name)
        train(settings, study, recipe, *rest)

    monkeypatch.setattr(population, "train_backbone", counting)


def settings_in(world):
    return PopulationSettings.of(CONFIG.in_world(world))


def test_one_process_writes_the_study_whatever_a_training_alone_takes():
    config = CONFIG.model_copy(update={"train": CONFIG.train.model_copy(update={"num_processes": 2, "num_nodes": 2})})
    settings = PopulationSettings.of(config)
    assert (settings.num_processes, settings.num_nodes) == (1, 1)


@pytest.fixture(scope="module")
def whole(upstream, tmp_path_factory):
    """Folders of the populations by world, each made at once."""
    folders = {}
    for world, needed in upstream.items():
        folders[world] = tmp_path_factory.mktemp(world)
        population.run(settings_in(world), needed, folders[world], NullTracker(), silent)
    return folders


def test_an_interrupted_population_continues_with_the_next_backbone(upstream, whole, tmp_path, monkeypatch):
    world = STUDY.worlds[0]
    names = [recipe.name for recipe in backbones(CONFIG.train, world)][: STUDY.num_backbones]
    rows_of = population.rows_of

    def cut_off(recipe, *rest, **settings):
        if recipe.name == names[1]:
            raise KeyboardInterrupt
        return rows_of(recipe, *rest, **settings)

    monkeypatch.setattr(population, "rows_of", cut_off)
    with pytest.raises(KeyboardInterrupt):
        population.run(settings_in(world), upstream[world], tmp_path, NullTracker(), silent)
    assert {path.name for path in tmp_path.iterdir()} == {f"rows_{names[0]}.parquet", f"rewards_{names[0]}.npy"}
    monkeypatch.setattr(population, "rows_of", rows_of)
    TRAINED.clear()
    population.run(settings_in(world), upstream[world], tmp_path, NullTracker(), silent)
    assert names[1:] == TRAINED
    again, at_once = (pd.read_parquet(place / "rows.parquet") for place in (tmp_path, whole[world]))
    pd.testing.assert_frame_equal(again, at_once)


def test_a_backbone_is_trained_to_its_end_whatever_ends_the_training_beside_it(upstream, tmp_path):
    settings = settings_in(STUDY.worlds[0])
    train = settings.train.model_copy(update={"stop_step": 1, "save_every": 1, "keep_top_k": 2})
    settings = settings.model_copy(update={"train": train})
    recipe, pairs = (
        backbones(train, settings.shortcut)[0],
        read_pairs(upstream[STUDY.worlds[0]]["prepare"] / "train.parquet"),
    )
    population.train_backbone(settings, STUDY, recipe, pairs, "", tmp_path, silent)
    assert json.loads((tmp_path / "training.json").read_text())["num_steps"] == STUDY.steps == 3
    assert [place.name for place in tmp_path.glob("step_*")] == ["step_3"]


def test_rows_and_rewards_are_those_of_the_backbones(upstream, whole):
    for world, folder in whole.items():
        rows = pd.read_parquet(folder / "rows.parquet")
        assert rows["backbone"].nunique() == STUDY.num_backbones
        assert 2 * len(rows) == STUDY.num_models
        samples = pd.read_parquet(upstream[world]["samples"] / "samples.parquet")
        assert np.load(folder / "rewards_clean.npy").shape == (len(samples),)


def test_two_worlds_are_judged_together_under_the_claims(whole, tmp_path):
    needed = dict(zip(POPULATIONS, whole.values(), strict=True))
    validation.run(ValidationSettings.of(CONFIG), needed, tmp_path, NullTracker(), silent)
    found = json.loads((tmp_path / "validation.json").read_text())
    assert [one["name"] for one in found["worlds"]] == list(STUDY.worlds)
    assert found["claims_digest"] == claims_digest()
    assert found["num_models"] == STUDY.num_models
    fit = json.loads((tmp_path / "readiness_fit.json").read_text())
    assert fit["score"] == found["score"]
    assert fit["population"]["min_gain"] == CONFIG.readiness.min_gain
    assert {path.stem for path in (tmp_path / "figures").iterdir()} == {"readiness_against_gain", "reliability"}
