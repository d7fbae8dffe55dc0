"""Whatever a new user types first, nobody else may look into the home that it makes."""

import os

import pytest

from flows.cli import app


@pytest.mark.parametrize("command", [["down"], ["store", "gc", "--keep", "1"], ["store", "ls"], ["info"]], ids=" ".join)
def test_a_home_is_for_its_owner_alone(command, tmp_path, monkeypatch):
    home = tmp_path / "home"
    monkeypatch.setenv("RM_OPT_HOME", str(home))
    before = os.umask(0)
    try:
        with pytest.raises(SystemExit) as left:
            app(command)
    finally:
        os.umask(before)
    assert left.value.code == 0
    assert not home.exists() or not home.stat().st_mode & 0o077
