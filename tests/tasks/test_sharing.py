"""Two machines, each with a home of its own, and one store: one commit a stage, and a killed one goes on."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from machine import PATIENCE_S
from rmcore.config.data import DataConfig, GoldConfig
from rmcore.config.model import ModelConfig
from rmcore.config.pipeline import PipelineConfig
from rmcore.config.train import TrainConfig
from rmcore.core.errors import StoreError
from rmcore.core.store import Store
from rmcore.stages.order import stage_of
from tasks.device import Wait
from tasks.execution import execute
from tasks.sharing import SHARED_VARIABLE, share_all, shared_store

pytest.importorskip("obstore")
pytestmark = pytest.mark.slow
CONFIG = PipelineConfig(data=DataConfig(gold=GoldConfig(num_prompts=40)))


@pytest.fixture
def shared(tmp_path, monkeypatch):
    (tmp_path / "shared").mkdir()
    monkeypatch.setenv(SHARED_VARIABLE, f"file://{tmp_path}/shared")
    return shared_store()


def prepared(home, before=lambda: None, wait=None, told=None):
    return execute(
        Store(home),
        stage_of("prepare", CONFIG, {}),
        lambda path: nullcontext(),
        before,
        (told if told is not None else []).append,
        wait=wait,
    )


def test_a_second_home_takes_what_the_first_computed(shared, tmp_path):
    first, told = prepared(tmp_path / "a"), []
    second = prepared(tmp_path / "b", before=pytest.fail, told=told)
    assert (first[1], second[1]) == (True, False)
    assert first[0].digest == second[0].digest
    assert Path(second[0].path).is_relative_to(tmp_path / "b")
    assert Store(tmp_path / "b").status("prepare", second[0].key).state == "valid"
    assert any(line.startswith(f"prepare taken from {shared.url} in ") for line in told)


def test_a_cell_shares_again_what_a_rule_removed_from_the_store(shared, tmp_path):
    ref, _ = prepared(tmp_path / "a")
    shared.objects.delete(shared.objects.list("blobs/")[0])
    share_all(Store(tmp_path / "a"), {"prepare": ref})
    assert shared.pull(Store(tmp_path / "b"), "prepare", ref.key)


def test_two_homes_that_compute_the_same_at_the_same_time_end_with_the_bytes_of_one(shared, tmp_path):
    together = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(prepared, tmp_path / name, lambda: together.wait(PATIENCE_S)) for name in "ab"]
        (first, computed), (second, computed_too) = (one.result() for one in both)
    assert (computed, computed_too) == (True, True)
    assert first.digest == second.digest == shared.find("prepare", first.key)["manifest"]["digest"]
    for home in "ab":
        assert Store(tmp_path / home).status("prepare", first.key).state == "valid"


def test_what_was_committed_while_the_device_was_waited_for_is_taken(shared, tmp_path):
    made = []

    class Waited(Wait):
        def __setattr__(self, name, reason):
            if reason is str and getattr(self, "reason", str) is not str:
                made.append(prepared(tmp_path / "a")[0])
            super().__setattr__(name, reason)

    found, here = prepared(tmp_path / "b", before=pytest.fail, wait=Waited())
    assert (found.digest, here) == (made[0].digest, False)


def test_what_cannot_be_pushed_is_kept_here_and_told(shared, tmp_path, monkeypatch):
    """The store went away during the run: what was computed is not lost, and the run goes on."""

    def away(*_):
        raise StoreError("s3://artifacts does not answer")

    told = []
    with monkeypatch.context() as patch:
        patch.setattr(shared, "push", away)
        ref, here = prepared(tmp_path / "a", told=told)
    assert here
    assert Store(tmp_path / "a").status("prepare", ref.key).state == "valid"
    assert any("is on this machine alone until `rm-opt store push`" in line for line in told)
    assert [(entry.key, stands) for entry, stands in shared.push_all(Store(tmp_path / "a"))] == [(ref.key, True)]


TRAINING = """
import json, sys
from contextlib import nullcontext, suppress
from pathlib import Path
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.store import Store
from rmcore.stages.order import stage_of
from tasks import sharing
from tasks.execution import execute
sharing.LOOK_SECONDS = 0.05  # the training is short
store, config, told = Store(Path(sys.argv[1])), PipelineConfig.model_validate_json(sys.argv[2]), []
def run(name, upstream):
    tell = lambda line: print(json.dumps(line), file=sys.stderr, flush=True)
    return execute(store, stage_of(name, config, upstream), lambda path: nullcontext(), lambda: None, tell)
prepared, _ = run("prepare", {})
run("train", {"prepare": prepared})
"""


def test_a_training_that_is_killed_on_one_machine_goes_on_on_another_to_the_same_numbers(
    shared, tmp_path, monkeypatch, tiny_folder
):
    training = TrainConfig(steps=40, eval_every=20, pairs_per_step=4, resume_every_seconds=0.5)
    config = CONFIG.model_copy(update={"model": ModelConfig(name=str(tiny_folder), max_seq_len=48), "train": training})

    def trained(home):
        """Digest and key of what this machine has in that home, whether it computed it, and what was told meanwhile."""
        store, told, upstream = Store(tmp_path / home), [], {}
        for name in ("prepare", "train"):
            call = stage_of(name, config, upstream)
            ref, here = execute(store, call, lambda path: nullcontext(), lambda: None, told.append)
            upstream = {name: ref}
        return {"digest": ref.digest, "key": ref.key, "here": here}, "\n".join(told)

    with monkeypatch.context() as patch:
        patch.delenv(SHARED_VARIABLE)
        alone, _ = trained("alone")

    killed = subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(tmp_path / "a"), config.model_dump_json()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    place = f"states/train/{alone['key']}.json"
    while b"resume/step_" not in (shared.objects.read(place) or b""):
        with suppress(subprocess.TimeoutExpired):
            killed.wait(timeout=0.1)
        assert killed.poll() is None, killed.stderr.read()
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()

    taken_over, said = trained("b")
    assert "resumes from what another machine had saved" in said
    assert "train resumes from step" in said
    assert taken_over == alone
