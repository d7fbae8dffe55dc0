"""One training over two hosts inside a pipeline: the same command on both, a shared store, and nothing else shared."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pandas as pd
import pytest

from experiments.library import load_experiment
from flows.planning import arm_cells
from rmcore.cli.guard import FAILED
from rmcore.config.changes import change_config
from rmcore.core.errors import ConfigError
from rmcore.core.processes import marked
from rmcore.core.store import Store
from tasks.nodes import ALONE, is_helper, places, this_node
from used_homes import begin

COMMAND = [sys.executable, "-P", "-c", "from flows.cli import main; main()"]
SETTINGS = {
    "study": "hosts",
    "device": "cpu",
    "data": {"gold": {"num_prompts": 40}},
    "model": {"name": "tiny", "max_seq_len": 64},
    "train": {
        **{"steps": 16, "pairs_per_step": 4, "log_every": 1, "eval_every": 8, "num_nodes": 2, "callbacks": []},
        "resume_every_seconds": 0,
    },
    "evaluate": {"num_resamples": 100, "train_pairs": 20},
    "skip": ["landscape"],
}
LONGEST = 240


@pytest.fixture
def start(tmp_path, databases):
    """Start the command as host 0 or 1, each with a home of its own, which begins with the tools' empty databases."""
    config = tmp_path / "run.json"
    config.write_text(json.dumps(SETTINGS))
    (tmp_path / "shared").mkdir()
    started = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    def host(number):
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))},
            "RM_OPT_HOME": str(tmp_path / f"host-{number}"),
            "RM_OPT_SHARED": (tmp_path / "shared").as_uri(),
            "NODE_RANK": str(number),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        if not (tmp_path / f"host-{number}").exists():
            begin(tmp_path / f"host-{number}", databases)
        log = (tmp_path / f"host-{number}.log").open("ab")
        words = [*COMMAND, "run", "--config", str(config)]
        process = subprocess.Popen(words, env=environment, stdout=log, stderr=log, start_new_session=True)
        log.close()
        started.append((number, process))
        return process

    yield host
    for number, process in started:
        for one in marked("RM_OPT_HOME", str(tmp_path / f"host-{number}")):
            one.kill()
        process.wait()


def said(tmp_path, number):
    return (tmp_path / f"host-{number}.log").read_text()


def trained(tmp_path, number):
    return [entry for entry in Store(tmp_path / f"host-{number}" / "store").entries() if entry.stage == "train"]


def until(condition, what):
    deadline = time.monotonic() + LONGEST
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


@pytest.mark.services
def test_two_hosts_train_one_model_and_one_that_is_killed_is_resumed_by_the_same_command(start, tmp_path):
    main, helper = start(0), start(1)
    states = tmp_path / "host-0" / "store"
    until(lambda: main.poll() is not None or any(states.rglob("resume/step_*")), "host 0 saves no state")
    assert main.poll() is None, said(tmp_path, 0)
    for process in marked("RM_OPT_HOME", str(tmp_path / "host-1")):
        process.send_signal(signal.SIGKILL)
    helper.wait(LONGEST)
    assert main.wait(LONGEST) == FAILED
    assert "another process of this training has ended, or its host cannot be reached" in said(tmp_path, 0)

    # Host 1 comes back on another disk, and host 0 has prepared pairs that the store does not know.
    shutil.rmtree(tmp_path / "host-1")
    shutil.rmtree(tmp_path / "shared" / "manifests" / "prepare")
    main, helper = start(0), start(1)
    assert (main.wait(LONGEST), helper.wait(LONGEST)) == (0, 0), said(tmp_path, 0) + said(tmp_path, 1)
    assert "train resumes from step" in said(tmp_path, 0)
    assert "the training is done, and its model is here" in said(tmp_path, 1)
    assert "verdict" in said(tmp_path, 0)
    [entry], [taken] = trained(tmp_path, 0), trained(tmp_path, 1)
    assert entry.key == taken.key
    place = next((tmp_path / "host-0" / "store").rglob(f"*{entry.key[:8]}*/training.json")).parent
    record = json.loads((place / "training.json").read_text())
    assert (record["num_processes"], record["num_steps"]) == (2, 16)
    assert record["resumed_from"]
    steps = pd.read_csv(place / "metrics.csv").train_loss.dropna()
    assert (len(steps), steps.iloc[-6:].mean() < steps.iloc[:6].mean()) == (16, True)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "train.num_nodes=2 needs RM_OPT_SHARED on all hosts"),
        ({"RM_OPT_SHARED": "file:///s"}, "NODE_RANK is not set: start the same command on each of the 2 hosts"),
        ({"RM_OPT_SHARED": "file:///s", "SLURM_NODEID": "0"}, "MASTER_ADDR is not set"),
        (
            {"RM_OPT_SHARED": "file:///s", "NODE_RANK": "2", "MASTER_ADDR": "a"},
            "of train.num_nodes=2 hosts the first is 0 and the last 1",
        ),
        ({"RM_OPT_SHARED": "file:///s", "NODE_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "x"}, "MASTER_PORT=x"),
    ],
)
def test_what_is_missing_for_several_hosts_is_named(monkeypatch, variables, message):
    monkeypatch.setattr("tasks.nodes._joined", False)
    for name in ("RM_OPT_SHARED", "NODE_RANK", "SLURM_NODEID", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert not is_helper(1)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        is_helper(2)


def test_processes_of_the_second_host_are_numbered_after_those_of_the_first(monkeypatch):
    for name, value in {"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "RM_OPT_SHARED": "file:///s"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    monkeypatch.setattr("tasks.nodes._joined", False)
    with pytest.raises(ConfigError, match="is of `rm-opt run` alone"):  # as a search or a notebook would
        this_node(2)
    assert is_helper(2)
    found = places(4, this_node(2))
    assert [(one["RANK"], one["LOCAL_RANK"]) for one in found] == [(str(4 + at), str(at)) for at in range(4)]
    shared = {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    assert all(one.items() >= shared.items() for one in found)
    assert places(1, ALONE) == [{}]


def test_a_cell_of_an_experiment_is_of_one_host():
    declared = load_experiment("curriculum")
    arm = declared.arms()[0]
    config = change_config(arm.config, {"train.num_nodes": 2})
    with pytest.raises(ConfigError, match=r"train.num_nodes=2 is of `rm-opt run`"):
        arm_cells(declared, replace(arm, config=config), None)
