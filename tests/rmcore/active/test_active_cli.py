"""From a pool to a CSV and back, on the command line."""

import json
from collections import Counter

import pytest
import torch

from judge_server import judge_server
from label_sheets import fill, rows_of
from rmcore.active.labels import write_proposal
from rmcore.cli import app
from rmcore.cli.guard import WAITING, guard
from rmcore.config.data import GoldConfig
from rmcore.config.model import ModelConfig
from rmcore.data.gold.world import generate_pairs, gold_reward
from rmcore.data.table import read_pairs, write_pairs
from rmcore.models.reward_model import BradleyTerryRM

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two checkpoints, a pool, and pairs of it that are labelled already."""
    folder = tmp_path_factory.mktemp("active")
    rm = BradleyTerryRM.new(ModelConfig(name="tiny", max_seq_len=128), seed=0, device=torch.device("cpu"))
    rm.save(folder / "rm")
    torch.nn.init.normal_(rm.model.score.weight)
    rm.save(folder / "another")
    pairs = generate_pairs(GoldConfig(num_prompts=20, pairs_per_prompt=2), seed=5).pairs
    write_pairs(pairs, folder / "pool.parquet")
    write_pairs(pairs[:10], folder / "labelled.parquet")
    return folder


def run(*arguments):
    return guard(lambda: app([str(argument) for argument in arguments], standalone_mode=False))


@pytest.mark.parametrize("acquisition", ["random", "variance"])
def test_a_pool_becomes_a_file_to_label_and_labels_become_pairs(place, tmp_path, acquisition):
    pool = ["--pool", place / "pool.parquet"]
    known = ["--labelled", place / "labelled.parquet", "--checkpoint", place / "another"]
    chosen = ["--acquisition", acquisition, "--k", 5, "--max-per-prompt", 1, "--out", tmp_path / "to_label.csv"]
    assert run("data", "propose", *pool, "--checkpoint", place / "rm", *known, *chosen) == 0
    rows = rows_of(tmp_path / "to_label.csv")
    already = {pair.pair_id for pair in read_pairs(place / "labelled.parquet")}
    assert len({row["pair_id"] for row in rows} - already) == 5
    assert len({row["prompt"] for row in rows}) == 5
    assert {row["preferred"] for row in rows} == {""}
    fill(tmp_path / "to_label.csv", lambda row: "b")
    out = tmp_path / "new.jsonl"
    assert run("data", "ingest", "--labels", tmp_path / "to_label.csv", *pool, "--out", out) == 0
    from rmcore.data.readers.sources import load_pairs

    back = {pair.pair_id: pair.chosen for pair in load_pairs(str(out)).pairs}
    assert back == {row["pair_id"]: row["response_b"] for row in rows}


def test_a_wrong_call_is_one_message(place, tmp_path, capsys):
    call = ["--pool", place / "pool.parquet", "--checkpoint", place / "rm", "--out", tmp_path / "x.csv", "--k", 41]
    assert run("data", "propose", *call) == 2
    assert "41 pairs are requested" in capsys.readouterr().err
    assert not (tmp_path / "x.csv").exists()


def said(prompt, first, second):
    """The gold world's preference, C for a tie; of some pairs nothing that can be read."""
    apart = gold_reward(prompt, first) - gold_reward(prompt, second)
    if (len(first) + len(second)) % 5 == 0:
        return "hm"
    return "A" if apart > 0 else "B" if apart < 0 else "C"


def test_a_judge_labels_what_people_left_empty_and_a_spent_budget_continues(place, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RM_OPT_HOME", str(tmp_path / "home"))
    pool = read_pairs(place / "pool.parquet")
    sheet, out = write_proposal(pool, tmp_path / "to_label.csv", seed=0), tmp_path / "labelled.jsonl"
    rows = rows_of(sheet)
    by_people = {row["pair_id"] for row in rows[:3]}
    fill(sheet, lambda row: "a" if row["pair_id"] in by_people else "")
    with judge_server(lambda one: said(*one.texts)) as server:
        call = ["data", "ingest", "--labels", sheet, "--pool", place / "pool.parquet", "--out", out]
        call += ["--judge", server.named, "--mode", "pairwise", "--max-calls", 30]
        ends = 0
        while (status := run(*call)) == WAITING:
            ends += 1
            assert not out.exists()
        assert status == 0
        assert ends >= 2
        messages = [json.dumps(one.body["messages"]) for one in server.asked]
        assert len(set(messages)) == len(messages)
        asked = len(server.asked)
        assert run(*call) == 2  # labelled already, which is seen before anybody is asked
        assert len(server.asked) == asked
    labelled = {row["pair_id"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert all(labelled[row["pair_id"]]["chosen"] == row["response_a"] for row in rows[:3])
    answers = {row["pair_id"]: said(row["prompt"], row["response_a"], row["response_b"]) for row in rows[3:]}
    counts = Counter(answers.values())
    assert min(counts["C"], counts["hm"]) > 0
    shown = capsys.readouterr().out
    assert f"{counts['C']} ties and {counts['hm']} unread" in shown
    assert f"{asked - 30 * ends} calls" in shown  # of the last run
    assert len(labelled) == 3 + counts["A"] + counts["B"]
    for row in rows[3:]:
        if answers[row["pair_id"]] in "AB":
            label = labelled[row["pair_id"]]
            assert label["annotator"] == "the language model judge-1"
            assert label["chosen"] == row[f"response_{answers[row['pair_id']].lower()}"]
