"""The page for those who come from TRL: both trainings that it shows side by side are run, and start from one loss."""

import json
import re
import shlex
from pathlib import Path

import pandas as pd
import pytest

from flows.cli import app

PAGE = (Path(__file__).parents[1] / "docs/from-trl.md").read_text()
PAIRS_OF_A_STEP = 16


def block(language):
    """The first block of a language."""
    return re.search(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)[1]


@pytest.fixture
def files(gold_pairs, tmp_path, monkeypatch):
    """train.parquet and test.parquet, as the page calls them, in the current folder.

    As many pairs as a step takes: both sides then see all of them in each step, in whatever order.
    """
    monkeypatch.chdir(tmp_path)
    for name, pairs in (("train", gold_pairs[:PAIRS_OF_A_STEP]), ("test", gold_pairs[PAIRS_OF_A_STEP:24])):
        rows = [
            {
                "prompt": [{"role": "user", "content": pair.prompt}],
                "chosen": [{"role": "assistant", "content": pair.chosen}],
                "rejected": [{"role": "assistant", "content": pair.rejected}],
            }
            for pair in pairs
        ]
        pd.DataFrame(rows).to_parquet(f"{name}.parquet")


def put(text, *changes):
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


@pytest.mark.slow
def test_both_sides_of_the_page_run_and_begin_with_the_same_loss(files, tiny_folder):
    """Two steps in float32 on a CPU, without warm-up, which two steps have no room for; the rest of the page stays.

    The second loss is that after one update: optimizer, rate and what decays are the same, too.
    """
    theirs = put(
        block("python"),
        ('model="Qwen/Qwen3-0.6B"', f"model={str(tiny_folder)!r}"),
        ('output_dir="out",', 'output_dir="trl", use_cpu=True, bf16=False, logging_steps=1, report_to="none",'),
        ("num_train_epochs=1", "num_train_epochs=2"),
        ("warmup_steps=50", "warmup_steps=0"),
        ("out/last", "trl/last"),
    )
    names = {}
    exec(compile(theirs, "docs/from-trl.md", "exec"), names)
    their_loss = [row["loss"] for row in names["trainer"].state.log_history if "loss" in row]

    ours = put(block("bash").replace("\\\n", " "), ("Qwen/Qwen3-0.6B", str(tiny_folder)), ("--epochs 1", "--epochs 2"))
    words = shlex.split(put(ours, ("--precision bf16", "--precision fp32"), ("--warmup-steps 50", "--warmup-steps 0")))
    assert words[:2] == ["rm-opt", "train"]
    app([*words[1:], "--log-every", "1", "--device", "cpu"], standalone_mode=False)
    logged = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    our_loss = [row["metrics"]["train/loss"] for row in logged if "train/loss" in row.get("metrics", {})]

    assert len(their_loss) == len(our_loss) == 2
    assert our_loss == pytest.approx(their_loss, abs=1e-4)
    assert abs(our_loss[0] - our_loss[1]) > 5e-4
