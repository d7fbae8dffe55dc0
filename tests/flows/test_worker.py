"""A worker of another machine sends its password only to a server that has it, and ends with its runs where none is."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from flows.worker import find_shared, require_same_server
from machine import PATIENCE_S
from rmcore.core.errors import ConfigError, ServiceError
from rmcore.core.processes import runs
from tasks.guarded_server import Guard
from tasks.passwords import read_password

SECRET = "p" * 43
WORKER = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(3600)"], start_new_session=True)
time.sleep(3600)
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
@pytest.mark.parametrize(("answering", "stays"), [(SECRET, True), (None, True), ("o" * 43, False)])
def test_a_worker_and_its_runs_end_where_another_program_answers(serve, worker, answering, stays):
    address = "http://127.0.0.1:9" if answering is None else serve(lambda own: Guard(None, own, answering))
    mine = [*worker.children(recursive=True), worker]
    assert len(mine) == 2
    if stays:
        require_same_server(address, SECRET, worker)
        assert all(map(runs, mine))
    else:
        with pytest.raises(ServiceError, match="did not prove that it is a server of `rm-opt up` with this password"):
            require_same_server(address, SECRET, worker)
        assert not any(map(runs, psutil.wait_procs(mine, timeout=PATIENCE_S)[1]))


def test_a_worker_logs_in_where_the_password_is_and_sends_it_to_nobody_else(monkeypatch, serve):
    monkeypatch.setattr(os, "environ", {**os.environ})
    heard = []

    async def app(scope, receive, send):
        heard.extend(value for name, value in scope["headers"] if name == b"authorization")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"value": {"shared": "file:///shared"}}'})

    head, other = (serve(lambda own, secret=secret: Guard(app, own, secret, app_asks=True)) for secret in (SECRET, "o"))
    with pytest.raises(ServiceError, match="was sent no password"):
        find_shared(other, SECRET)
    assert heard == []
    assert find_shared(head, SECRET) == "file:///shared"
    assert len(heard) == 1


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ("nowhere", "is no address: write that of Prefect"),
        ("http://127.0.0.1:9", "does not answer as Prefect of `rm-opt up`"),
    ],
)
def test_a_worker_that_cannot_begin_says_why(monkeypatch, server, said):
    monkeypatch.setattr(os, "environ", {**os.environ})
    with pytest.raises((ConfigError, ServiceError), match=said):
        find_shared(server, SECRET)


def test_a_worker_without_a_password_says_where_it_is_to_be_had():
    with pytest.raises(ConfigError, match="holds no password"):
        read_password(Path(os.devnull))
