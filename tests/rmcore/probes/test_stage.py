"""Stage probe on real files: the record of all rules on held-out pairs, and rules of one's own in the key."""

import json

import pytest

from rmcore.config.model import ModelConfig
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.progress import silent
from rmcore.core.store import ArtifactRef
from rmcore.core.tracking import NullTracker
from rmcore.data.table import write_pairs
from rmcore.models.device import pick_device
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.probes.settings import ProbeConfig
from rmcore.stages.order import stage_of
from single_stage import stage_with

PROBED = PipelineConfig(device="cpu", probe=ProbeConfig(rules=("padding", "off_topic")))


@pytest.mark.slow
def test_the_best_checkpoint_is_probed_on_held_out_pairs(tmp_path, gold_pairs):
    prepared, trained, out = (tmp_path / name for name in ("prepare", "train", "out"))
    for folder in (prepared, trained, out):
        folder.mkdir()
    write_pairs(gold_pairs[:60], prepared / "test.parquet")
    BradleyTerryRM.new(ModelConfig(name="tiny", max_seq_len=128), seed=0, device=pick_device("cpu")).save(
        trained / "best"
    )
    stage_with("probe", PROBED, {"prepare": prepared, "train": trained}).run(out, NullTracker(), silent)
    record = json.loads((out / "probe.json").read_text())
    assert (record["num_pairs"], record["num_prompts"]) == (30, 30)
    assert [one["rule"] for one in record["findings"]] == ["padding", "off_topic"]
    assert all(one["margin"] < 0 and one["effects"].keys() == {"chosen", "rejected"} for one in record["mistakes"])
    assert json.loads((out / "summary.json").read_text())["metrics"] == {
        "eval/test_probes_violated": len(record["violated"])
    }


def test_a_rule_of_ones_own_is_in_the_key_by_its_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    upstream = {name: ArtifactRef(name, "k", "/somewhere", "d") for name in ("prepare", "train")}

    def key(*rules):
        return stage_of("probe", PROBED.model_copy(update={"probe": ProbeConfig(rules=rules)}), upstream).key

    (tmp_path / "rules_in_a_key.py").write_text("one = 1\n")
    before = key("padding", "rules_in_a_key:one")
    assert before == key("padding", "rules_in_a_key:one") != key("padding")
    (tmp_path / "rules_in_a_key.py").write_text("one = 2\n")
    assert before != key("padding", "rules_in_a_key:one")
