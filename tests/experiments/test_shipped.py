"""The shipped experiments against the validation plan, and what can be taken of them."""

import math
from pathlib import Path
from typing import get_args

import numpy as np
import pandas as pd
import pytest
import yaml
from pydantic import ValidationError

from experiments.library import load_experiment, restrict
from experiments.schema import changed_settings
from experiments.shipped import SHIPPED
from experiments.sizes import ACCURACY, NOTHING, Size
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.errors import ConfigError
from rmcore.core.metrics import CELL_METRICS, CELL_STAGES
from rmcore.study.cells import read_cell
from single_stage import run_stage

GAP = "eval/train_test_gap"
ECE = "calib/test_ece_debiased"
SIZES = get_args(Size)
EVERY = [(name, size) for name in SHIPPED for size in SIZES]


@pytest.fixture(autouse=True)
def real_data(tmp_path_factory, monkeypatch):
    """Files that `small` looks for; building an experiment does not read them."""
    folder = tmp_path_factory.mktemp("data")
    for part in ("train", "test"):
        (folder / f"alpacaeval_{part}.parquet").touch()
    monkeypatch.setenv("RM_OPT_DATA", str(folder))


@pytest.mark.parametrize("name", ["checkpoint_choice", "trl_defaults"])
def test_experiments_that_the_log_names_are_read(name):
    file = Path(__file__).parents[2] / "benchmarks" / f"{name}.yaml"
    assert load_experiment(str(file)).arms()


@pytest.mark.parametrize(("name", "size"), EVERY)
def test_every_one_builds_in_every_size_and_can_be_kept_in_a_file(name, size, tmp_path):
    experiment = load_experiment(name, size)
    assert (experiment.name, experiment.size) == (name, size)
    assert experiment.control in {arm.name for arm in experiment.arms()}
    assert len(experiment.arms()) >= 2
    assert len(experiment.seeds) >= (2 if size == "smoke" else 3)
    assert experiment.metrics[0] == ACCURACY[size]
    assert all(arm.config.seed == experiment.base.seed for arm in experiment.arms())
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(experiment.model_dump(mode="json"), sort_keys=False))
    assert load_experiment(str(file)) == experiment


def test_small_without_its_data_is_refused(tmp_path, monkeypatch):
    (tmp_path / "alpacaeval_train.parquet").touch()
    monkeypatch.setenv("RM_OPT_DATA", str(tmp_path))
    with pytest.raises(ConfigError, match="RM_OPT_DATA"):
        load_experiment("baseline", "small")
    monkeypatch.delenv("RM_OPT_DATA")
    with pytest.raises(ConfigError, match="RM_OPT_DATA"):
        load_experiment("baseline", "small")


ACCURATE = ACCURACY["gold"]
PLAN = {
    # "baseline 60 %, > 63 % at the same budget"
    "baseline": {
        "H1a": (ACCURATE, "difference", "full", "plain", "above", 0.03),
        "H1b": (ACCURATE, "level", "full", None, "above", 0.63),
    },
    # "15-20 points without; < 10 with"; "ECE > 0.15 without, < 0.12 with; accuracy within 2 points"; "stops before
    # severe overfitting, keeps the best": a stop after 90 % of the steps is the failure band
    "ablation": {
        "H2a": (GAP, "level", "A1", None, "above", 0.15),
        "H2b": (GAP, "level", "A2", None, "below", 0.10),
        "H2c": (GAP, "difference", "A2", "A1", "below", 0.0),
        "H3a": (ECE, "level", "A2", None, "above", 0.15),
        "H3b": (ECE, "level", "A3", None, "below", 0.12),
        "H3c": (ACCURATE, "difference", "A3", "A2", "above", -0.02),
        "H5a": ("train/stop_share", "level", "A4", None, "below", 0.9),
        "H5b": (ACCURATE, "difference", "A4", "A3", "above", 0.0),
    },
    # ">= full - 3 points; 3-5x faster; memory < 60 %"
    "lora": {
        "H4a": (ACCURATE, "difference", "r8", "full", "above", -0.03),
        "H4b": ("cost/train_pairs_per_second", "ratio", "r8", "full", "above", 3.0),
        "H4c": ("cost/peak_training_mib", "ratio", "r8", "full", "below", 0.6),
    },
}


@pytest.mark.parametrize("name", PLAN)
def test_the_claims_are_those_of_the_validation_plan(name):
    experiment = load_experiment(name, "gold")
    claims = {
        claim.name: (
            *(claim.metric, claim.comparison, claim.arm),
            None if claim.comparison == "level" else claim.versus or experiment.control,
            *(claim.direction, claim.threshold),
        )
        for claim in experiment.hypotheses
    }
    assert claims.items() >= PLAN[name].items()


