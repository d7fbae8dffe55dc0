"""A training that is killed again and again ends in the same bits as one that was left alone."""

import json
import random
import signal
import time

import pytest

from fresh_forks import fork, rm_opt
from rmcore.core.files import file_digest
from rmcore.data.table import write_pairs

pytestmark = pytest.mark.slow

KILLS = 4
STEPS = 60


@pytest.fixture
def command(tmp_path, gold_pairs):
    write_pairs(gold_pairs[:60], tmp_path / "train.parquet")
    write_pairs(gold_pairs[60:80], tmp_path / "eval.parquet")

    def of(folder, *more):
        return [
            "train", "--model", "tiny", "--max-seq-len", 64, "--data", tmp_path / "train.parquet",
            "--eval-data", tmp_path / "eval.parquet", "--output-dir", tmp_path / folder, "--steps", STEPS,
            "--batch-size", 4, "--lr", 1e-3, "--log-every", 3, "--eval-every", 7, "--keep-top-k", 2, "--save-every", 25,
            "--micro-token-budget", 512, "--early-stopping-patience", 50, *more,
        ]  # fmt: skip

    return of


def outcome(folder):
    """What must not differ: weights, and everything measured but time."""
    weights = {str(path.relative_to(folder)): file_digest(path) for path in sorted(folder.rglob("*.safetensors"))}
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    measured = [
        (row["step"], {name: value for name, value in row["metrics"].items() if not name.startswith("cost/")})
        for row in rows
    ]
    rewards = (folder / "reward_distributions.json").read_text()
    return weights, measured, rewards, (folder / "metrics.csv").read_text()


def states(folder):
    return {path.name for path in (folder / "resume").glob("step_*")}


def is_writing(folder):
    """Whether a state is being written, or was when the process ended."""
    return any((folder / "resume").glob(".step_*.tmp"))


def test_killed_at_random_moments_it_ends_in_the_same_bits(tmp_path, command):
    # LoRA with dropout: frozen weights, adapters, optimizer state and random numbers all matter.
    lora = ["--lora", "--lora-dropout", 0.2]
    undisturbed = fork(tmp_path / "undisturbed.log", rm_opt, command("undisturbed", *lora))
    undisturbed.join()
    assert undisturbed.exitcode == 0, (tmp_path / "undisturbed.log").read_text()

    chance = random.Random(0)  # noqa: S311
    folder, log = tmp_path / "killed", tmp_path / "killed.log"
    killed, torn, process = 0, 0, None
    while process is None or process.exitcode:
        before = states(folder)
        every = 0 if killed < KILLS else 300
        process = fork(log, rm_opt, command("killed", "--resume-every-seconds", every, *lora))
        if killed < KILLS:
            in_mid_write = killed % 2 == 1
            while process.is_alive() and not (states(folder) - before and is_writing(folder) >= in_mid_write):
                time.sleep(0.001)
            if not in_mid_write:
                time.sleep(chance.uniform(0, 0.15))
            process.kill()  # which does nothing to one that a busy machine let end first
        process.join()
        torn += is_writing(folder)
        killed += process.exitcode == -signal.SIGKILL
        assert process.exitcode in (0, -signal.SIGKILL), log.read_text()
    said = log.read_text()
    assert killed >= 2, said
    assert torn, "no kill hit the thread that writes a state"
    assert said.count("resumed from step") >= killed - 1, said
    record = json.loads((folder / "training.json").read_text())
    assert record["num_steps"] == STEPS
    assert record["resumed_from"] == sorted(record["resumed_from"])
    assert len(record["resumed_from"]) >= 2
    assert not (folder / "resume").exists()
    assert outcome(folder) == outcome(tmp_path / "undisturbed")
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".") and path.name != ".lock"]
