"""Another user of this machine: a program under uid 65534 that takes ports and remembers what it is sent."""

import os
import subprocess
import sys

import pytest

NOBODY = 65534
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a program as another user")
PROGRAM = """
import itertools, os, socket, sys, threading, time
os.setgroups([]); os.setgid(65534); os.setuid(65534)
ports = list(map(int, sys.argv[1:]))

def take(port):
    # IPv4 and IPv6, one address and all of them, with and without each option.
    places = [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")]
    for (family, host), again, shared in itertools.product(places, (0, 1), (0, 1)):
        taken = socket.socket(family)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, again)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
        try:
            taken.bind((host, port))
            taken.listen()
            return taken
        except OSError:
            taken.close()

def serve(taken):
    while True:
        client, _ = taken.accept()
        threading.Thread(target=answer, args=(client,), daemon=True).start()

def answer(client):
    client.settimeout(5)
    try:
        while said := client.recv(65536):
            print("heard", said, flush=True)
            client.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Type: application/json\\r\\nContent-Length: 2\\r\\n\\r\\n{}")
    except OSError:
        pass

print("began", flush=True)
for line in sys.stdin:
    words = line.split()
    seconds, wanted = float(words[0]), set(map(int, words[1:]))
    taken, deadline = {}, time.monotonic() + seconds
    while True:
        for port in wanted - set(taken):
            found = take(port)
            if found is not None:
                taken[port] = found
                threading.Thread(target=serve, args=(found,), daemon=True).start()
        if len(taken) == len(wanted) or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    print("took", *sorted(taken), flush=True)
"""


class OtherUser:
    """Takes ports where it can, answers 200 to everything, and tells what it heard."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
        )
        self.heard = ""
        assert self.process.stdout.readline() == "began\n"

    def take(self, *ports, seconds=0.0):
        """The ports that it gets, of those that it tries to get for so long."""
        print(seconds, *ports, file=self.process.stdin, flush=True)
        while not (line := self.process.stdout.readline()).startswith("took"):
            self.heard += line
        return set(map(int, line.split()[1:]))

    def end(self):
        """All that it has heard."""
        self.process.kill()
        self.heard += self.process.communicate()[0]
        return self.heard
