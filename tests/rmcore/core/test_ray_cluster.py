"""A Ray cluster that lets everybody in is not used."""

import pytest

from rmcore.core.errors import ConfigError
from rmcore.core.ray_cluster import RayCluster


@pytest.mark.parametrize(("mode", "token"), [("", "x" * 40), ("disabled", "x" * 40), ("token", "")])
def test_a_cluster_without_a_login_is_refused_before_it_is_asked(monkeypatch, mode, token):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.2:6379")
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    with pytest.raises(ConfigError, match="is to be used without a login"), RayCluster("--engine ray"):
        pass
