"""What tests ask of the machine they run on, however busy it is: free ports, processes, and waiting for a condition."""

import random
import socket
import time
from contextlib import suppress

import psutil

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


def wait_for(condition, what="timed out", seconds=120.0, longest_pause=0.2):
    """What `condition()` gives once it is true; `what` is the error's text or a function that gives it.

    Looks that ask a server keep it from what is waited for: they are fewer, and still see what lasts for as long as the
    longest pause, in seconds.
    """
    deadline = time.monotonic() + seconds
    while True:
        begin = time.monotonic()
        if found := condition():
            return found
        assert time.monotonic() < deadline, what() if callable(what) else what
        time.sleep(min(longest_pause, max(0.05, 9 * (time.monotonic() - begin))))


def family(pid):
    """Processes below one with name and words of the command line, without those that end while they are looked at."""
    found = {}
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found[process] = [process.name(), *process.cmdline()]
    return found
