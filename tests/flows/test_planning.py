"""The plan of a matrix: cells, budget and name, without Prefect and without running a cell."""

import json
import os

import pytest

from experiments.presets import PRESETS
from experiments.schema import Experiment
from flows import cli_runs, planning
from flows.planning import Probed, make_plan, matrix_key, plan_run
from rmcore.config.judging import JudgingConfig
from rmcore.config.pipeline import PipelineConfig, change_config, sections
from rmcore.core.errors import ConfigError, DataError
from rmcore.core.manifests import MANIFEST
from rmcore.core.store import Store
from rmcore.core.tracking import METRICS_FILE
from rmcore.data.table import write_pairs
from rmcore.judging.language_model import calls_for_rewards
from rmcore.readiness.power import plan_power
from rmcore.stages.order import pipeline_stages, stage_of
from rmcore.study.estimates import SpeedProbe, probe_kind
from rmcore.study.plan import Cell
from rmcore.training.resume import FINISHED_FILE
from tasks.device import held_slots
from tasks.sharing import named_store

ACCURACY = "eval/test_pairwise_accuracy"
BASE = {
    "device": "cpu",
    "data": {"gold": {"num_prompts": 40, "pairs_per_prompt": 1}, "validation_fraction": 0.2},
    "model": {"name": "tiny", "max_seq_len": 256},
    "train": {"steps": 30, "pairs_per_step": 4, "token_budget": 8192},
}
DECLARED = {
    "name": "rates",
    "title": "Two learning rates",
    "question": "Does a larger learning rate help?",
    "base": BASE,
    "factors": [{"name": "lr", "levels": {"low": {"train.lr": 1e-4}, "high": {"train.lr": 1e-3}}}],
    "control": "low",
    "seeds": [0, 1],
    "metrics": [ACCURACY],
    "budget_minutes": 1000,
}


def declare(**changes):
    return Experiment.model_validate(DECLARED | changes)


@pytest.fixture
def store(tmp_path):
    """An empty store in a home of its own."""
    return Store(tmp_path / "store")


@pytest.fixture
def plan(store, tmp_path, monkeypatch):
    """Factory of plans that measure nothing new."""
    monkeypatch.setattr(planning, "probe_unknown", lambda store, folder, configs: Probed())
    return lambda experiment: make_plan(experiment, store, tmp_path)


@pytest.fixture
def probed(tmp_path):
    """A probe on record for the base: 10 pairs a second after 2 s."""
    folder = tmp_path / "throughput"
    folder.mkdir()
    record = {
        "kind": probe_kind(declare().base),
        "probe": dict.fromkeys(SpeedProbe.__slots__, 10.0) | {"start_seconds": 2.0},
    }
    (folder / "a.json").write_text(json.dumps(record))


@pytest.fixture
def finish(store):
    """Factory of finished cells: artifacts as stages would leave them; `loss` is the training's best."""

    def finished(cell, loss=0.5):
        refs = {}
        for name in cell.stages:
            call = stage_of(name, cell.config, refs)
            with store.publish(name, call.slug, call.inputs, outcome=("outcome",)) as out:
                (out / "outcome").write_text(call.key)
                (out / METRICS_FILE).write_text(json.dumps({"step": 1, "metrics": {"eval/loss": loss}}) + "\n")
                record = {"num_pairs": 120, "num_steps": 30, "planned_steps": 30}
                (out / FINISHED_FILE).write_text(json.dumps(record | {"train_seconds": 4, "pairs_per_second": 30}))
            refs[name] = store.ref(name, call.key)
        return refs

    return finished


def test_what_other_machines_have_computed_is_taken_and_costs_nothing(store, tmp_path, finish, probed, monkeypatch):
    """A machine whose home is empty plans by the shared store; a stage that it lacks runs on what it has."""
    experiment = declare(budget_minutes=0.01)
    (tmp_path / "shared").mkdir()
    monkeypatch.setenv("RM_OPT_SHARED", (tmp_path / "shared").as_uri())
    theirs = make_plan(experiment, store, tmp_path)
    for one in theirs.cells:
        finish(one.cell)
    shared = named_store()
    assert list(shared.push_all(store))
    empty = Store(tmp_path / "other" / "store")
    plan = make_plan(experiment, empty, tmp_path)
    assert {one.state for one in plan.cells} == {"partial"}
    assert {one.why for one in plan.cells} == {"prepare: taken from the shared store"}
    assert plan.seconds == 0.0
    plan.check_budget()
    key = next(stage.key for stage in plan.cells[0].stages if stage.name == "evaluate")
    shared.objects.delete(f"manifests/evaluate/{key}.json")
    plan = make_plan(experiment, empty, tmp_path)
    assert plan.cells[0].why == "evaluate: nothing like it is in the store"
    assert [stage.is_shared for stage in plan.cells[0].stages] == [True, True, False]
    assert plan.seconds > 0
    with pytest.raises(ConfigError, match="budget_minutes"):
        plan.check_budget()


