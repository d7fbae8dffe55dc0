"""A worker of another machine sends its password only where the key is, and ends with its runs where it is not."""

import os
import subprocess
import sys

import psutil
import pytest

from flows.worker import Cluster, Worker
from machine import PATIENCE_S
from rmcore.core.errors import ServiceError
from rmcore.core.processes import runs
from tasks.guarded_server import Guard
from tasks.passwords import Identity

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
    checked = Worker(Cluster(address, address, "postgresql", None), KNOWN, "name", 1)
    if said is None:
        checked.require_same_servers(worker)
        assert all(map(runs, mine))
    else:
        with pytest.raises(ServiceError, match=said):
            checked.require_same_servers(worker)
        assert not any(map(runs, psutil.wait_procs(mine, timeout=PATIENCE_S)[1]))
