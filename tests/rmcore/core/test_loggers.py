"""Curves in other programs: the real packages where they are installed, and a named refusal where they are not."""

import importlib.util

import pytest

from rmcore.core.errors import ConfigError
from rmcore.core.loggers import ManyTrackers, give_lines, open_loggers, require_loggers
from rmcore.core.tracking import METRICS_FILE, JsonlTracker, MemoryTracker

ROWS = [(1, {"train/loss": 0.75, "eval/loss": float("nan")}), (2, {"train/loss": 0.5})]


@pytest.fixture
def lines(tmp_path):
    """What a trainer has written."""
    tracker = JsonlTracker(tmp_path / METRICS_FILE)
    for step, values in ROWS:
        tracker.metrics(step, values)
    tracker.close()
    return (tmp_path / METRICS_FILE).read_bytes().splitlines()


def test_each_of_several_gets_every_row_and_no_number_that_is_none(lines):
    seen = [MemoryTracker(), MemoryTracker()]
    give_lines(lines, ManyTrackers(seen))
    assert seen[0].rows == seen[1].rows == [(1, {"train/loss": 0.75}), (2, {"train/loss": 0.5})]


def opened(name, folder):
    return open_loggers([name], study="mine", run="mine-seed0", folder=folder, config={"train.lr": 1e-3})


def test_tensorboard_reads_back_every_number(lines, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with opened("tensorboard", tmp_path / "out") as tracker:
        give_lines(lines, tracker)
    events = accumulator.EventAccumulator(str(tmp_path / "out" / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["train/loss"]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 0.75), (2, 0.5)]


def test_wandb_offline_keeps_the_run_on_disk(lines, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with opened("wandb", tmp_path / "out") as tracker:
        give_lines(lines, tracker)
    [written] = (tmp_path / "out" / "wandb").rglob("run-*.wandb")
    assert b"train/loss" in written.read_bytes()


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_package_that_is_not_installed_is_named_with_its_command(name, tmp_path):
    if importlib.util.find_spec(name) is not None:
        require_loggers([name])
        return
    for call in (lambda: require_loggers([name]), lambda: opened(name, tmp_path).__enter__()):
        with pytest.raises(ConfigError, match=f"pip install {name}"):
            call()
    assert not list(tmp_path.iterdir())
