"""Two processes that share one model follow the trajectory of one, and either can resume from the other's state."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rmcore.core.child_process import ForkedProcess

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("sharded_training.py")


@pytest.fixture(scope="module")
def environment():
    folders = [Path.cwd(), PROGRAM.parent, PROGRAM.parents[1] / "support"]
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, folders))}


def run(folder, processes, environment, stop_at=0, **changes):
    """In processes that torchrun starts but for its imports: forked from one that has loaded torch."""
    folder.mkdir(exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    started = []
    for rank in range(processes):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1"}
        variables = {name: str(value) for name, value in (place | {"MASTER_PORT": port}).items()}
        spec, log = folder / f"spec{rank}.json", folder / f"log{rank}"
        spec.write_text(json.dumps([str(folder), stop_at, changes, variables if processes > 1 else {}]))
        with log.open("w") as told:
            started.append((ForkedProcess(PROGRAM.stem, spec, told, environment), log))
    for process, log in started:
        assert process.wait(timeout=300) == 0, log.read_text()[-3000:]


def run_by_torchrun(folder, environment):
    (folder / "spec.json").write_text(json.dumps([str(folder), 0, {}]))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, PROGRAM, folder / "spec.json"], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]


def outcome(folder):
    told = json.loads((folder / "rows.json").read_text())
    weights = torch.load(folder / "weights.pt", weights_only=True)
    return told, weights, np.load(folder / "best_rewards.npy")


def losses(told):
    return [values["train/loss"] for values in told["rows"].values() if "train/loss" in values]


@pytest.fixture(scope="module")
def alone(tmp_path_factory, environment):
    folder = tmp_path_factory.mktemp("alone")
    run(folder, 1, environment)
    return outcome(folder)


def assert_follows(folder, alone):
    told, weights, rewards = outcome(folder)
    expected_told, expected_weights, expected_rewards = alone
    assert len(losses(told)) == 20
    np.testing.assert_allclose(losses(told), losses(expected_told), rtol=1e-5)
    for step, values in expected_told["rows"].items():
        for name in ("train/pairwise_accuracy", "train/mean_margin", "train/grad_norm", "eval/loss", "eval/num_pairs"):
            if name in values:
                assert told["rows"][step][name] == pytest.approx(values[name], rel=1e-4, abs=1e-6), (step, name)
    assert weights.keys() == expected_weights.keys()
    for name, tensor in expected_weights.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(rewards, expected_rewards, atol=1e-4)
    return told


def test_two_processes_follow_the_trajectory_of_one(tmp_path, alone, environment):
    run_by_torchrun(tmp_path, environment)
    told = assert_follows(tmp_path, alone)
    assert told["result"]["num_processes"] == 2
    assert told["result"]["num_pairs"] == alone[0]["result"]["num_pairs"]
    assert told["result"]["num_real_tokens"] == alone[0]["result"]["num_real_tokens"]
    from transformers import AutoModelForSequenceClassification

    # What they leave is a plain checkpoint.
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "step_20", dtype=torch.float64)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(tensor, alone[1][name], rtol=1e-5, atol=1e-5)


def test_a_training_goes_on_with_another_number_of_processes_twice(tmp_path, alone, environment):
    """With checkpointing and another budget, which change the trajectory as little."""
    changes = {"gradient_checkpointing": True, "token_budget": 1200}
    run(tmp_path, 2, environment, stop_at=8, **changes)
    run(tmp_path, 1, environment, stop_at=14, **changes)
    assert not (tmp_path / "rows.json").exists()
    run(tmp_path, 2, environment, **changes)
    told = assert_follows(tmp_path, alone)
    assert told["result"]["resumed_from"] == [7, 13]
