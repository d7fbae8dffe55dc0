"""Stages as functions of files, without an orchestrator."""

import json
from functools import cache

import pytest

from rmcore.config.pipeline import (
    RUN_ONLY_FIELDS,
    ActiveConfig,
    DataConfig,
    GoldConfig,
    LoraSettings,
    PipelineConfig,
    PolicyConfig,
    ReadinessConfig,
    RlhfConfig,
    ValidationConfig,
)
from rmcore.core.errors import ConfigError, DataError
from rmcore.core.store import ArtifactRef, flatten, make_key
from rmcore.core.tracking import NullTracker
from rmcore.data.table import read_pairs, write_pairs
from rmcore.stages import prepare
from rmcore.stages.readiness import judge
from rmcore.stages.registry import STAGES, stage_inputs

GOOD = {
    "pairwise_accuracy": 0.9,
    "margin_p50": 1.0,
    "negative_margin_rate": 0.1,
    "ece_debiased": 0.02,
    "pooled_reward_variance": 0.5,
}


def run_prepare(tmp_path, **data):
    config = PipelineConfig(data=DataConfig.model_validate(data))
    tmp_path.mkdir(exist_ok=True)
    prepare.run(config, {}, tmp_path, NullTracker(), lambda done, total, text: None)
    return {path.stem: read_pairs(path) for path in tmp_path.glob("*.parquet")}


def test_the_gold_world_is_split_by_prompt_with_its_ceiling(tmp_path):
    splits = run_prepare(tmp_path, gold=GoldConfig(num_prompts=80, pairs_per_prompt=2).model_dump())
    assert set(splits) == {"train", "validation", "test", "ood"}
    prompts = [{pair.prompt_id for pair in pairs} for pairs in splits.values()]
    assert len(set.union(*prompts)) == sum(len(some) for some in prompts)
    audit = json.loads((tmp_path / "audit.json").read_text())
    assert 0.5 < audit["label_ceiling"]["test"] < 1


def test_a_named_test_file_is_used_whole_and_the_rest_is_trained_on(tmp_path, gold_pairs):
    write_pairs(gold_pairs[:100], tmp_path / "a.parquet")
    write_pairs(gold_pairs[100:130], tmp_path / "b.parquet")
    source, held_out = str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")
    splits = run_prepare(tmp_path / "out", source=source, eval_source=held_out, limit=90, eval_limit=20)
    assert splits["test"] == gold_pairs[100:120]
    assert sorted(p.pair_id for name in ("train", "validation") for p in splits[name]) == sorted(
        pair.pair_id for pair in gold_pairs[:90]
    )


def test_a_split_of_a_file_is_refused(tmp_path, gold_pairs):
    write_pairs(gold_pairs[:10], tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="the test pairs would be the training pairs"):
        run_prepare(tmp_path / "out", source=str(tmp_path / "a.parquet"), eval_split="test")


def key(name, config):
    upstream = {stage: ArtifactRef(stage, "k", "/somewhere", "d") for stage in STAGES[name].upstream}
    return make_key(stage_inputs(STAGES[name], config, upstream))


def test_what_came_out_upstream_is_in_a_key_and_not_how_or_where():
    def trained(*made_of):
        ref = ArtifactRef("prepare", *made_of)
        return make_key(stage_inputs(STAGES["train"], PipelineConfig(), {"prepare": ref}))

    assert trained("key", "/here", "digest") == trained("other key", "/there", "digest")
    assert trained("key", "/here", "digest") != trained("key", "/here", "other digest")


@cache
def default_keys():
    return {stage: key(stage, PipelineConfig()) for stage in STAGES}


ADDRESSES = {"data.source", "data.eval_source"}  # their content counts, see below