def test_each_arm_of_the_ablation_adds_one_part_until_the_recipe_is_whole():
    experiment = load_experiment("ablation", "paper")
    arms = {arm.name: arm.config for arm in experiment.arms()}
    assert list(arms) == ["A1", "A2", "A3", "A4", "A5"]
    parts = [
        {"train.schedule", "train.warmup_steps"},
        {"train.label_smoothing"},
        {"train.early_stopping_patience", "train.best_metric"},
        {"train.regularization_lambda"},
    ]
    for (before, after), part in zip(zip(list(arms)[:-1], list(arms)[1:], strict=True), parts, strict=True):
        assert changed_settings(arms[before], arms[after]).keys() == part
    assert arms["A5"] == experiment.base.model_copy(update={"study": "ablation"})
    assert {f"train.{name}": value for name, value in arms["A1"].train.model_dump().items()}.items() >= NOTHING.items()


def test_the_whole_recipe_of_size_paper_has_the_values_of_the_validation_plan():
    train = load_experiment("ablation", "paper").base.train
    assert (train.schedule, train.warmup_steps, train.label_smoothing) == ("cosine", 50, 0.05)
    assert (train.early_stopping_patience, train.best_metric) == (5, "eval/pairwise_accuracy")
    assert (train.regularization_lambda, train.lr, train.steps) == (0.001, 5e-6, 1000)


def test_the_plain_loop_has_no_part_of_the_recipe():
    plain, pair_aware, full = load_experiment("baseline", "paper").arms()
    assert changed_settings(full.config, pair_aware.config).keys() == NOTHING.keys()
    assert changed_settings(pair_aware.config, plain.config).keys() == {"train.batching"}
    assert plain.config.train.steps == pair_aware.config.train.steps == full.config.train.steps


def test_lora_has_the_ranks_of_the_validation_plan_and_ten_times_the_learning_rate():
    experiment = load_experiment("lora", "paper")
    shapes = {arm.name: arm.config.model.lora and (arm.config.model.lora.rank, arm.config.model.lora.alpha)
              for arm in experiment.arms()}  # fmt: skip
    assert shapes == {"full": None, "r8": (8, 16), "r16": (16, 32)}
    rates = {arm.name: arm.config.train.lr / experiment.base.train.lr for arm in experiment.arms()}
    assert rates == pytest.approx({"full": 1, "r8": 10, "r16": 10})


def test_sensitivity_has_the_values_of_the_validation_plan_in_its_order():
    experiment = load_experiment("sensitivity", "paper")
    varied = [(factor.name, [value for one in factor.levels.values() for value in one.values()])
              for factor in experiment.factors]  # fmt: skip
    assert [name for name, _ in varied] == ["lr", "smoothing", "warmup", "penalty"]
    wanted = [[1e-6, 5e-6, 1e-5], [0, 0.05, 0.1], [0, 50, 100], [0, 0.001, 0.01]]
    assert [values for _, values in varied] == [pytest.approx(values) for values in wanted]
    # the middle ones are the base, so nine arms are left
    assert len(experiment.arms()) == 9
    assert experiment.arms()[0].merged == ("lr=1x", "smoothing=0.05", "warmup=50", "penalty=0.001")


def test_optimizers_differ_in_the_optimizer_and_its_learning_rate_alone():
    experiment = load_experiment("optimizers", "paper")
    assert [arm.name for arm in experiment.arms()] == ["adam", "adamw", "sgd", "muon", "lion"]
    for arm in experiment.arms():
        assert changed_settings(experiment.base, arm.config).keys() <= {"train.optimizer", "train.lr", "study"}
        assert arm.config.train.optimizer == arm.name


def test_arms_are_taken_in_declared_order_whatever_the_order_asked_for():
    whole = load_experiment("optimizers")
    one, other = (restrict(whole, arms=arms) for arms in (["muon", "adamw"], ["adamw", "muon", "muon"]))
    assert [arm.name for arm in one.arms()] == ["adamw", "muon"]
    assert one.frozen() == other.frozen()
    assert [hypothesis.name for hypothesis in one.hypotheses] == ["O1", "O4", "O5"]


