"""`rm-opt ensemble` from checkpoints to a folder that loads, a figure and a record."""

import json

import pytest
import torch
from typer.testing import CliRunner

from rmcore.cli import app
from rmcore.config.data import GoldConfig
from rmcore.core.errors import ConfigError, DataError
from rmcore.data.gold.world import generate_pairs
from rmcore.data.table import write_pairs
from rmcore.ensembles.ensemble import RewardModelEnsemble
from rmcore.ensembles.features import head_of
from rmcore.models.reward_model import BradleyTerryRM

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def home(tiny_folder, tmp_path_factory):
    """Two untrained checkpoints, pairs and pairs unlike them."""
    folder = tmp_path_factory.mktemp("ensemble")
    for number in range(2):
        rm = BradleyTerryRM.from_pretrained(tiny_folder, device="cpu", max_seq_len=128)
        with torch.no_grad():
            generator = torch.Generator().manual_seed(number)
            head_of(rm).weight.add_(torch.randn(head_of(rm).weight.shape, generator=generator))
        rm.save(folder / f"m{number}")
    world = generate_pairs(GoldConfig(num_prompts=60, pairs_per_prompt=2), seed=5)
    write_pairs(world.pairs, folder / "pairs.parquet")
    write_pairs(world.ood_pairs, folder / "ood.parquet")
    return folder


def run(home, *arguments):
    options = ["--data", str(home / "pairs.parquet"), "--device", "cpu", "--num-resamples", "100", "--share", "0.9"]
    return CliRunner().invoke(app, ["ensemble", *options, *arguments])


def check_record(out, groups, num_members):
    record = json.loads((out / "report.json").read_text())
    assert record["accuracy"].keys() == record["flagged"].keys() == set(groups)
    for group in groups:
        assert len(record["accuracy"][group]) == num_members + 2
        assert 0 <= record["flagged"][group] <= 1
        assert all(0 <= one["value"] <= 1 for one in record["accuracy"][group].values())
    return record


def test_checkpoints_become_an_ensemble(home, tmp_path):
    out = tmp_path / "out"
    members = ["--checkpoint", str(home / "m0"), "--checkpoint", str(home / "m1")]
    result = run(
        home, *members, "--ood", str(home / "ood.parquet"), "--out", str(out), "--json", str(out / "also.json")
    )
    assert result.exit_code == 0, result.output
    assert "2 members on 1 different backbone," in result.output
    assert "by disagreement" in result.output
    assert "by response length" in result.output
    record = check_record(out, ["in distribution", "out of distribution"], 2)
    assert json.loads((out / "also.json").read_text()) == record
    assert set(record["detection"]) == {"disagreement", "response_length"}
    assert (out / "disagreement.png").read_bytes().startswith(b"\x89PNG")
    loaded = RewardModelEnsemble.load(out, device="cpu")
    assert loaded.uncertainty_threshold == record["calibration"]["threshold"]
    assert loaded.detect_ood(["What is 2 + 2?"], ["4"]).shape == (1,)


def test_the_gold_world_brings_its_own_pairs_out_of_distribution(home, tmp_path):
    out = tmp_path / "out"
    members = ["--checkpoint", str(home / "m0"), "--checkpoint", str(home / "m1")]
    result = run(home, *members, "--data", "gold", "--limit", "60", "--out", str(out))
    assert result.exit_code == 0, result.output
    check_record(out, ["in distribution", "out of distribution"], 2)


def test_too_few_pairs_are_refused(home, tmp_path):
    members = ["--checkpoint", str(home / "m0"), "--checkpoint", str(home / "m1")]
    result = run(home, *members, "--limit", "1", "--out", str(tmp_path))
    assert isinstance(result.exception, DataError)
    result = run(home, *members, "--limit", "4", "--out", str(tmp_path))
    assert isinstance(result.exception, ConfigError)
    assert "calibrate on at least 9" in str(result.exception)
