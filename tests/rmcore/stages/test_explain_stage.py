"""Stage explain on real files: the record of the worst held-out mistakes, where it is asked for."""

import json

import pytest

from rmcore.config.explain import ExplainConfig
from rmcore.config.model import ModelConfig
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.errors import ConfigError
from rmcore.core.progress import silent
from rmcore.core.tracking import NullTracker
from rmcore.data.table import write_pairs
from rmcore.models.device import pick_device
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.stages import explain
from rmcore.stages.registry import pipeline_stages, stage_config

ASKED = PipelineConfig(device="cpu", explain=ExplainConfig(mistakes=2))


@pytest.mark.slow
def test_the_worst_held_out_mistakes_are_explained(tmp_path, gold_pairs):
    prepared, trained, out = (tmp_path / name for name in ("prepare", "train", "out"))
    for folder in (prepared, trained, out):
        folder.mkdir()
    write_pairs(gold_pairs[:60], prepared / "test.parquet")
    write_pairs(gold_pairs[60:], prepared / "train.parquet")
    model = ModelConfig(name="tiny-small", max_seq_len=128)
    BradleyTerryRM.new(model, seed=0, device=pick_device("cpu")).save(trained / "best")
    explain.run(stage_config("explain", ASKED), {"prepare": prepared, "train": trained}, out, NullTracker(), silent)
    record = json.loads((out / "explain.json").read_text())
    assert (record["num_pairs"], len(record["pairs"])) == (60, 2)
    assert all(pair["margin"] < 0 for pair in record["pairs"])
    assert json.loads((out / "summary.json").read_text())["metrics"] == {
        "eval/test_mistakes": record["num_mistakes"],
        "eval/test_kinds_of_mistakes": len(record["kinds"]),
    }


def test_mistakes_are_explained_where_that_is_asked_for():
    assert "explain" not in pipeline_stages(PipelineConfig())
    assert pipeline_stages(ASKED)[-1] == "explain"
    with pytest.raises(ConfigError, match="there is nothing to explain in this config"):
        stage_config("explain", PipelineConfig())
