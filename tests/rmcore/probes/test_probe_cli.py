"""`rm-opt probe` from a checkpoint and a file to a table, a record, and training data that repair what was found."""

import json

import pytest
import torch
from typer.testing import CliRunner

from flows.cli import app
from rmcore.core.errors import ConfigError, DataError
from rmcore.data.readers.sources import load_pairs
from rmcore.data.table import write_pairs
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.probes.rules import RULE_KEY, RULES


@pytest.fixture(scope="module")
def files(tmp_path_factory, gold_pairs, tiny_folder):
    """Pairs to measure and pairs to train on, of other prompts, beside a model that knows nothing."""
    folder = tmp_path_factory.mktemp("probe")
    write_pairs(gold_pairs[:60], folder / "test.parquet")
    write_pairs(gold_pairs[60:], folder / "train.parquet")
    with torch.random.fork_rng():
        BradleyTerryRM.from_pretrained(tiny_folder, device="cpu", max_seq_len=128).save(folder / "model")
    return folder


def run(files, *words):
    own = ("probe", "--checkpoint", files / "model", "--data", files / "test.parquet")
    done = CliRunner().invoke(app, [str(word) for word in (*own, *words)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.slow
def test_all_rules_are_told_recorded_and_repaired(files, tmp_path):
    repair = ("--repair", tmp_path / "repaired.parquet", "--repair-data", files / "train.parquet")
    said = run(files, "--pairs-per-prompt", "1", "--json", tmp_path / "found.json", *repair)
    assert "30 of 60 pairs are measured, at most 1 of a prompt" in said
    record = json.loads((tmp_path / "found.json").read_text())
    assert (record["num_pairs"], record["num_prompts"]) == (30, 30)
    assert [one["rule"] for one in record["findings"]] == list(RULES)
    for one in record["findings"]:
        assert any(one["rule"] in row.split("│")[2:3][0] for row in said.splitlines() if row.count("│") > 3)
        assert (one["verdict"] == "violated") == (one["rule"] in record["violated"])
        assert one["verdict"] != "violated" or one["p_adjusted"] < record["tolerated"]["familywise_level"]
    assert record["violated"]  # it knows nothing
    for name in record["violated"]:
        assert name in said.partition("are shown to be violated")[2].partition(".\n")[0]
        assert next(one["worst"] for one in record["findings"] if one["rule"] == name)
    pairs = load_pairs(str(tmp_path / "repaired.parquet")).pairs
    added = [pair.metadata[RULE_KEY] for pair in pairs if RULE_KEY in pair.metadata]
    assert set(added) == set(record["violated"]) == set(record["repair"]["num_counterfactual"])
    assert len(pairs) - len(added) == record["repair"]["num_pairs"] == 180
    with pytest.raises(DataError, match="is there already"):
        run(files, *repair)


def test_one_rule_that_holds_leaves_nothing_to_repair(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_rule_that_holds.py").write_text(
        "from rmcore.probes.rule import not_higher\n"
        "@not_higher\ndef nothing(answer, rng):\n    '''A space at the end.'''\n    return answer.text + ' '\n"
    )
    repair = ("--repair", tmp_path / "none.jsonl", "--repair-data", files / "train.parquet")
    said = run(files, "--rule", "own_rule_that_holds:nothing", "--limit", "24", *repair)
    assert "own_rule_that_holds:nothing" in said
    assert "None of 1 rules is shown to be violated" in said
    assert "is not written: no rule is shown to be violated" in said
    assert not (tmp_path / "none.jsonl").exists()


@pytest.mark.slow
def test_what_would_spoil_the_measurement_is_refused(files, tmp_path):
    repair = ("--repair", tmp_path / "r.parquet")
    with pytest.raises(ConfigError, match="--repair FILE and --repair-data TRAINING go together"):
        run(files, *repair)
    with pytest.raises(ConfigError, match=r"30 prompts of --repair-data .* are among those that are measured"):
        run(files, "--rule", "shuffled_words", *repair, "--repair-data", files / "test.parquet")
    with pytest.raises(DataError, match=r"ends neither in \.parquet nor in \.jsonl"):
        run(files, "--repair", tmp_path / "r.csv", "--repair-data", files / "train.parquet")


def test_the_worst_mistakes_are_taken_apart_where_requested(files, tmp_path):
    said = run(files, "--rule", "padding", "--explain", "--json", tmp_path / "found.json")
    mistakes = json.loads((tmp_path / "found.json").read_text())["mistakes"]
    assert [one["margin"] for one in mistakes] == sorted(one["margin"] for one in mistakes)
    assert mistakes[-1]["margin"] < 0
    assert all(f"pair {one['pair_id']}" in said for one in mistakes)
    assert any(one["effects"]["chosen"] for one in mistakes)
