"""Where published weights lie; what vLLM does with them is tested with the services."""

import stat
import tempfile

import pytest

from rmcore.policy.sampling import served_policy


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """A folder in the place of the one in memory, and another one for what has no room there."""
    for name in ("memory", "disk", "weights"):
        (tmp_path / name).mkdir()
    (tmp_path / "weights" / "model.safetensors").write_bytes(b"0" * 1000)
    monkeypatch.setattr(served_policy, "IN_MEMORY", tmp_path / "memory")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "disk"))
    return tmp_path / "memory"


def test_weights_lie_where_only_their_owner_sees_them_and_those_of_the_killed_are_removed(memory, tmp_path):
    killed = memory / f".{served_policy.NAME}.{'0' * 16}.tmp"
    (killed / "version-000001").mkdir(parents=True)
    with served_policy._place_for(tmp_path / "weights") as alive, served_policy._place_for(tmp_path / "weights") as own:
        assert {alive.parent.parent, own.parent.parent} == {memory}
        assert stat.S_IMODE(own.parent.stat().st_mode) == 0o700
        assert alive.is_dir()
        assert not killed.exists()
    assert not list(memory.iterdir())


def test_weights_without_room_in_memory_lie_on_disk(memory, tmp_path, monkeypatch):
    monkeypatch.setattr(served_policy, "TIMES_THE_WEIGHTS", 2**60)
    with served_policy._place_for(tmp_path / "weights") as place:
        assert place.parent.parent == tmp_path / "disk"
