"""The command line that the documentation promises, as written, with local data in place of the hub."""

import csv
import json
import pickle
import shlex
from dataclasses import FrozenInstanceError, replace

import pytest
from datasets import Dataset, DatasetDict

from command_line import rm_opt, succeeded
from rmcore.core.errors import DataError
from rmcore.data.pair import PreferencePair
from rmcore.data.table import write_pairs
from rmcore.models.reward_model import BradleyTerryRM

pytestmark = pytest.mark.slow

AS_WRITTEN = """
    --model Qwen/Qwen2.5-0.5B --hf-dataset stanfordnlp/SHP --hf-split train --limit 5000 --steps 1000 --batch-size 16
    --micro-token-budget 8192 --max-seq-len 1024 --lr 5e-6 --weight-decay 0.01 --warmup-steps 50 --lr-scheduler cosine
    --beta 1.0 --regularization-lambda 0.001 --label-smoothing 0.05 --lora --lora-rank 8 --eval-split test
    --eval-limit 1000 --eval-every 100 --early-stopping-patience 5 --profile-memory --output-dir checkpoints_rm_v2
"""
SMALLER = {"--limit": "40", "--steps": "4", "--batch-size": "4", "--eval-limit": "12", "--eval-every": "2"}


@pytest.fixture
def shp(tmp_path, gold_pairs):
    """Local pairs in the columns of SHP, with its splits."""

    def rows(pairs):
        return Dataset.from_list(
            [
                {
                    "history": pair.prompt,
                    "human_ref_A": pair.chosen if index % 2 else pair.rejected,
                    "human_ref_B": pair.rejected if index % 2 else pair.chosen,
                    "labels": index % 2,
                    "score_ratio": 2.0,
                }
                for index, pair in enumerate(pairs)
            ]
        )

    DatasetDict({"train": rows(gold_pairs[:60]), "test": rows(gold_pairs[60:90])}).save_to_disk(tmp_path / "shp")
    return tmp_path / "shp"


def test_the_documented_command_works_with_local_data(tmp_path, shp, tiny_folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(AS_WRITTEN)
    replaced = {"Qwen/Qwen2.5-0.5B": str(tiny_folder), "stanfordnlp/SHP": str(shp)}
    words = [replaced.get(word, word) for word in words]
    for flag, value in SMALLER.items():
        words[words.index(flag) + 1] = value
    said = succeeded("train", *words)
    out = tmp_path / "checkpoints_rm_v2"
    with (out / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [
        "step", "train_loss", "train_acc", "train_margin", "eval_loss", "eval_acc", "eval_margin", "eval_pairs",
    ]  # fmt: skip
    assert [row["step"] for row in rows if row["eval_pairs"]] == ["2", "4"]
    assert rows[-1]["eval_pairs"] == "12.0"
    assert {"chosen", "rejected"} == set(json.loads((out / "reward_distributions.json").read_text())["validation"])
    record = json.loads((out / "training.json").read_text())
    assert record["num_steps"] == 4
    assert record["num_trained_parameters"] < 0.2 * record["num_parameters"]
    assert (out / "step_4").is_dir()
    assert "cost/host_mib" in (out / "metrics.jsonl").read_text()
    assert "peak memory" in said
    assert BradleyTerryRM.from_pretrained(out / "best", device="cpu").score_pair("1 + 1?", "2", "3") != 0


def test_short_flags_a_named_folder_and_named_lora_targets(tmp_path, gold_pairs, monkeypatch):
    """The tutorial's short form: nothing but model, data, epochs and batch size has to be said."""
    monkeypatch.chdir(tmp_path)
    write_pairs(gold_pairs[:16], tmp_path / "pairs.parquet")
    train = shlex.split("train -m tiny -d pairs.parquet -e 1 -b 8 --max-seq-len 96 --lora --lora-target-modules")
    said = succeeded(*train, "q_proj,v_proj")
    out = tmp_path / "checkpoints"
    assert str(out.name) in said
    assert json.loads((out / "training.json").read_text())["num_steps"] == 2
    adapter = json.loads((out / "best" / "adapter" / "adapter_config.json").read_text())
    assert set(adapter["target_modules"]) == {"q_proj", "v_proj"}
    succeeded(*shlex.split("evaluate -c checkpoints/best -d pairs.parquet --num-resamples 100"))
    status, _, said = rm_opt(*train, "q_proj,nothing", "-o", "other")
    assert status == 2
    assert "nothing" in said
    assert "k_proj" in said  # a name that exists is shown next to the one that does not


def test_a_pair_takes_the_tutorials_word_for_its_margin():
    pair = PreferencePair(prompt="1 + 1?", chosen="2", rejected="3", margin=0.5, metadata={"source": "me"})
    assert pair == PreferencePair("1 + 1?", "2", "3", 0.5, {"source": "me"})
    assert pair.margin == pair.target_margin == pair.to_dict()["margin"] == 0.5
    assert PreferencePair("1 + 1?", "2", "3").margin is None
    assert replace(pair, margin=None, target_margin=None).margin is None
    assert replace(pair, target_margin=2.0).margin == 2.0
    assert pickle.loads(pickle.dumps(pair)) == pair  # noqa: S301 - what was just written
    with pytest.raises(DataError, match="two names of one thing"):
        PreferencePair("1 + 1?", "2", "3", target_margin=1.0, margin=1.0)
    with pytest.raises(FrozenInstanceError):
        pair.target_margin = 1.0
