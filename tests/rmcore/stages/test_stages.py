"""Stages as functions of files, without an orchestrator."""

import ast
import importlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from capability_samples import BY_CONTENT, OTHERS, SECTIONS, TEXTS
from machine import PATIENCE_S
from policy_chain import changed
from rmcore.config.base import Names, Settings
from rmcore.config.data import DataConfig, GoldConfig
from rmcore.config.model import LoraSettings
from rmcore.config.pipeline import PipelineConfig
from rmcore.config.policy import PolicyConfig
from rmcore.config.rlhf import RlhfConfig, WatchConfig
from rmcore.config.train import TrainConfig
from rmcore.core import hardware
from rmcore.core.errors import ConfigError, DataError
from rmcore.core.fingerprints import code_digests
from rmcore.core.store import ArtifactRef, flatten
from rmcore.core.tracking import NullTracker
from rmcore.data.table import read_pairs, write_pairs
from rmcore.stages import prepare
from rmcore.stages.order import missing, pipeline_stages, request, stage_of
from rmcore.stages.readiness import judge
from rmcore.stages.stage import Stage
from rmcore.stages.stages import OPTIONAL, STAGES


def run_prepare(tmp_path, **data):
    config = PipelineConfig(data=DataConfig.model_validate(data))
    tmp_path.mkdir(exist_ok=True)
    prepare.run(stage_of("prepare", config), tmp_path, NullTracker(), lambda done, total, text: None)
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


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 7])
def test_a_test_of_its_own_seed_is_the_same_under_every_seed_and_leaves_the_others_their_shares(seed):
    """Also under that very seed: the search trains its trials so."""
    data = DataConfig(gold=GoldConfig(num_prompts=900, pairs_per_prompt=1), test_seed=0)
    splits = prepare.prepare(data, seed=seed).pairs
    first = prepare.prepare(data, seed=0).pairs
    assert [pair.pair_id for pair in splits["test"]] == [pair.pair_id for pair in first["test"]]
    validation = {pair.pair_id for pair in splits["validation"]}
    assert len(validation) / 900 == pytest.approx(data.validation_fraction, abs=5 * (0.1 * 0.9 / 900) ** 0.5)
    if seed:
        assert len({pair.pair_id for pair in first["validation"]} & validation) < len(validation) / 2


UPSTREAM = {stage: ArtifactRef(stage, "k", "/somewhere", "d") for stage in STAGES}


def key(name, config):
    return stage_of(name, config, UPSTREAM).key


@pytest.mark.slow
def test_what_came_out_upstream_is_in_a_key_and_not_how_or_where():
    def trained(*made_of):
        ref = ArtifactRef("prepare", *made_of)
        return stage_of("train", PipelineConfig(), {"prepare": ref}).key

    assert trained("key", "/here", "digest") == trained("other key", "/there", "digest")
    assert trained("key", "/here", "digest") != trained("key", "/here", "other digest")


BASE = PipelineConfig(
    train=TrainConfig(precision="fp32", token_budget=8192),  # auto depends on device, model and machine
    **SECTIONS,
    policy=PolicyConfig(),
    rlhf=RlhfConfig(kl_beta=0.1, watch=WatchConfig()),
)
"""Every stage has what it needs."""


@cache
def base_keys():
    return {stage: key(stage, BASE) for stage in STAGES}


