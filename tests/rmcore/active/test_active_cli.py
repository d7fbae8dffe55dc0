"""From a pool to a CSV and back, on the command line."""

import csv

import pytest
import torch

from rmcore.cli import app
from rmcore.cli.guard import guard
from rmcore.config.data import GoldConfig
from rmcore.config.model import ModelConfig
from rmcore.data.gold.world import generate_pairs
from rmcore.data.table import read_pairs, write_pairs
from rmcore.models.reward_model import BradleyTerryRM

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A checkpoint, a pool, and pairs of it that are labelled already."""
    folder = tmp_path_factory.mktemp("active")
    rm = BradleyTerryRM.new(ModelConfig(name="tiny", max_seq_len=128), seed=0, device=torch.device("cpu"))
    rm.save(folder / "rm")
    pairs = generate_pairs(GoldConfig(num_prompts=20, pairs_per_prompt=2), seed=5).pairs
    write_pairs(pairs, folder / "pool.parquet")
    write_pairs(pairs[:10], folder / "labelled.parquet")
    return folder


def run(*arguments):
    return guard(lambda: app([str(argument) for argument in arguments], standalone_mode=False))


def rows_of(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("acquisition", ["random", "entropy", "variance", "bald", "d-optimal"])
def test_a_pool_becomes_a_file_to_label_and_labels_become_pairs(place, tmp_path, acquisition):
    pool = ["--pool", place / "pool.parquet"]
    known = ["--labelled", place / "labelled.parquet", "--heads", 3]
    chosen = ["--acquisition", acquisition, "--k", 5, "--max-per-prompt", 1, "--out", tmp_path / "to_label.csv"]
    assert run("active", "propose", *pool, "--checkpoint", place / "rm", *known, *chosen) == 0
    rows = rows_of(tmp_path / "to_label.csv")
    already = {pair.pair_id for pair in read_pairs(place / "labelled.parquet")}
    assert len({row["pair_id"] for row in rows} - already) == 5
    assert len({row["prompt"] for row in rows}) == 5
    assert {row["preferred"] for row in rows} == {""}
    with (tmp_path / "to_label.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows([row | {"preferred": "b"} for row in rows])
    out = tmp_path / "new.jsonl"
    assert run("active", "ingest", "--labels", tmp_path / "to_label.csv", *pool, "--out", out) == 0
    from rmcore.data.readers.sources import load_pairs

    back = {pair.pair_id: pair.chosen for pair in load_pairs(str(out)).pairs}
    assert back == {row["pair_id"]: row["response_b"] for row in rows}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--k", 41], "41 pairs are asked for"),
        (["--acquisition", "bald"], "how much members disagree"),
        (["--heads", 4], "name them with --labelled"),
    ],
)
def test_a_wrong_call_is_one_message(place, tmp_path, capsys, change, words):
    call = ["--pool", place / "pool.parquet", "--checkpoint", place / "rm", "--out", tmp_path / "x.csv", *change]
    assert run("active", "propose", *call) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "x.csv").exists()
