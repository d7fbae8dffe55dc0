"""Cells as measured from reward tables of known structure."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from reward_table import reward_table
from rmcore.core.manifests import MANIFEST, with_self_digest
from rmcore.core.store import Store
from rmcore.readiness.judged_answers import JudgedAnswers
from rmcore.stages.order import stage_of
from rmcore.study import cells as reading
from rmcore.training.record import TrainResult
from rmcore.training.resume import FINISHED_FILE

PAIR_METRICS = (*reading.TEST_METRICS, reading.GAP)


@pytest.fixture
def make_rewards():
    """Factory of test rewards: another seed is another training, `world` chooses prompts and pairs."""

    def make(seed=0, *, world=0, num_pairs=90, num_prompts=20, gain=0.6):
        pairs, trained = np.random.default_rng(world), np.random.default_rng(1000 + seed)
        prompt = np.arange(num_pairs) % num_prompts
        margin = gain + pairs.normal(0, 1, num_prompts)[prompt] + trained.normal(0, 1, num_pairs)
        ends = {"chosen_chars": 100, "rejected_chars": 110}
        chars = {side: pairs.integers(80, end, num_pairs) for side, end in ends.items()}
        return reward_table(margin / 2, -margin / 2, [f"{world}-{number}" for number in prompt], **chars)

    return make


@pytest.fixture
def judged_answers():
    """(answers, rewards): twenty judged answers to each of thirty prompts, and rewards that know something of them."""
    rng, num = np.random.default_rng(5), 20
    strength = rng.normal(size=30 * num)
    prompts = [f"prompt {place // num:02}" for place in range(len(strength))]
    table = pd.DataFrame({"prompt_id": prompts, "prompt": prompts, "strength": strength})
    table.insert(2, "response", [f"answer {place}" for place in range(len(table))])
    return JudgedAnswers(table, "judge", len(table), 0, 0, 0, 0), strength + rng.normal(size=len(strength))


@pytest.fixture
def write_cell(tmp_path, make_rewards):
    """Factory of a cell's artifacts: folders by stage with the files that are read of them."""

    def write(name, test, *, train=None, history=(), training=None, costs=None, test_card=None, beta=None):
        folders = {stage: tmp_path / name / stage for stage in ("train", "evaluate")}
        for folder in folders.values():
            folder.mkdir(parents=True)
        train = make_rewards(99, world=77, gain=1.5) if train is None else train
        parts = [test.assign(split="test"), *([] if train.empty else [train.assign(split="train")])]
        pd.concat(parts).to_parquet(folders["evaluate"] / "rewards.parquet")
        card = {"test": test_card or {"pairwise_accuracy": {"value": 0.7}}}
        card["train"] = {"pairwise_accuracy": {"value": 0.8}}
        (folders["evaluate"] / "metrics.json").write_text(
            json.dumps({"metrics": card} | ({} if beta is None else {"beta": beta}))
        )
        sizes = {"num_parameters": 1000, "num_trained_parameters": 250, "num_processes": 1, "peak_training_bytes": None}
        record = {"num_steps": 30, "planned_steps": 40, "best_step": 20, **sizes} | (training or {})
        (folders["train"] / "training.json").write_text(json.dumps(record))
        costs = {"cost/train_seconds": 5.0} if costs is None else costs
        (folders["train"] / "summary.json").write_text(json.dumps({"metrics": costs}))
        rows = "".join(json.dumps(row) + "\n" for row in history)
        (folders["train"] / "metrics.jsonl").write_text(rows)
        return folders

    return write


@pytest.fixture
def measure(write_cell):
    """Factory of a measured cell from its test rewards."""

    def measured(arm, seed, test, **files):
        metrics = (*PAIR_METRICS, "train/stop_share", "cost/train_seconds")
        return reading.read_cell(arm, seed, write_cell(f"{arm}-{seed}", test, **files), metrics)

    return measured


@pytest.fixture
def store(tmp_path):
    """An empty store."""
    return Store(tmp_path / "store")


@pytest.fixture
def publish(store):
    """Factory of artifacts as a stage would leave them, with what planning reads of them.

    Planning asks whether an artifact is whole, how long it took, and how its training went; what the files are about
    it does not know.
    """

    def published(name, config, refs, *, wall_seconds=10.0, content="", **training):
        call = stage_of(name, config, refs)
        with store.publish(name, call.slug, call.inputs, outcome=("outcome.txt",)) as out:
            (out / "outcome.txt").write_text(f"{call.key} {content}")
            if name == "train":
                (out / FINISHED_FILE).write_text(json.dumps(finished(**training)))
        manifest = store.find(name, call.key) / MANIFEST
        record = json.loads(manifest.read_text()) | {"wall_seconds": wall_seconds}
        manifest.write_text(json.dumps(with_self_digest(record)))
        return store.ref(name, call.key)

    return published


def finished(**training):
    """The record of a training of 40 steps of 8 pairs in 8 seconds."""
    result = TrainResult(
        num_steps=40, planned_steps=40, stop_reason="done", best_step=40, best_metric=None, best_value=None,
        kept_steps=[], num_pairs=320, num_tokens=1, num_real_tokens=1, token_budget=8192, train_seconds=8.0,
        peak_memory_bytes=1, peak_training_bytes=1, num_processes=1, resumed_from=[], compiled=False,
    )  # fmt: skip
    return replace(result, **training).to_dict()
