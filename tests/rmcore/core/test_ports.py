"""A port that is held is no other user's, with and without a server of ours on it, and another user's is refused."""

import socket
import subprocess
import sys

import pytest

from machine import free_ports
from other_user import AS_ROOT
from rmcore.core.errors import ServiceError
from rmcore.core.ports import claim, hold


@AS_ROOT
def test_no_other_user_gets_a_held_port_before_a_server_beside_it_or_after_it(other_user):
    [port] = free_ports(1)
    hold(f"http://127.0.0.1:{port}")
    assert other_user.take(port) == set()
    for _ in range(2):
        with claim("127.0.0.1", port) as listener:
            listener.listen()
            assert other_user.take(port) == set()
            with socket.create_connection(("127.0.0.1", port)) as client:
                answering, _ = listener.accept()
                answering.sendall(b"ours")
                assert client.recv(4) == b"ours"
                answering.close()
        assert other_user.take(port) == set()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


HOLDER = """
import sys
from rmcore.core.ports import hold
hold(sys.argv[1])
print("holds", flush=True)
sys.stdin.read()
"""


@AS_ROOT
def test_a_port_is_held_until_the_last_process_that_does_has_ended(other_user):
    [port] = free_ports(1)
    command = [sys.executable, "-c", HOLDER, f"http://127.0.0.1:{port}"]
    holders = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
    for holder in holders:
        assert holder.stdout.readline() == b"holds\n"
    for holder in holders:
        assert other_user.take(port) == set()
        holder.kill()
        holder.communicate()
    assert other_user.take(port) == {port}


@AS_ROOT
def test_a_port_of_another_user_cannot_be_held(other_user):
    [port] = free_ports(1)
    assert other_user.take(port) == {port}
    with pytest.raises(ServiceError, match=rf"port {port} on 127\.0\.0\.1.*password was not sent"):
        hold(f"http://127.0.0.1:{port}")
    assert other_user.end() == ""


@pytest.mark.parametrize("address", ["http://192.0.2.1:4200", "http://no-such-host.invalid:4200", "sqlite:///x.db"])
def test_what_is_not_of_this_machine_is_let_through(address):
    hold(address)
