"""A run is called dead only by who would know its process."""

import os
import socket
import subprocess
import sys

import psutil
import pytest

from machine import run_inside
from rmcore.core.processes import BOOT, HOST, MACHINE, PID, STARTED, has_died, start_of, this_machine, this_process


@pytest.fixture
def ended():
    """Names a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = this_process() | {PID: str(process.pid), STARTED: start_of(process.pid)}
    assert not has_died(owner)
    process.kill()
    process.wait()
    return owner


def test_only_an_ended_process_of_this_machine_has_died(ended):
    assert has_died(ended)
    assert not has_died(this_process())
    assert not has_died(ended | {HOST: "elsewhere"})
    assert not has_died({HOST: this_machine()})


def test_a_clock_that_is_set_ends_no_process(ended, monkeypatch):
    """Forward or back by an hour: the kernel then says that it booted an hour later or earlier, as psutil reads it."""
    owner, created, boot = this_process(), psutil.Process().create_time(), psutil.boot_time()
    for step in (3600, -3600):
        for module in ("psutil", "psutil._psplatform"):
            monkeypatch.setattr(f"{module}.boot_time", lambda step=step: boot + step)
        assert psutil.Process().create_time() == pytest.approx(created + step)
        assert this_process() == owner
        assert not has_died(owner)
        assert has_died(ended)


def test_a_process_that_got_the_pid_of_another_is_not_taken_for_it():
    owner = this_process()
    assert has_died(owner | {STARTED: str(int(owner[STARTED]) - 1)})


def test_a_process_may_have_any_name_and_has_ended_before_it_is_collected():
    script = "open('/proc/self/comm', 'w').write('a) Z 1 ('); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1) as process:
        process.stdout.readline()
        assert int(start_of(process.pid)) >= int(start_of(os.getpid()))
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie
        assert start_of(process.pid) is None


def test_of_two_kernels_only_this_machines_own_earlier_one_is_known_to_have_ended(ended):
    """Hosts of one name: pids of the other one's kernel mean nothing here, also where it sees the same home."""
    before = ended | {BOOT: "0" * 12, MACHINE: "f00d" * 3}
    assert not has_died(before)
    assert has_died(before | {MACHINE: ended[MACHINE]}) == bool(ended[MACHINE])


def test_a_container_with_the_hosts_name_is_another_machine():
    inside = run_inside("from rmcore.core.processes import this_machine; print(this_machine())")
    assert inside.startswith(socket.gethostname())
    assert inside.strip() != this_machine()
