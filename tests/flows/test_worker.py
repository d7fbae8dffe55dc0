"""A worker of another machine that cannot begin says why."""

import os
from pathlib import Path

import pytest

from flows.worker import find_cluster
from rmcore.core.errors import ConfigError, ServiceError
from tasks.guarded_server import Guard
from tasks.passwords import read_password


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ("nowhere", "is no address: write that of Prefect"),
        ("http://127.0.0.1:9", "does not answer as Prefect of `rm-opt up`"),
        ("another", "401.*--password-file is a copy"),
    ],
)
def test_a_worker_that_cannot_begin_says_why(monkeypatch, serve, server, said):
    monkeypatch.setattr(os, "environ", {**os.environ})
    address = serve(lambda own: Guard(None, own, "p" * 43)) if server == "another" else server
    with pytest.raises((ConfigError, ServiceError), match=said):
        find_cluster(address, "o" * 43)


def test_a_worker_without_a_password_says_where_it_is_to_be_had():
    with pytest.raises(ConfigError, match="holds no password"):
        read_password(Path(os.devnull))