ADDRESSES = {
    *BY_CONTENT,
    "evaluate.answers",
    "data.source",
    "data.eval_source",
    "policy.samples",
    "policy.judge",
    "rlhf.more_rewards",
}  # by content
OTHER_VALUES = {
    "policy.people": "to_judge", "policy.judge_ceiling": 0.9,
    "data.attribute_weights": {"helpfulness": 1.0},
    "data.grade_columns": ("stars",),
    "device": "cuda:1",
    "data.gold.shortcut": "flattery", "model.name": "deberta", "model.lora": LoraSettings(),
    "model.render_fn": "json:dumps",
    "train.batching": "plain",
    "train.optimizer": "sgd", "train.over_length": "drop", "train.precision": "bf16", "train.schedule": "linear",
    "train.best_metric": "eval/loss", "evaluate.thresholds": (0.5,),
    "readiness.planned_optimizer": "kl_optimum", "policy.name": "a/policy", "policy.engine": "generate",
    "rlhf.loss": "grpo", "rlhf.rewards": "local", **OTHERS,
}  # fmt: skip
"""Where the value cannot be told from its type."""
CHECKPOINT_STAGES = {"evaluate", "overoptimization", "confirmation", "grpo", *OPTIONAL}
ON_DEVICE = CHECKPOINT_STAGES | {"train", "policy", "samples"}
STAGES_OF_A_SECTION = {
    "study": set(),
    "seed": {name for name in ON_DEVICE if "seed" in STAGES[name].model_fields} | {"prepare", "readiness"},
    "device": ON_DEVICE,
    "data": {"prepare"},
    "model": {"train"},
    "train": {"train"},
    "evaluate": {"evaluate"},
    "readiness": {"readiness_v2"},
    **{name: {name} for name in OPTIONAL},
    "rlhf": {"grpo"},
    "policy.judging": set(),  # only where an endpoint judges: tests/rmcore/judging/test_judge_in_stages.py
}
STAGES_OF_A_SETTING = {
    # Also of what the reward of several attributes is.
    "data.attribute_weights": {"prepare", "train"},
    # Each imports that function anew, and is refused anew without the permission.
    "model.render_fn": STAGES_OF_A_SECTION["model"] | CHECKPOINT_STAGES,
    "model.trust_remote_code": STAGES_OF_A_SECTION["model"] | CHECKPOINT_STAGES,
    # Also of what a policy is fine-tuned on, and of what some reward models of the study prefer.
    "data.gold.shortcut": {"prepare", "policy"},
    "evaluate.num_resamples": {"evaluate", "readiness", "overoptimization", "grpo"},
    "readiness.planned_optimizer": {"readiness_v2"},
    "readiness.planned_kl": {"readiness_v2", "overoptimization", "confirmation"},
    "readiness.min_gain": {"readiness_v2", "confirmation"},
    "policy.name": {"policy", "samples", "confirmation", "grpo"},
    "policy.base": {"policy"},
    "policy.sft_examples": {"policy"},
    "policy.engine": {"samples", "confirmation"},
    "policy.num_prompts": {"samples", "confirmation"},
    "policy.fresh_prompts": {"confirmation"},
    "policy.people": {"confirmation"},
    "policy.samples_per_prompt": {"samples"},
    "policy.temperature": {"samples", "confirmation", "grpo"},
    "policy.max_new_tokens": {"samples", "confirmation", "grpo"},
    "policy.judge_column": {"samples"},
    "policy.topic_column": {"samples"},
    "policy.judge_ceiling": {"overoptimization"},
    # How it is run, not what comes out.
    **{f"train.{name}": set() for name in TrainConfig.run_only()},
    "rlhf.micro_batch_size": set(),
}


CODE = cache(Stage.code.__func__)


@pytest.fixture
def code_as_it_is(monkeypatch):
    """Nobody edits it meanwhile, and to see that anew is nearly all that some thousand keys take."""
    monkeypatch.setattr(Stage, "code", classmethod(CODE))


@pytest.mark.slow
@pytest.mark.usefixtures("code_as_it_is")
@pytest.mark.parametrize("setting", sorted(flatten(BASE.model_dump()).keys() - ADDRESSES))
def test_each_setting_enters_the_keys_of_the_stages_it_affects(setting):
    """A setting either changes some stage's key, or is only a name or a way of running."""
    value = flatten(BASE.model_dump())[setting]
    if setting in OTHER_VALUES:
        other = OTHER_VALUES[setting]
    elif isinstance(value, bool):
        other = not value
    elif isinstance(value, str):
        other = value + "x"
    elif isinstance(value, tuple) and setting.partition(".")[0] in OPTIONAL:
        other = (*value, "x")
    elif value is None and setting.endswith(("_column", "_split")):
        other = "x"
    else:
        other = (value or 0) + (1 if isinstance(value, int | None) else 1e-7)
    changed = with_setting(BASE, setting.split("."), other)
    moved = {stage for stage in STAGES if base_keys()[stage] != key(stage, changed)}
    section = setting.rpartition(".")[0]
    while section not in STAGES_OF_A_SECTION and "." in section:
        section = section.rpartition(".")[0]
    assert moved == STAGES_OF_A_SETTING.get(setting, STAGES_OF_A_SECTION.get(section or setting))


