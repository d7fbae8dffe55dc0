"""The stage benchmark: what it writes, and when it is asked anew."""

import json

import pandas as pd
import pytest
import torch

from capability_samples import sample_of
from flows.requirements import require_run
from rmcore.config.model import ModelConfig
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.errors import ConfigError
from rmcore.core.progress import silent
from rmcore.core.store import ArtifactRef
from rmcore.core.tracking import NullTracker
from rmcore.data.table import write_pairs
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.stages.order import pipeline_stages, stage_of
from rmcore.suites import stage
from rmcore.suites.settings import BenchmarkConfig
from single_stage import stage_with

write_own_set = sample_of("suites").write_own_set


@pytest.fixture
def config(tmp_path, gold_pairs):
    rows = [
        {"prompt": one.prompt, "chosen": one.chosen, "rejected": one.rejected, "topic": "xy"[at % 2]}
        for at, one in enumerate(gold_pairs[:30])
    ]
    file = write_own_set(tmp_path, rows, group="topic")
    return PipelineConfig(device="cpu", benchmark=BenchmarkConfig(suites=(str(file),)))


@pytest.mark.slow
def test_every_answer_is_scored_and_set_beside_the_training_pairs(config, tmp_path, gold_pairs):
    upstream = {name: tmp_path / name for name in ("prepare", "train")}
    (tmp_path / "prepare").mkdir()
    write_pairs(gold_pairs[20:60], tmp_path / "prepare" / "train.parquet")
    rm = BradleyTerryRM.new(ModelConfig(name="tiny", max_seq_len=128), seed=0, device=torch.device("cpu"))
    rm.save(tmp_path / "train" / "best")
    out = tmp_path / "out"
    out.mkdir()
    stage.run(stage_with("benchmark", config, upstream), out, NullTracker(), silent)
    told = json.loads((out / "benchmark.json").read_text())["suites"]["mine"]
    rewards = pd.read_parquet(out / "rewards_mine.parquet")
    right = rewards.pivot_table(index="question", columns="is_right", values="reward")
    assert told["scores"]["overall"]["value"] == pytest.approx((right[True] > right[False]).mean())
    assert set(told["scores"]) == {"overall", "x", "y"}
    seen = {one.prompt for one in gold_pairs[:30]} & {one.prompt for one in gold_pairs[20:60]}
    assert told["overlap"]["num_seen"] == sum(one.prompt in seen for one in gold_pairs[:30]) > 0
    assert (out / "figures" / "benchmarks.png").is_file()
    summary = json.loads((out / "summary.json").read_text())["metrics"]
    assert summary["eval/mine"]["value"] == told["scores"]["overall"]["value"]


def test_the_stage_is_run_where_benchmarks_are_named_and_again_when_their_content_changes(config, tmp_path):
    assert pipeline_stages(config)[-1] == "benchmark"
    assert "benchmark" not in pipeline_stages(PipelineConfig())
    upstream = {name: ArtifactRef(name, "k", "/somewhere", "d") for name in ("prepare", "train")}
    key = stage_of("benchmark", config, upstream).key
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in ("mine.yaml", "rows.jsonl"):
        (moved / name).write_bytes((tmp_path / name).read_bytes())
    named = config.model_copy(update={"benchmark": BenchmarkConfig(suites=(str(moved / "mine.yaml"),))})
    assert stage_of("benchmark", named, upstream).key == key
    (moved / "mine.yaml").write_text((moved / "mine.yaml").read_text().replace("group: topic\n", ""))
    assert stage_of("benchmark", named, upstream).key != key
    (moved / "mine.yaml").write_bytes((tmp_path / "mine.yaml").read_bytes())
    with (moved / "rows.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "p", "chosen": "a", "rejected": "b", "topic": "x"}) + "\n")
    assert stage_of("benchmark", named, upstream).key != key
    for suites, said in ((), "set benchmark.suites"), (("judgebenhc",), "there is no benchmark 'judgebenhc'"):
        with pytest.raises(ConfigError, match=said):
            require_run(PipelineConfig(benchmark=BenchmarkConfig(suites=suites)))
    missing = config.model_copy(update={"benchmark": BenchmarkConfig(suites=("judgebench=nowhere.jsonl",))})
    with pytest.raises(ConfigError, match=r"there is no file or folder 'nowhere.jsonl'"):
        _ = stage_of("benchmark", missing, upstream).settings
