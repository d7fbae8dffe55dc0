"""A worker of another machine sends its password only where the key is, and ends with its runs where it is not."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from flows.worker import Cluster, Worker, find_cluster
from machine import PATIENCE_S
from rmcore.core.errors import ConfigError, ServiceError
from rmcore.core.processes import runs
from tasks.guarded_server import Guard
from tasks.passwords import Identity, read_key

KNOWN = Identity("k" * 43, "e" * 43)
WORKER = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"], start_new_session=True)
time.sleep(600)
"""


@pytest.fixture
def worker():
    """Stands for Prefect's worker: a process with a run below it, in a session of its own."""
    with subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        found = psutil.Process(process.pid)
        yield found
        for one in (*found.children(recursive=True), found) if runs(found) else ():
            one.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answering", "said"),
    [
        (KNOWN, None),
        (KNOWN._replace(key="o" * 43), "did not prove that it is a server of `rm-opt up` with this key"),
        (KNOWN._replace(era="n" * 43), "were started again and have other passwords"),
        (None, None),
    ],
    ids=["the same", "another program", "started again", "away"],
)
def test_a_worker_and_its_runs_end_where_another_program_answers(monkeypatch, tmp_path, serve, worker, answering, said):
    monkeypatch.setattr(os, "environ", os.environ | {"RM_OPT_HOME": str(tmp_path)})
    away = "http://127.0.0.1:9"
    address = away if answering is None else serve(lambda own: Guard(None, own, "password", answering))
    mine = [*worker.children(recursive=True), worker]
    assert len(mine) == 2
    checked = Worker(Cluster(address, address, None), KNOWN, "name", 1)
    if said is None:
        checked.require_same_servers(worker)
        assert all(map(runs, mine))
    else:
        with pytest.raises(ServiceError, match=said):
            checked.require_same_servers(worker)
        assert not any(map(runs, psutil.wait_procs(mine, timeout=PATIENCE_S)[1]))


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ("nowhere", "is no address: write that of Prefect"),
        ("http://127.0.0.1:9", "does not answer as Prefect of `rm-opt up`"),
        ("another", "did not prove that it is a server of `rm-opt up`"),
    ],
)
def test_a_worker_that_cannot_begin_says_why(monkeypatch, tmp_path, serve, server, said):
    monkeypatch.setattr(os, "environ", {**os.environ})
    (tmp_path / "key").write_text("o" * 43)
    address = serve(lambda own: Guard(None, own, "password", KNOWN)) if server == "another" else server
    with pytest.raises((ConfigError, ServiceError), match=said):
        find_cluster(address, read_key(tmp_path / "key"))


def test_a_worker_without_a_key_says_where_it_is_to_be_had():
    with pytest.raises(ConfigError, match="holds no key"):
        read_key(Path(os.devnull))