def test_hypotheses_about_arms_or_a_control_that_are_left_out_are_left_out():
    taken = restrict(load_experiment("optimizers"), arms=["muon", "adam"])
    assert taken.control == "muon"
    assert taken.hypotheses == ()  # what was claimed against adamw is not claimed against muon
    taken = restrict(load_experiment("ablation"), arms=["A1", "A2"])
    assert [hypothesis.name for hypothesis in taken.hypotheses] == ["H2a", "H2b", "H2c", "H2d", "H3a"]


@pytest.mark.parametrize(
    ("name", "arms", "said"),
    [
        *(("ablation", arms, "there are A1, A2, A3, A4, A5") for arms in ([], ["A1", "A9"])),
        ("sensitivity", ["base"], "varies lr, smoothing, warmup, penalty"),
    ],
)
def test_arms_that_there_are_not_or_of_several_factors_are_refused(name, arms, said):
    with pytest.raises(ConfigError, match=said):
        restrict(load_experiment(name), arms=arms)


def test_an_unknown_name_is_refused_with_those_that_there_are():
    with pytest.raises(ConfigError, match="there are baseline, ablation"):
        load_experiment("abblation")


@pytest.fixture(scope="module")
def cell(tmp_path_factory):
    """The artifacts of one cell of size smoke, six steps long."""
    smoke = load_experiment("optimizers", "smoke").arms()[0].config.model_dump()
    smoke["train"] |= {"steps": 6, "eval_every": 3, "log_every": 2}
    smoke["data"]["gold"] |= {"num_prompts": 40}
    place = tmp_path_factory.mktemp("cell")
    rng = np.random.default_rng(0)
    rows = [(f"question {row // 18}?", f"answer {row}", value) for row, value in enumerate(rng.normal(size=12 * 18))]
    pd.DataFrame(rows, columns=["prompt", "response", "judge"]).to_parquet(place / "judged.parquet")
    smoke["evaluate"]["answers"] = str(place / "judged.parquet")
    config = PipelineConfig.model_validate(smoke)
    folders = {}
    for stage in CELL_STAGES:
        out = place / stage
        out.mkdir()
        run_stage(stage, config, dict(folders), out)
        folders[stage] = out
    return folders


@pytest.mark.slow
def test_a_real_cell_reports_every_metric_of_the_registry(cell):
    measured = read_cell("adam", 0, cell, list(CELL_METRICS), target_accuracy=0.001)
    assert measured.samples.keys() == CELL_METRICS.keys()
    for name, spec in CELL_METRICS.items():
        sample = measured.samples[name]
        assert math.isfinite(sample.value), name
        assert (sample.replicates is not None) == (spec.stage == "evaluate"), name
    assert measured.value("train/num_steps") == 6
    assert measured.value("train/stop_share") == 1
    assert 0 < measured.value("train/steps_to_target") <= 6
    assert 0 < measured.value("cost/seconds_to_target") <= measured.value("cost/train_seconds")


def test_a_metric_comes_from_the_stage_that_the_registry_names(cell):
    """So a cell that runs only the stages that its metrics need reports them all."""
    for name, spec in CELL_METRICS.items():
        upstream = {stage: cell[stage] for stage in ("prepare", "train", spec.stage)}
        assert read_cell("adam", 0, upstream, [name], target_accuracy=0.001).samples.keys() == {name}


def test_an_experiment_moves_to_another_model_and_other_pairs_with_all_its_arms():
    before = load_experiment("optimizers", "small")
    assert restrict(before, model=None, data=None, epochs=None) == before
    moved = restrict(before, model="deberta", data="mine.parquet", epochs=2)
    assert moved.frozen() != before.frozen()
    for arm in moved.arms():
        config = arm.config
        assert (config.model.name, config.data.source, config.data.eval_source) == ("deberta", "mine.parquet", None)
        assert (config.train.epochs, config.train.steps) == (2, None)
        assert config.model.max_seq_len == before.base.model.max_seq_len


def test_the_comparison_of_the_tutorial_has_its_control_and_refuses_what_compare_refuses():
    from flows.comparison import OptimizerComparison

    declared = OptimizerComparison("tiny", "mine.parquet", ["muon", "sgd"], num_seeds=2, epochs=3).declared
    assert [arm.name for arm in declared.arms()] == ["adamw", "sgd", "muon"]  # the control is always there
    assert (len(declared.seeds), declared.base.data.source) == (2, "mine.parquet")
    with pytest.raises(ConfigError, match="no optimizer 'adamm'"):
        OptimizerComparison("tiny", "mine.parquet", ["adamm"])
    with pytest.raises(ValidationError, match="epochs"):
        OptimizerComparison("tiny", "mine.parquet", ["muon"], epochs=0)