def with_setting(settings, names, value):
    """A copy with one setting, at any depth, changed; nothing is validated, so that no other has to change with it."""
    if len(names) > 1:
        value = with_setting(getattr(settings, names[0]), names[1:], value)
    return settings.model_copy(update={names[0]: value})


JUDGE = "openai:m@http://127.0.0.1:1/v1"
SAMPLES = {"data": {"source": __file__}, "policy": {"samples": __file__}, "rlhf": None}


@pytest.mark.usefixtures("code_as_it_is")
@pytest.mark.parametrize(
    ("given", "setting", "other", "expected"),
    [
        ({"policy": {"name": "world"}}, "data.gold.shortcut", "flattery",
            {"prepare", "policy", "samples", "confirmation"}),
        ({"data": {"source": __file__}}, "data.gold.shortcut", "flattery", {"prepare"}),
        (SAMPLES, "policy.name", "a/policy", {"samples", "confirmation"}),
        (SAMPLES, "policy.judge_column", "other", {"samples", "overoptimization"}),
        (SAMPLES, "policy.judging.mode", "pairwise", set()),
        ({"policy": {"judge": JUDGE}}, "policy.judging.mode", "pairwise", JUDGED := {
            "samples", "overoptimization", "readiness_v2", "confirmation", "grpo"}),
        ({"policy": {"judge": JUDGE}}, "policy.judging.rubric", "safety", JUDGED),
        ({"policy": {"judge": JUDGE}}, "policy.judging.max_calls", 3, set()),
        ({"policy": {"judge": JUDGE}}, "policy.judge", "openai:m@http://127.0.0.1:2/v1", set()),
        ({"model": {"name": "policy"}}, "policy.name", "a/policy",
            {"train", "policy", "samples", "confirmation", "grpo"}),
    ],
)  # fmt: skip
def test_a_setting_that_only_some_runs_use_enters_their_keys_alone(given, setting, other, expected):
    base = changed(BASE, **given)
    stages = (*pipeline_stages(base), "confirmation")
    before = {stage: key(stage, base) for stage in stages}
    after = with_setting(base, setting.split("."), other)
    assert {stage for stage in stages if before[stage] != key(stage, after)} == expected


def texts(kind, path=""):
    """Dotted paths of the texts in a type, without those that change no outcome or count by content."""
    if isinstance(kind, type) and issubclass(kind, Settings):
        fields = {name: field for name, field in kind.model_fields.items() if name not in kind.run_only()}
        plain = [name for name, field in fields.items() if not any(isinstance(mark, Names) for mark in field.metadata)]
        return {text for name in plain for text in texts(fields[name].annotation, f"{path}.{name}".removeprefix("."))}
    return {path} if kind is str else {text for inner in get_args(kind) for text in texts(inner, path)}


def test_every_text_that_a_stage_is_given_is_keyed_by_content_or_no_address_of_an_input():
    columns = {"prompt", "chosen", "rejected", "margin", "weight", "grade"}
    words = {f"data.{name}_column{'s' * (name == 'grade')}" for name in columns}
    words |= {"data.split", "data.eval_split", "data.attribute_weights", "attribute_weights"}
    words |= {"judge_column", "topic_column", "model.lora.targets", "judged_by", *TEXTS}
    folders_to_judge_in = {"people", "rlhf.watch.people"}
    assert set().union(*map(texts, STAGES.values())) == words | folders_to_judge_in


