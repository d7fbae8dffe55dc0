"""A run is called dead only by who would know its process."""

import socket
import subprocess
import sys

import psutil
import pytest

from pid_namespace import run_inside
from tasks.run_owner import BOOT, HOST, MACHINE, PID, STARTED, has_died, this_machine, this_process


@pytest.fixture
def ended():
    """Names a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = this_process() | {PID: str(process.pid), STARTED: f"{psutil.Process(process.pid).create_time():.2f}"}
    assert not has_died(owner)
    process.kill()
    process.wait()
    return owner


def test_only_an_ended_process_of_this_machine_has_died(ended):
    assert has_died(ended)
    assert not has_died(this_process())
    assert not has_died(ended | {HOST: "elsewhere"})
    assert not has_died({HOST: this_machine()})


def test_of_two_kernels_only_this_machines_own_earlier_one_is_known_to_have_ended(ended):
    """Hosts of one name: pids of the other one's kernel mean nothing here, also where it sees the same home."""
    before = ended | {BOOT: "0" * 12, MACHINE: "f00d" * 3}
    assert not has_died(before)
    assert has_died(before | {MACHINE: ended[MACHINE]}) == bool(ended[MACHINE])


def test_a_container_with_the_hosts_name_is_another_machine():
    inside = run_inside("from tasks.run_owner import this_machine; print(this_machine())")
    assert inside.startswith(socket.gethostname())
    assert inside.strip() != this_machine()
