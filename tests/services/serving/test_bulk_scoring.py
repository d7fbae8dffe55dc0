"""`rm-opt score --engine vllm`: what the model itself gives, in parts, by as many servers as are asked for."""

import json

import numpy as np
import pandas as pd
import psutil
import pytest
from typer.testing import CliRunner

import serving_world as world
import small_vllm
from flows.cli import app
from machine import PATIENCE_S
from rmcore.core.processes import runs
from rmcore.models.reward_model import BradleyTerryRM

pytestmark = pytest.mark.services
ROWS = [{"prompt": f"what is {number}?", "response": "it is " * (1 + number % 7) + str(number)} for number in range(50)]


@pytest.fixture
def rows(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(tmp_path / "rows.jsonl")


def test_two_servers_share_the_parts_and_give_the_models_rewards(checkpoint, rows, tmp_path, monkeypatch):
    monkeypatch.setenv("RM_OPT_VLLM", str(small_vllm.make_program(tmp_path)))
    out = tmp_path / "rewards.parquet"
    rm = BradleyTerryRM.from_pretrained(checkpoint, device="cpu")
    expected = rm.score([row["prompt"] for row in ROWS], [row["response"] for row in ROWS])
    before = psutil.Process().children(recursive=True)  # with what renders templates for this process, which stays
    wanted = ["--engine", "vllm", "--actors", "2", "--part-rows", "8"]
    done = CliRunner().invoke(
        app, ["score", "--checkpoint", str(checkpoint), "--data", rows, "--out", str(out), *wanted]
    )
    assert done.exit_code == 0, done.output
    assert "50 rows scored" in done.output
    scored = pd.read_parquet(out)
    assert scored.response.tolist() == [row["response"] for row in ROWS]
    assert scored.reward.tolist() == world.close(expected.tolist())
    assert np.ptp(scored.reward) > 0.1
    started = [one for one in psutil.Process().children(recursive=True) if one not in before]
    assert not [one for one in psutil.wait_procs(started, timeout=PATIENCE_S)[1] if runs(one)]


def test_what_vllm_cannot_do_is_refused_before_it_starts(checkpoint, rows, tmp_path):
    def run(*more):
        out = str(tmp_path / "r.parquet")
        return CliRunner().invoke(
            app, ["score", "--checkpoint", str(checkpoint), "--data", rows, "--out", out, "--engine", *more]
        )

    assert "--device cpu with --engine vllm" in str(run("vllm", "--device", "cpu").exception)
    assert "--actors is of --engine ray and vllm" in str(run("local", "--actors", "2").exception)
