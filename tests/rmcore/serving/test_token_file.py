"""A reward server's token reaches the clients of its user, at the server's own address, and no one else."""

import asyncio
import socket
import stat
import sys
from contextlib import closing, contextmanager
from types import SimpleNamespace

import pytest
from fastapi import FastAPI

from rmcore.core.errors import ModelError, ServingError
from rmcore.serving import command
from rmcore.serving.client import RewardClient
from rmcore.serving.http_app import HttpSettings
from rmcore.serving.server import ServeSettings, _answer, _listen, serve
from rmcore.serving.token_file import find_token, kept_token

ADDRESS = "http://127.0.0.1:8100"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RM_OPT_TOKEN", raising=False)
    return tmp_path


def test_a_token_is_found_at_its_address_while_its_server_runs():
    assert find_token(ADDRESS) is None
    with kept_token(ADDRESS, "secret") as path:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert find_token(ADDRESS) == find_token(f"{ADDRESS}/") == "secret"
        for other in ("http://localhost:8100", "http://[::1]:8100", "http://127.0.0.1:8101", "http://127.0.0.2:8100"):
            assert find_token(other) is None, other
    assert find_token(ADDRESS) is None


def test_a_server_that_ends_leaves_its_successors_token():
    with kept_token(ADDRESS, "first"), kept_token(ADDRESS, "second"):
        pass
    with kept_token(ADDRESS, "first") as path:
        path.write_text("second\n")
    assert find_token(ADDRESS) == "second"


@pytest.mark.parametrize("given", [None, "argument"])
@pytest.mark.parametrize("variable", [None, "variable"])
def test_clients_send_the_nearest_token(server, monkeypatch, given, variable):
    if variable is not None:
        monkeypatch.setenv("RM_OPT_TOKEN", variable)
    with kept_token(server.address, "kept"), RewardClient(server.address, token=given) as client:
        client.version()
    assert server.seen[0].headers["authorization"] == f"Bearer {given or variable or 'kept'}"


def test_a_token_that_cannot_be_kept_or_read_is_said_with_what_to_do(home):
    """Of a home that is read-only, full or another user's; here by obstacles that root meets, too."""
    with kept_token(ADDRESS, "secret") as path:
        path.unlink()
        path.mkdir()
        with pytest.raises(ServingError, match=r"cannot be read .*: set RM_OPT_TOKEN"):
            RewardClient(ADDRESS)
        path.rmdir()
    path.parent.rmdir()
    path.parent.touch()
    with pytest.raises(ServingError, match=r"cannot be kept .*: set a token of your own in RM_OPT_TOKEN"):
        command.serve("/no/such/checkpoint", port=0, vllm=sys.executable)  # before it looks for a model


def test_a_token_is_kept_by_a_server_that_listens_and_before_its_address_is_said():
    """Where a port is only bound, a stranger may listen, to whom clients would send the token."""
    kept = []

    @contextmanager
    def keep(address):
        with socket.create_connection(address.removeprefix("http://").split(":")):
            kept.append(address)
        yield

    def announce(address):
        assert kept == [address]
        raise InterruptedError

    app = SimpleNamespace(app=FastAPI)
    with pytest.raises(ModelError):
        asyncio.run(serve(ServeSettings("/no/such/checkpoint", port=0, vllm=sys.executable), announce, keep=keep))
    with closing(_listen("127.0.0.1", 0)) as ours, pytest.raises(InterruptedError):
        asyncio.run(_answer(app, ours, announce, keep))
    with closing(_listen("127.0.0.1", 0)) as theirs, closing(_listen(*theirs.getsockname())) as ours:
        theirs.listen()
        with pytest.raises(ServingError, match="another program has it"):
            asyncio.run(_answer(app, ours, announce, keep))
    assert len(kept) == 1


def test_every_server_has_a_token_of_its_own_and_shows_it_nowhere():
    settings = [HttpSettings() for _ in range(50)]
    assert len({one.token for one in settings}) == 50
    assert all(len(one.token) >= 40 and one.token not in repr(one) for one in settings)