def test_there_is_a_cell_for_each_arm_and_seed(plan):
    found = plan(declare())
    assert [cell.cell.label for cell in found.cells] == ["low seed 0", "low seed 1", "high seed 0", "high seed 1"]
    for one in found.cells:
        assert one.cell.config.seed == one.cell.seed
        assert one.cell.config.train.lr == {"low": 1e-4, "high": 1e-3}[one.cell.arm]
    assert found.due == list(found.cells)


def test_the_name_of_the_study_and_what_is_only_reported_change_no_cell(plan, finish):
    for one in plan(declare()).cells:
        finish(one.cell)
    other = declare(
        name="other", title="Other words", metrics=[ACCURACY, "calib/test_ece_debiased"], budget_minutes=1e-6
    )
    found = plan(other)
    assert found.due == []
    found.check_budget()  # nothing to run takes no time


def test_a_plan_over_budget_is_refused_before_any_work(plan, probed, store):
    found = plan(declare(budget_minutes=0.5))
    assert found.seconds > 30
    with pytest.raises(ConfigError, match=r"budget_minutes=0.5: this matrix would take about \d+ minutes \(4 cells"):
        found.check_budget()
    assert not store.root.exists()
    plan(declare(budget_minutes=found.seconds / 60 + 0.01)).check_budget()


def test_gpus_share_the_time_and_slots_of_a_cpu_do_not(plan, probed, monkeypatch):
    declared = declare(base={**declare().base.model_dump(), "device": "cpu"})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    alone = plan(declared).seconds
    monkeypatch.setenv("RM_OPT_DEVICE_SLOTS", "4")
    assert plan(declared).seconds == alone
    monkeypatch.delenv("RM_OPT_DEVICE_SLOTS")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert plan(declared).seconds == pytest.approx(alone / 4)


def test_an_unknown_time_is_refused(plan):
    with pytest.raises(ConfigError, match=r"budget_minutes=1000 cannot be kept.*nothing like it has run here"):
        plan(declare()).check_budget()


def test_behind_another_run_nothing_is_measured_or_refused(store, tmp_path, monkeypatch):
    monkeypatch.setenv("RM_OPT_DEVICE_SLOTS", "1")
    with held_slots(Store(store.root), "mine-seed0"):
        found = make_plan(declare(budget_minutes=0.001), store, tmp_path)
        [problem] = found.probed.problems
        assert f"held by mine-seed0 (pid {os.getpid()})" in problem
        assert found.seconds is None
        found.check_budget()  # the run is queued
        # Taken between the look and the try: the probe does not wait either.
        monkeypatch.setattr(planning, "holders", lambda store: [])
        raced = make_plan(declare(), store, tmp_path)
    assert raced.probed.is_device_held
    assert not (tmp_path / "throughput").exists()


def test_unknown_speeds_are_measured_and_kept(store, tmp_path):
    """Two real probes: one gives a time for all cells of its kind, one is refused as training would be."""
    levels = {"low": {}, "long": {"model.max_seq_len": 4000}}
    experiment = declare(factors=[{"name": "length", "levels": levels}], seeds=[0])
    found = make_plan(experiment, store, tmp_path)
    assert found.seconds is None
    [problem] = found.probed.problems
    assert "max_seq_len" in problem
    with pytest.raises(ConfigError, match=r"budget_minutes=1000 cannot be kept.*max_seq_len"):
        found.check_budget()
    low, long = ([one for one in found.cells if one.cell.arm == arm] for arm in ("low", "long"))
    assert all(stage.seconds > 0 for one in low for stage in one.stages)
    assert all(stage.seconds is None for one in long for stage in one.stages)
    assert not list(store.root.rglob(MANIFEST))
    again = make_plan(declare(), store, tmp_path)
    assert again.seconds is not None