def test_two_cells_run_the_same_stage_at_the_same_time():
    both = threading.Barrier(2, timeout=PATIENCE_S)

    def run(stage):
        both.wait()  # neither would end if one waited for the other
        return missing(stage)

    with ThreadPoolExecutor(2) as pool:
        cells = [PipelineConfig(seed=seed, data=DataConfig(source="gold")) for seed in (0, 1)]
        list(pool.map(lambda config: request(["prepare"], config, run), cells))


def test_two_stages_digest_what_they_are_given_at_the_same_time(monkeypatch):
    both = threading.Barrier(2, timeout=PATIENCE_S)

    def contents(stage):
        both.wait()
        return {}

    monkeypatch.setattr("rmcore.stages.stage.contents", contents)
    with ThreadPoolExecutor(2) as pool:
        keys = pool.map(lambda seed: stage_of("prepare", PipelineConfig(seed=seed), {}).key, (0, 1))
        assert len(set(keys)) == 2


@pytest.mark.parametrize("stage", STAGES)
def test_all_that_a_stage_is_given_is_read_by_its_code(stage):
    own = STAGES[stage].module()
    modules = [name for name in code_digests(own) if name.startswith("rmcore.stages.") or name == own]
    trees = [ast.parse(Path(importlib.import_module(name).__file__).read_text()) for name in modules]
    read = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert STAGES[stage].model_fields.keys() - STAGES[stage].run_only() <= read | {stage}  # its section, by its name


@pytest.mark.parametrize("stage", STAGES)
def test_the_arguments_of_a_stage_survive_the_way_into_its_process(stage):
    given = stage_of(stage, BASE, UPSTREAM)
    sent = STAGES[stage].model_validate(json.loads(json.dumps(given.model_dump(mode="json"))))
    assert sent == given
    assert sent.settings == given.settings


@pytest.mark.usefixtures("code_as_it_is")
@pytest.mark.parametrize(
    ("stage", "setting"),
    [("prepare", "data.source"), ("prepare", "data.eval_source"), ("evaluate", "evaluate.answers"),
     ("policy", "policy.base"), ("policy", "policy.name"), ("samples", "policy.name"), ("samples", "policy.samples"),
     ("train", "model.name")],
)  # fmt: skip
def test_what_is_named_keeps_a_key_where_it_moves_and_changes_it_where_its_content_does(stage, setting, tmp_path):
    def named(folder, content):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "rows.jsonl").write_text(content)
        path = tmp_path / folder / ("" if setting == "model.name" else "rows.jsonl")
        return key(stage, with_setting(BASE, setting.split("."), str(path)))

    first = named("here", "{}")
    assert named("there", "{}") == first
    assert named("here", '{"a": 1}') != first
    assert named("here", "{}") == first


def test_readiness_without_a_number_it_needs_is_refused():
    known = {name: {"value": 0.9} for name in ("pairwise_accuracy", "pooled_reward_variance")}
    with pytest.raises(DataError, match="ece_debiased"):
        judge(known | {"ece_debiased": {"value": None}}, 0.9, 1.0)


@pytest.mark.parametrize("units", [True, False])
@pytest.mark.parametrize("name", ["tiny", "minilm"])
def test_a_key_has_the_precision_that_auto_stands_for_and_not_the_word(monkeypatch, units, name):
    monkeypatch.setattr(hardware, "cpu_multiplies_bf16", lambda: units)

    def keyed(precision):
        train = BASE.train.model_copy(update={"precision": precision})
        model = BASE.model.model_copy(update={"name": name})
        config = BASE.model_copy(update={"device": "cpu", "model": model, "train": train})
        found = stage_of("train", config).settings
        assert stage_of("train", config).train.precision == found["train"]["precision"]
        return found

    chosen, other = ("bf16", "fp32") if units and name != "tiny" else ("fp32", "bf16")
    assert keyed("auto") == keyed(chosen) != keyed(other)