@pytest.mark.parametrize("setting", sorted(flatten(PipelineConfig().model_dump()).keys() - ADDRESSES))
def test_each_setting_enters_the_keys_of_the_stages_it_affects(setting):
    """A setting either changes some stage's key, or is only a name."""
    before = PipelineConfig()
    value = flatten(before.model_dump())[setting]
    others = {"device": "cuda", "data.gold.shortcut": "flattery", "model.name": "deberta"}
    others |= {"model.lora": LoraSettings(), "model.render_fn": "json:dumps", "train.callbacks": ("curvature",)}
    others |= {"landscape.parts": ("noise",), "landscape.checkpoint": "step_5"}
    others |= {"evaluate.thresholds": (0.5,), "train.eval_thresholds": (0.5,)}
    literal = {"adamw": "sgd", "cut": "drop", "cosine": "linear", "fp32": "bf16", "lanczos": "full", "all": "head"}
    literal["eval/pairwise_accuracy"] = "eval/loss"
    others |= {"policy": PolicyConfig(), "validation": ValidationConfig(), "active": ActiveConfig()}
    others |= {"rlhf": RlhfConfig()}
    others |= {"readiness.planned_optimizer": "kl_optimum"}
    others |= {f"data.{name}": "x" for name in DataConfig.model_fields if name.endswith(("_column", "eval_split"))}
    if setting in others:
        changed = others[setting]
    elif isinstance(value, bool):
        changed = not value
    elif isinstance(value, str):
        changed = literal.get(value, value + "x")
    else:
        changed = (value or 0) + 1
    tree = before.model_dump()
    *groups, name = setting.split(".")
    place = tree
    for group in groups:
        place = place[group]
    place[name] = changed
    after = PipelineConfig.model_construct(**_rebuild(tree))
    moved = [stage for stage in STAGES if default_keys()[stage] != key(stage, after)]
    group = groups[0] if groups else setting
    on_device = {"train", "evaluate", "landscape", "policy", "samples", "optimize", "population"}
    on_device |= {"grpo", "features", "active_check"}
    expected = {
        "study": set(),
        "seed": on_device | {"prepare", "validation", "active"},
        "device": on_device,
        "data": {"prepare"},
        "model": {"train", "population", "features", "active_check"},
        "train": {"train", "population", "grpo", "active_check"},
        "evaluate": {"evaluate", "optimize", "grpo"},
        "readiness": {"readiness", "optimize", "readiness_v2", "population", "validation"},
        "policy": {"policy", "samples", "optimize", "grpo"},
        "validation": {"population", "validation"},
        "active": {"active", "active_check"},
        "rlhf": {"grpo"},
    }.get(group, {group})
    if group == "train" and name in RUN_ONLY_FIELDS:
        expected = set()  # how it is run, not what comes out
    if setting == "model.render_fn":  # each imports that function anew
        expected = {"train", "evaluate", "landscape", "optimize", "population", "grpo", "features", "active_check"}
    if setting == "data.gold.shortcut":  # also of what a policy is fine-tuned on
        expected = {"prepare", "policy"}
    if setting == "data.gold.temperature":  # also of who labels anew
        expected = {"prepare", "active", "active_check"}
    assert set(moved) == expected


def _rebuild(tree):
    from rmcore.config import pipeline as schema

    groups = {"data": "DataConfig", "model": "ModelConfig", "train": "TrainConfig", "evaluate": "EvaluateConfig"}
    groups |= {"landscape": "LandscapeConfig", "readiness": "ReadinessConfig"}
    built = {name: getattr(schema, kind).model_construct(**tree[name]) for name, kind in groups.items()}
    built["data"] = built["data"].model_copy(update={"gold": schema.GoldConfig.model_construct(**tree["data"]["gold"])})
    return tree | built


def test_a_path_is_not_part_of_a_key_but_its_content_is(tmp_path, gold_pairs):
    write_pairs(gold_pairs[:10], tmp_path / "a.parquet")
    config = PipelineConfig(data=DataConfig(source=str(tmp_path / "a.parquet")))
    inputs = stage_inputs(STAGES["prepare"], config, {})
    write_pairs(gold_pairs[:11], tmp_path / "a.parquet")
    assert stage_inputs(STAGES["prepare"], config, {})["content"] != inputs["content"]
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    write_pairs(gold_pairs[:10], moved / "a.parquet")
    config = PipelineConfig(data=DataConfig(source=str(moved / "a.parquet")))
    assert make_key(stage_inputs(STAGES["prepare"], config, {})) == make_key(inputs)


def test_a_good_model_is_ready():
    judged = judge(GOOD, 0.92, 10.0, ReadinessConfig())
    assert judged["verdict"] == {
        "status": "ready",
        "headline": judged["verdict"]["headline"],
        "reasons": [],
    }


@pytest.mark.parametrize(
    ("change", "train_accuracy", "lambda_max", "failed"),
    [
        ({"pairwise_accuracy": 0.55}, 0.6, 10.0, "pairwise_accuracy"),
        ({"margin_p50": -0.1}, 0.9, 10.0, "margin_p50"),
        ({"ece_debiased": 0.2}, 0.9, 10.0, "ece_debiased"),
        ({}, 1.0 + 0.06, 10.0, "train_test_gap"),
        ({}, None, 10.0, "train_test_gap"),
        ({"pooled_reward_variance": 3.0}, 0.9, 500.0, "readiness_v1"),
    ],
)
def test_one_failed_check_is_not_ready_and_named(change, train_accuracy, lambda_max, failed):
    judged = judge(GOOD | change, train_accuracy, lambda_max, ReadinessConfig())
    assert judged["verdict"]["status"] == "not_ready"
    assert failed in [check["name"] for check in judged["gate"] if not check["passed"]]


def test_readiness_without_a_number_it_needs_is_refused():
    with pytest.raises(DataError, match="lambda_max"):
        judge(GOOD, 0.9, None, ReadinessConfig())
