"""Trainings that meet in one folder, whose launcher is killed, or whose output is not read."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest
import torch

from command_line import rm_opt
from machine import PATIENCE_S, free_ports, wait_for
from rmcore.cli.train import LOCK_FILE
from rmcore.config.data import GoldConfig
from rmcore.core.errors import ConfigError
from rmcore.core.files import is_free, try_exclusive
from rmcore.data.gold.world import generate_pairs
from rmcore.data.table import write_pairs
from rmcore.training.sharding import process_group

PROGRAM = (sys.executable, "-P", "-c", "from flows.cli import main; main()", "train")
JOIN = """
from datetime import timedelta
from torch import device
from rmcore.training import sharding
sharding.PATIENCE = timedelta()
with sharding.process_group(device("cpu")):
    pass
"""
"""What a training does first where it is one of several, without patience."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    place = tmp_path_factory.mktemp("data") / "train.parquet"
    write_pairs(generate_pairs(GoldConfig(num_prompts=20, pairs_per_prompt=2), seed=0).pairs, place)
    return place


def words(pairs, model, out, *more):
    given = ["--model", model, "--data", pairs, "--batch-size", "4", "--max-seq-len", "32", "--device", "cpu"]
    return [str(word) for word in (*given, "--output-dir", out, "--log-every", "1", *more)]


def start(*arguments, **options):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*PROGRAM, *arguments], text=True, env=environment, **options)


def test_a_folder_that_is_trained_into_is_refused_and_nothing_in_it_is_touched(tmp_path, pairs, tiny_folder):
    out = tmp_path / "out"
    with try_exclusive(out / LOCK_FILE):
        (out / ".pairs-theirs-0").mkdir()
        (out / "training.json").write_text('{"stop_reason": "all steps done"}')
        before = sorted(out.rglob("*"))
        for more in ((), ("--num-processes", "2")):
            done = rm_opt("train", *words(pairs, tiny_folder, out, "--steps", "1", *more))
            assert done.status == 2
            assert f"another process is training into {out}" in done.err
            assert sorted(out.rglob("*")) == before


@pytest.mark.slow
def test_a_training_that_was_given_a_place_among_others_says_whom_it_waits_for(monkeypatch):
    """Such as in a shell that has the variables of another training; nobody else will come."""
    [port] = free_ports(1)
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    with subprocess.Popen([sys.executable, "-P", "-c", JOIN], stderr=subprocess.PIPE, text=True) as waiting:
        try:
            said = next(line for line in waiting.stderr if line.startswith("note: RANK="))
        finally:
            waiting.kill()
    assert "RANK=1 of WORLD_SIZE=2" in said
    assert f"127.0.0.1:{port}" in said
    assert "unset RANK and WORLD_SIZE" in said
    monkeypatch.setenv("MASTER_ADDR", "")
    with pytest.raises(ConfigError, match="unset RANK and WORLD_SIZE"), process_group(torch.device("cpu")):
        pass


def test_a_training_that_cannot_begin_leaves_what_was_there(tmp_path, tiny_folder):
    (tmp_path / "cut.jsonl").write_text("{")
    for out, kept in ((tmp_path / "new", None), (tmp_path / "old", ["notes.md"])):
        if kept:
            out.mkdir()
            (out / "notes.md").write_text("mine")
        done = rm_opt("train", *words(tmp_path / "cut.jsonl", tiny_folder, out))
        assert done.status == 2
        assert "cut.jsonl" in done.err
        found = sorted(path.name for path in out.iterdir() if path.name != LOCK_FILE) if out.exists() else None
        assert found == kept


@pytest.mark.slow
def test_of_two_trainings_that_begin_together_one_trains_though_nobody_reads_its_output(tmp_path, pairs, tiny_folder):
    out = tmp_path / "out"
    reader, writer = os.pipe()
    os.close(reader)
    given = words(pairs, tiny_folder, out, "--steps", "3")
    both = [start(*given, stdout=writer, stderr=subprocess.PIPE) for _ in range(2)]
    os.close(writer)
    said = [one.communicate(timeout=PATIENCE_S)[1] for one in both]
    assert sorted(one.returncode for one in both) == [0, 2], said
    trained, refused = (said[[one.returncode for one in both].index(status)] for status in (0, 2))
    assert trained.count("standard output") == 1
    assert "another process is training into" in refused or "already holds a finished training" in refused
    assert json.loads((out / "training.json").read_text())["num_steps"] == 3
    assert (out / "best" / "model.safetensors").is_file()


@pytest.mark.slow
def test_several_processes_hold_the_folder_and_end_with_their_launcher(tmp_path, pairs, tiny_folder):
    out = tmp_path / "out"
    arguments = words(pairs, tiny_folder, out, "--steps", "100000", "--num-processes", "2")
    with (tmp_path / "log").open("w") as log, start(*arguments, stdout=log, stderr=log) as launcher:
        trained = out / "metrics.jsonl"
        wait_for(lambda: launcher.poll() is not None or (trained.is_file() and trained.stat().st_size), "a first step")
        workers = psutil.Process(launcher.pid).children(recursive=True)
        assert len(workers) >= 2
        assert not is_free(out / LOCK_FILE)
        launcher.send_signal(signal.SIGKILL)
    _gone, alive = psutil.wait_procs(workers, timeout=PATIENCE_S)
    for process in alive:
        process.kill()
    assert not alive
    assert is_free(out / LOCK_FILE)
