"""What would run and why, told without running anything."""

import pytest

from rmcore.config.pipeline import PipelineConfig
from rmcore.stages.order import stage_of
from rmcore.study.estimates import Estimates
from rmcore.study.plan import Cell, Planner, folders, total_seconds
from rmcore.training.resume import RESUME_FOLDER

STAGE_NAMES = ("prepare", "train", "evaluate")


def config(seed=0, **train):
    settings = {"steps": 40, "pairs_per_step": 8, "lr": 1e-3} | train
    return PipelineConfig.model_validate({"seed": seed, "device": "cpu", "train": settings})


def cell(arm="a", stages=STAGE_NAMES, **settings):
    made = config(**settings)
    return Cell(arm, made.seed, made, stages)


@pytest.fixture
def planner(store):
    """Factory of a planner for what the store holds now."""
    return lambda: Planner(store, Estimates(store.entries(), {}))


@pytest.fixture
def finish(publish):
    """Factory of finished cells: the artifacts of each stage in order."""

    def finished(one):
        refs = {}
        for name in one.stages:
            refs[name] = publish(name, one.config, refs)
        return refs

    return finished


def planned(plan, name):
    return next(stage for stage in plan.stages if stage.name == name)


def test_in_an_empty_store_everything_has_to_run_and_none_is_made(planner, store):
    plan = planner().plan(cell())
    assert not store.root.exists()
    assert plan.state == "run"
    assert plan.why == "prepare: nothing like it is in the store"
    assert [stage.why for stage in plan.stages[1:]] == ["follows prepare"] * 2
    assert [stage.key is None for stage in plan.stages] == [False, True, True]
    assert plan.refs == {}
    assert total_seconds([plan]) is None


def test_a_finished_cell_is_cached(planner, finish):
    refs = finish(cell())
    plan = planner().plan(cell())
    assert (plan.state, plan.why, plan.refs) == ("cached", "", refs)
    assert total_seconds([plan]) == 0
    assert {name: str(folder) for name, folder in folders(plan.refs).items()} == {
        name: ref.path for name, ref in refs.items()
    }


@pytest.mark.parametrize("damaged", ["train", "evaluate"])
def test_a_damaged_file_is_named(damaged, planner, finish):
    finish(cell())
    place = folders(planner().plan(cell()).refs)[damaged] / "outcome.txt"
    place.write_text("changed")
    plan = planner().plan(cell())
    assert plan.why.startswith(f"{damaged}: damaged: {place} has 7 bytes, ")
    position = STAGE_NAMES.index(damaged)
    assert list(plan.refs) == list(STAGE_NAMES[:position])
    assert all(stage.why == f"follows {damaged}" for stage in plan.stages[position + 1 :])
    assert plan.state == ("partial" if damaged == "evaluate" else "run")


def test_the_setting_that_differs_from_the_nearest_artifact_is_named(planner, finish):
    finish(cell())
    trained = planner().plan(cell()).refs["train"].key[:12]
    assert planner().plan(cell(lr=2e-3)).why == f"train: differs from {trained} in config.train.lr 0.001 -> 0.002"
    several = planner().plan(cell(lr=2e-3, steps=50, clip=2.0, beta=2.0, warmup_steps=1)).why
    assert several.startswith(f"train: differs from {trained} in ")
    assert several.endswith(" and 2 more")
    finish(cell(lr=5e-3, clip=3.0))  # the nearest one explains
    assert planner().plan(cell(lr=2e-3)).why == f"train: differs from {trained} in config.train.lr 0.001 -> 0.002"


def test_an_unfinished_training_goes_on_from_its_newest_state(planner, publish, store):
    prepared = {"prepare": publish("prepare", config(), {})}
    key = stage_of("train", config(), prepared).key
    for step in (3, 20, 100):
        (store.unfinished("train", key) / RESUME_FOLDER / f"step_{step}").mkdir(parents=True)
    assert planner().plan(cell()).why == "train: an earlier attempt was cut off; resumes from step 100"


def test_a_shared_stage_counts_once(planner, finish, publish):
    finish(cell(seed=1))  # another seed tells how long each stage takes: 10 s
    one, other = (planner().plan(cell(arm, lr=lr)) for arm, lr in (("a", 1e-3), ("b", 2e-3)))
    assert planned(one, "prepare").key == planned(other, "prepare").key
    alone = total_seconds([one])
    assert alone == sum(stage.seconds for stage in one.stages) > planned(one, "prepare").seconds == 10
    assert total_seconds([one, other]) == pytest.approx(2 * alone - 10)
    assert total_seconds([one, other, one]) == total_seconds([one, other])
    publish("prepare", config(), {})
    assert total_seconds([planner().plan(cell())]) == pytest.approx(alone - 10)
