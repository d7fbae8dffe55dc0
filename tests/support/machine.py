"""What tests ask of the machine they run on: free ports, processes, waiting however busy it is, a disk that is full."""

import os
import random
import resource
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from glob import glob
from pathlib import Path

import psutil
import pytest

PATIENCE_S = 900.0
"""Limit of each wait for what a working machine does, however busy: it is reached only where something is broken."""
PORTS = range(10_000, 32_000)
"""Below those that the kernel gives to each connection: none of these takes a port before its server has started."""


def free_ports(num_ports):
    """Ports of this machine on which nothing listens."""
    found = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == num_ports:
            return found
    raise OSError("no port is free")


def wait_for(condition, what="timed out", pause=0.05):
    """What `condition()` gives once it is true; `what` is the error's text or a function that gives it.

    Looks that ask a server keep it from what is waited for: they have a longer pause, in seconds, between them.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        begin = time.monotonic()
        if found := condition():
            return found
        assert time.monotonic() < deadline, what() if callable(what) else what
        time.sleep(max(pause, min(0.2, 9 * (time.monotonic() - begin))))


def family(pid):
    """Processes below one with name and words of the command line, without those that end while they are looked at."""
    found = {}
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found[process] = [process.name(), *process.cmdline()]
    return found


def group_leaders(word):
    """Processes below this one that name `word` and lead their group: a small one of vLLM's only guards it."""
    below = [process for process, words in family(os.getpid()).items() if word in words]
    return [process for process in below if process.pid == os.getpgid(process.pid)]


def found(folder, pattern):
    """Paths of a folder that others change meanwhile: what goes is left out, where `Path.glob` raises an error."""
    return [Path(folder, name) for name in glob(pattern, root_dir=folder, recursive=True, include_hidden=True)]


def num_lines(files):
    """Lines of all these files together, of those that are still there."""
    number = 0
    for file in files:
        with suppress(FileNotFoundError):
            number += file.read_text().count("\n")
    return number


@contextmanager
def largest_file(num_bytes):
    """No file of this process may grow beyond that: as on a disk that is full, the system refuses to write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def run_inside(program: str) -> str:
    """Run Python code in a pid namespace of its own; gives what it printed. Skips where none may be made."""
    command = ["unshare", "--pid", "--fork", sys.executable, "-c", program]
    try:
        inside = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    if "unshare" in inside.stderr:
        pytest.skip(f"no pid namespace may be made here: {inside.stderr.strip()}")
    assert inside.returncode == 0, inside.stderr
    return inside.stdout
