"""Curvature at each saved checkpoint of a real small training: which are measured, in which order, and as what."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from experiments.presets import PRESETS
from flows.checkpoints import (
    HEADINGS,
    history_row,
    kept_checkpoints,
    read_metrics,
    require_checkpoints,
    shown_row,
    table_row,
    trajectory_markdown,
)
from rmcore.config.data import DataConfig, GoldConfig
from rmcore.config.landscape import LandscapeConfig
from rmcore.core.errors import ConfigError, DataError
from rmcore.core.store import Store, flatten
from rmcore.reporting.figures.trajectory import curvature_trajectory_figure
from rmcore.stages.registry import stage_call
from rmcore.stages.run import run_stage
from rmcore.stages.settings import LandscapeSettings

pytestmark = pytest.mark.slow

SMOKE = PRESETS["smoke"]
CONFIG = SMOKE.model_copy(
    update={
        "data": DataConfig(gold=GoldConfig(num_prompts=30, pairs_per_prompt=1)),
        "train": SMOKE.train.model_copy(
            update={
                "steps": 10, "save_every": 4, "eval_every": 10, "pairs_per_step": 4,
                "best_metric": "last", "early_stopping_patience": None,
            }
        ),
        "landscape": LandscapeConfig(parts=("normalized",), num_pairs=3, lanczos_steps=4, trace_probes=2, top_k=2),
    }
)  # fmt: skip
STEPS = [4, 8, 10]


def make(store, name, config, refs):
    """The artifact of one stage, computed in this process."""
    call = stage_call(name, config, refs)
    if store.find(name, call.key) is None:
        with store.publish(name, call.slug, call.inputs, outcome=call.stage.outcome) as out:
            run_stage(name, call.settings, {needed: Path(ref.path) for needed, ref in refs.items()}, out)
    return store.ref(name, call.key)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return Store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def refs(store):
    prepared = make(store, "prepare", CONFIG, {})
    return {"prepare": prepared, "train": make(store, "train", CONFIG, {"prepare": prepared})}


@pytest.fixture(scope="module")
def measured(store, refs):
    """The landscape artifact of each checkpoint, by step."""
    return {
        one.step: make(store, "landscape", one.settings(CONFIG), refs | {"train": one.trained})
        for one in kept_checkpoints(refs["train"])
    }


@pytest.fixture(scope="module")
def rows(measured):
    return [history_row(step, read_metrics(Path(ref.path))) for step, ref in measured.items()]


def test_a_training_that_keeps_no_steps_is_refused_with_what_to_set():
    with pytest.raises(ConfigError, match=r"train\.save_every is not set.*--set train\.save_every="):
        require_checkpoints(PRESETS["demo"])
    require_checkpoints(PRESETS["trajectory"])


def test_checkpoints_come_in_the_order_of_steps_and_differ_in_nothing_else(refs):
    found = kept_checkpoints(refs["train"])
    assert [one.step for one in found] == STEPS  # not of names, where step_10 is the first
    settings = [flatten(one.settings(CONFIG).model_dump()) for one in found]
    assert [one["landscape.checkpoint"] for one in settings] == [f"step_{step}" for step in STEPS]
    assert all({name for name in one if one[name] != flatten(CONFIG.model_dump())[name]} == {"landscape.checkpoint"}
               for one in settings)  # fmt: skip


def test_a_checkpoint_is_measured_again_only_if_its_own_files_changed(tmp_path, refs):
    """The digest of a training covers its best checkpoint alone."""
    manifest = json.loads((Path(refs["train"].path) / "MANIFEST.json").read_text())
    before = {one.step: one.trained.digest for one in kept_checkpoints(refs["train"])}
    assert len(set(before.values())) == len(STEPS)
    manifest["files"]["step_8/model.safetensors"]["sha256"] = "0" * 64
    manifest["files"]["best/model.safetensors"]["sha256"] = "1" * 64
    (tmp_path / "MANIFEST.json").write_text(json.dumps(manifest))
    after = {one.step: one.trained.digest for one in kept_checkpoints(replace(refs["train"], path=str(tmp_path)))}
    assert {step for step in STEPS if after[step] != before[step]} == {8}


def test_every_checkpoint_is_measured_on_the_same_pairs_with_the_same_vectors(store, refs, measured):
    """The last step was kept as the best one too: the same weights give the same numbers to the last bit."""
    best = make(store, "landscape", CONFIG, refs)
    read = [json.loads((Path(ref.path) / "curvature.json").read_text()) for ref in (best, *measured.values())]
    assert read[0] == read[-1]
    assert len({record["spectrum"]["lambda_max"] for record in read}) == len(STEPS)


def test_a_row_holds_what_the_stage_found(measured, rows):
    for (step, ref), row in zip(measured.items(), rows, strict=True):
        record = json.loads((Path(ref.path) / "curvature.json").read_text())
        spectrum, normalized = record["spectrum"], record["normalized"]
        assert row["step"] == step
        expected = {
            "lambda_max": spectrum["eigenvalues"][0], "lambda_max_residual": spectrum["residuals"][0],
            "lambda_min": spectrum["eigenvalues"][-1], "lambda_min_residual": spectrum["residuals"][-1],
            "trace": spectrum["trace_estimate"], "trace_standard_error": spectrum["trace_standard_error"],
            "margin_scale": normalized["temperature"], "lambda_max_normalized": normalized["lambda_max"],
            "lambda_max_normalized_residual": normalized["lambda_max_residual"],
        }  # fmt: skip
        assert {name: row["metrics"][f"hessian/{name}"] for name in expected} == expected


def test_the_figure_and_the_table_have_every_step(rows):
    axes = curvature_trajectory_figure(rows, best_step=10).axes
    assert len(axes) == 4
    assert all(list(ax.lines[0].get_xdata()) == STEPS for ax in axes)
    assert [table_row(row)["step"] for row in rows] == STEPS
    lines = [line for line in trajectory_markdown("a|b", rows).splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {len(HEADINGS) + 1}
    assert len(lines) == 2 + len(STEPS)


def test_without_the_curvature_at_margins_of_size_1_its_cells_are_empty(tmp_path, refs):
    [one, *_] = kept_checkpoints(refs["train"])
    config = one.settings(CONFIG.model_copy(update={"landscape": CONFIG.landscape.model_copy(update={"parts": ()})}))
    run_stage("landscape", LandscapeSettings.of(config), {name: Path(ref.path) for name, ref in refs.items()}, tmp_path)
    row = history_row(one.step, read_metrics(tmp_path))
    assert shown_row(row)[-2:] == ["–", "–"]
    assert "–" not in " ".join(shown_row(row)[:-2])
    assert len(curvature_trajectory_figure([row]).axes) == 3


def test_a_checkpoint_that_was_not_kept_is_refused_naming_those_that_were(tmp_path, refs):
    changed = CONFIG.landscape.model_copy(update={"checkpoint": "step_5"})
    folders = {name: Path(ref.path) for name, ref in refs.items()}
    with pytest.raises(DataError, match=r"no checkpoint step_5: .* kept best, step_4, step_8, step_10\."):
        run_stage(
            "landscape", LandscapeSettings.of(CONFIG.model_copy(update={"landscape": changed})), folders, tmp_path
        )


@pytest.mark.parametrize("name", ["last", "step_", "step_4/../best", "../best", "step_4\n", ""])
def test_a_checkpoint_is_best_or_a_step(name):
    with pytest.raises(ValidationError):
        LandscapeConfig(checkpoint=name)
