"""`rm-opt compare RUN RUN`: changed settings only, numbers side by side, a paired difference, one picture."""

import copy
import json

import numpy as np
import pandas as pd
import pytest
from matplotlib.image import imread
from typer.testing import CliRunner

import experiment_sample
import figure_sample
import report_sample
from experiments.presets import PRESETS
from flows import cli, cli_experiment
from flows.cli_experiment import changed_settings
from rmcore.core.errors import ConfigError
from rmcore.reporting.runs import read_runs

pytestmark = pytest.mark.slow


def rewards(right, prompts=40):
    """Held-out pairs, two a prompt, the first `right` of which are ranked the right way round; and training pairs."""
    num = 2 * prompts
    table = pd.DataFrame(
        {
            "pair_id": [f"pair{index}" for index in range(num)],
            "prompt_id": [f"prompt{index // 2}" for index in range(num)],
            "reward_chosen": np.where(np.arange(num) < right, 1.0, -1.0),
            "reward_rejected": 0.0,
            "chosen_chars": 100,
            "rejected_chars": 101,
            "subset": "",
            "split": "test",
        }
    )
    return pd.concat([table, table.assign(split="train", reward_chosen=-5.0)])


@pytest.fixture
def reports(tmp_path, monkeypatch):
    monkeypatch.setenv("RM_OPT_HOME", str(tmp_path))
    return tmp_path / "reports"


def lay(reports, name, *, right=60, change=None, prompts=40, history=None, gone=()):
    """A finished run with the artifacts that a comparison reads."""
    record = copy.deepcopy(report_sample.results())
    record["config"] |= change or {}
    stages = {}
    for stage in ("train", "evaluate"):
        folder = reports.parent / "store" / stage / name
        if stage not in gone:
            folder.mkdir(parents=True)
        stages[stage] = folder
    if "train" not in gone:
        rows = figure_sample.history(20) if history is None else history
        (stages["train"] / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if "evaluate" not in gone:
        rewards(right, prompts).to_parquet(stages["evaluate"] / "rewards.parquet")
    record["stages"] = [
        {"name": name, "path": str(path), "wall_seconds": 31.0, "device_seconds": 30.0} for name, path in stages.items()
    ]
    folder = reports / name
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps(record))


def typed(*words):
    outcome = CliRunner().invoke(cli.app, ["compare", *words], prog_name="rm-opt", catch_exceptions=False)
    assert outcome.exit_code == 0, outcome.output
    return outcome.output.replace("\u00a0", " ")


A, B, C = "mine-seed0-aaaa00000000", "mine-seed0-bbbb00000000", "wide-seed1-cccc00000000"


def test_only_the_settings_that_differ_are_shown(reports):
    lay(reports, A)
    lay(reports, B, change={"train": {"lr": 0.002, "steps": 500, "early_stopping_patience": None}, "policy": None})
    found = changed_settings({run.name: run for run in sorted(read_runs(reports), key=lambda run: run.name)})
    assert found == {"train.lr": ["0.001", "0.002"], "policy": ["-", "null"]}
    said = typed("mine-seed0-aaaa", "mine-seed0-bbbb")
    assert "train.lr" in said
    assert "train.steps" not in said
    lay(reports, C)
    assert "settings that differ: none" in typed(A, C)


def test_a_group_that_one_run_does_without_is_one_setting(reports):
    lay(reports, A, change=PRESETS["smoke"].model_dump(mode="json"))
    lay(reports, B, change=PRESETS["demo"].model_dump(mode="json"))
    lay(reports, C, change=PRESETS["policy"].model_dump(mode="json"))
    runs = {run.name: run for run in sorted(read_runs(reports), key=lambda run: run.name)}
    found = changed_settings(runs)
    assert found["policy"] == ["null", "name=world", "all defaults"]
    assert not [name for name in found if name.startswith("policy.")]
    assert {"study", "train.steps", "data.gold.num_prompts"} <= found.keys()
    del runs[A]
    assert changed_settings(runs)["policy.name"] == ["world", "sft"]


def test_the_difference_is_paired_and_of_held_out_pairs_alone(reports):
    lay(reports, A, right=60)
    lay(reports, B, right=40)
    lay(reports, C, right=30, prompts=30)
    said = typed(A, B, C)
    assert "mine-seed0-bbbb − mine-seed0-aaaa: −25.0 points (95 %: " in said
    assert "wide-seed1-cccc − mine-seed0-aaaa: −50.0 points (95 %: " in said
    assert "on the 60 pairs that both hold out; left out: 0 of wide-seed1-cccc, 20 of mine-seed0-aaaa" in said
    assert "mine-seed0-aaaa − mine-seed0-bbbb: +25.0 points" in typed(B, A)


def test_runs_without_a_held_out_pair_in_common_do_not_compare(reports):
    lay(reports, A)
    lay(reports, B)
    file = reports.parent / "store" / "evaluate" / B / "rewards.parquet"
    pd.read_parquet(file).assign(prompt_id="another").to_parquet(file)
    assert "they hold out no pair in common" in typed(A, B)


def test_all_curves_are_in_one_picture(reports, tmp_path, true_pictures):
    for name in (A, B, C):
        lay(reports, name)
    assert "curves" in typed(A, B, C)
    drawn = reports / "compared-mine-seed0-aaaa-mine-seed0-bbbb-wide-seed1-cccc.png"
    assert imread(drawn).min() < 0.5
    typed(A, B, "--out", str(tmp_path / "deep" / "mine.png"))
    assert (tmp_path / "deep" / "mine.png").is_file()
    assert len(read_runs(reports)) == 3


def test_what_the_store_no_longer_has_is_said(reports):
    lay(reports, A)
    lay(reports, B, gone=("train", "evaluate"))
    said = typed(A, B)
    assert "no curves   of mine-seed0-bbbb: the stored training is gone" in said
    assert "stored rewards of one of them are gone" in said
    assert "curves      " in said
    lay(reports, C, gone=("train", "evaluate"))
    assert "compared" not in typed(B, C)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([A], "1 run(s) named"),
        ([A, "mine-seed0-aaaa"], "named already"),
        ([A, "mine"], f"may be {B}, {A}|may be {A}, {B}"),
        ([A, "none"], "no run 'none'"),
        ([A, "ablation"], "not a run of the pipeline"),
        ([A, B, "--seeds", "3"], "--seeds choose what an experiment runs"),
        ([A, B, "--plan", "--model", "tiny"], "--model, --plan choose"),
        (["--out", "x.png"], "--out is for the curves of finished runs"),
    ],
)
def test_what_cannot_be_compared_is_named(reports, words, said):
    lay(reports, A)
    lay(reports, B)
    (reports / "ablation-smoke-dddd00000000").mkdir()
    (reports / "ablation-smoke-dddd00000000" / "summary.json").write_text(json.dumps(experiment_sample.results()))
    pattern = said if "|" in said else said.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(ConfigError, match=pattern):
        typed(*words)


def test_without_runs_optimizers_are_compared_as_before(monkeypatch):
    asked = []
    monkeypatch.setattr(cli_experiment, "run_or_plan", lambda *given: asked.append(given) or 0)
    typed()
    typed("--optimizers", "sgd", "--seeds", "2", "--size", "small", "--plan")
    assert [(*given[:2], given[3]["seeds"]) for given in asked] == [
        ("optimizers", "smoke", 3),
        ("optimizers", "small", 2),
    ]
    assert [set(given[3]["arms"]) for given in asked] == [{"adam", "adamw", "muon", "sgd"}, {"adamw", "sgd"}]
    assert asked[1][2].plan
