"""Connections without login never keep out those with one, whatever the limit of open files.

A real server in a process of its own, which may open few files.
"""

import os
import socket
import subprocess
import sys
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from machine import PATIENCE_S

pytestmark = pytest.mark.slow
SOFT, HARD = 64, 128
TOKEN = "the-token-of-this-test"
PROGRAM = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[3]), int(sys.argv[4])))
from pathlib import Path
from rmcore.models.reward_model import BradleyTerryRM
from torch_engine import answering_with
folder = Path(sys.argv[1])
rm = BradleyTerryRM.from_pretrained(str(folder), device="cpu", max_seq_len=128)
with answering_with(rm, folder, token=sys.argv[2]) as app:
    print(app.port, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def server(tiny_folder):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tiny_folder), TOKEN, str(SOFT), str(HARD)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "support")},
    )
    port = int(process.stdout.readline())
    process.port = port
    yield process
    process.stdin.close()
    assert process.wait(PATIENCE_S) == 0


def connect(server):
    return closing(socket.create_connection(("127.0.0.1", server.port), PATIENCE_S))


def request(path="/version", method="GET", token=None) -> bytes:
    login = "" if token is None else f"Authorization: Bearer {token}\r\n"
    return f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{login}\r\n".encode()


def answer(connection, token=TOKEN) -> bytes:
    """The answer to one request on a connection that stays open; empty where it was closed."""
    try:
        connection.sendall(request(token=token))
        received = b""
        while b"\r\n\r\n" not in received:
            part = connection.recv(2**16)
            if not part:
                return received
            received += part
        head, _, body = received.partition(b"\r\n\r\n")
        [length] = [int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-len")]
        while len(body) < length:
            body += connection.recv(2**16)
        return head
    except ConnectionError:
        return b""


def is_answered(connection) -> bool:
    return answer(connection).startswith(b"HTTP/1.1 200")


def test_clients_with_login_are_answered_while_connections_without_come(server):
    """Ones that are silent, that stop within their headers, and that send request after request without a token."""
    with ExitStack() as open_ones:
        earlier = open_ones.enter_context(connect(server))
        assert is_answered(earlier)
        for number in range(210):
            hostile = open_ones.enter_context(connect(server))
            sent = [b"", request(token=TOKEN)[:-2], request()][number % 3]
            with suppress(ConnectionError):
                hostile.sendall(sent)
            if number % 10 == 0:
                assert is_answered(earlier), f"not after {number} others"
                with connect(server) as later:
                    assert is_answered(later), f"not after {number} others"


@pytest.mark.parametrize(
    ("path", "method", "status"), [("/version", "GET", 401), ("/nothing", "GET", 404), ("/health", "DELETE", 405)]
)
def test_an_answer_without_login_ends_its_connection(server, path, method, status):
    with connect(server) as connection:
        connection.sendall(request(path, method))
        received = b""
        while part := connection.recv(2**16):
            received += part
    assert received.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"connection: close" in received.lower()


def test_connections_with_login_are_bounded_and_none_is_closed_for_another(server):
    with ExitStack() as open_ones:
        connections = [open_ones.enter_context(connect(server)) for _ in range(HARD // 2)]
        answered = [one for one in connections if is_answered(one)]
        assert 0 < len(answered) < len(connections)
        assert all(map(is_answered, answered))
    with connect(server) as later:
        assert is_answered(later)