def test_a_matrix_is_named_by_its_registration_and_by_what_runs_it(monkeypatch):
    experiment = declare()
    key = matrix_key(experiment, "a" * 64)
    assert len(key) == 12
    assert key == matrix_key(declare(), "a" * 64)
    assert matrix_key(experiment, "b" * 64) != key
    assert matrix_key(declare(metrics=["train/num_steps"]), "a" * 64) != key  # other stages, other code
    with monkeypatch.context() as patched:
        patched.setattr("rmcore.stages.stage.code_digests", lambda module: {module: "changed"})
        assert matrix_key(experiment, "a" * 64) != key
    assert matrix_key(declare(base=BASE | {"device": "cuda"}), "a" * 64) != key


def test_the_content_of_every_arms_data_is_in_the_name(tmp_path, gold_pairs):
    file = tmp_path / "pairs.parquet"

    def key():
        levels = {"low": {}, "high": {"data.source": str(file)}}
        return matrix_key(declare(factors=[{"name": "data", "levels": levels}]), "a" * 64)

    write_pairs(gold_pairs[:10], file)
    before = key()
    write_pairs(gold_pairs[:11], file)
    assert key() != before
    write_pairs(gold_pairs[:10], file)
    assert key() == before


def test_the_plan_is_printed_with_every_stage_its_state_and_what_it_would_take(
    store, tmp_path, finish, probed, monkeypatch, capsys
):
    monkeypatch.setenv("RM_OPT_HOME", str(tmp_path))
    monkeypatch.setattr(cli_runs, "configure_environment", lambda: None)
    config = declare().base.model_copy(update=sections("smoke"))
    finish(Cell("run", 0, config, pipeline_stages(config)))
    cli_runs.print_plan(change_config(config, {"evaluate.num_resamples": 777}))
    said = capsys.readouterr().out
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in said.splitlines() if line.strip()}
    assert rows["train"] == "cached"
    assert rows["evaluate"].startswith("to run about ")
    assert "evaluate.num_resamples 1000 -> 777" in rows["evaluate"]
    assert rows["readiness"].endswith("follows evaluate")
    assert rows["report"].startswith("each time seconds")
    assert "rm-" in rows["register"]
    assert "2 to run, about" in said
    assert "Nothing was run." in said
    answers = tmp_path / "answers.csv"
    answers.write_text("prompt,response,judge\n" + "".join(f"q,{place},1\n" for place in range(5)))
    with pytest.raises(DataError, match="tells nothing apart"):
        cli_runs.print_plan(change_config(config, {"evaluate.answers": str(answers)}))
    with pytest.raises(ConfigError, match="true reward of the policy's samples"):  # as the run refuses it
        cli_runs.print_plan(change_config(config, {"data.source": str(answers), "policy": {}}))
    cli_runs.print_plan(config.model_copy(update=dict.fromkeys(sections("smoke"))))
    without = capsys.readouterr().out
    assert sections("smoke").keys().isdisjoint(line.partition(" ")[0] for line in without.splitlines())
    assert "1 to run" in without or not sections("smoke")  # readiness, which does without their numbers


def test_a_run_that_starts_from_a_policy_to_come_is_planned_without_its_time(store, tmp_path):
    plan, found = plan_run(PRESETS["rlhf"], store, tmp_path)
    assert [stage.name for stage in plan.stages] == [*pipeline_stages(PRESETS["rlhf"])]
    assert not any(stage.ref for stage in plan.stages)
    assert "starts from a policy that is not trained yet" in found.problems[0]


def test_the_plan_says_what_a_judge_behind_an_endpoint_is_asked_and_costs(probed, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RM_OPT_HOME", str(tmp_path))
    monkeypatch.setattr(cli_runs, "configure_environment", lambda: None)
    judge = {"judge": "openai:some-model@http://127.0.0.1:9/v1", "num_prompts": 20, "samples_per_prompt": 17}
    judging = {"mode": "pairwise", "price_read": 2.0, "price_written": 0.0}
    policy = {"name": "world", "max_new_tokens": 100, **judge, "judging": judging}
    config = PipelineConfig.model_validate(BASE | {"policy": policy})  # whose speed is on record
    cli_runs.print_plan(config)
    told = capsys.readouterr().out.splitlines()
    assert f"judged      {plan_power(config)}" in told
    [line] = [one for one in told if one.startswith("judge ")]
    read = 3 * 20 * 17 * (150 + 2 * 100)  # three comparisons a response, each of two
    assert f"some-model in samples: at most {3 * 20 * 17:,} calls, about {read:,} tokens read" in line
    assert f"for {2.0 * read / 1e6:.3g} at most" in line
    assert calls_for_rewards(JudgingConfig(), 20, 17) == (20 * 17, 1)
