"""A stage in a process of its own, and its artifact in the store."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest

from machine import PATIENCE_S
from rmcore.config.data import DataConfig, GoldConfig
from rmcore.config.pipeline import PipelineConfig
from rmcore.core import progress
from rmcore.core.progress import PROGRESS_VARIABLE
from rmcore.core.store import Store
from rmcore.stages.order import stage_of
from tasks.execution import execute
from tasks.stage_processes import SHARED_TERMINAL, _shown_progress
from tasks.waiting import Wait


def follow_nothing(path):
    return nullcontext()


def test_of_callers_at_the_same_time_one_does_the_work_and_the_others_get_it(tmp_path):
    store = Store(tmp_path)
    config = PipelineConfig(data=DataConfig(gold=GoldConfig(num_prompts=40)))
    asked, began = stage_of("prepare", config, {}), []

    def call(_):
        return execute(store, asked, follow_nothing, lambda: began.append(1))

    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(call, range(3)))
    assert len({ref for ref, _ in answers}) == 1
    assert sorted(here for _, here in answers) == [False, False, True]
    assert len(began) == 1
    assert store.status("prepare", answers[0][0].key).state == "valid"


def test_who_computes_the_same_stage_is_named_to_those_who_wait(tmp_path):
    store = Store(tmp_path)
    config = PipelineConfig(data=DataConfig(gold=GoldConfig(num_prompts=40)))
    asked, wait, began, named = stage_of("prepare", config, {}), Wait(), threading.Event(), threading.Event()

    def begin():
        began.set()
        assert named.wait(PATIENCE_S)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(execute, store, asked, follow_nothing, begin, run="mine-seed0")
        assert began.wait(PATIENCE_S)
        second = pool.submit(execute, store, asked, follow_nothing, lambda: None, wait=wait)
        while not (reason := wait.reason()):
            assert not second.done()
        named.set()
    assert reason.startswith(f"the same prepare, which mine-seed0 (pid {os.getpid()}, since ")
    assert (first.result()[1], second.result()[1]) == (True, False)
    assert wait.reason() == ""


@pytest.mark.parametrize("prefix", ["", "full seed 0 of ablation: "])
def test_lines_of_progress_are_told_and_are_on_standard_error_where_several_share_it_with_a_name(
    capfd, monkeypatch, prefix
):
    monkeypatch.setenv(SHARED_TERMINAL, "1") if prefix else monkeypatch.delenv(SHARED_TERMINAL, raising=False)
    told = []
    with _shown_progress(told.append, "full seed 0 of ablation") as [descriptor]:
        os.write(descriptor, b"train      3 of 60, 15.0 s so far\ntrain      7 of 60\n")
    assert told == ["train      3 of 60, 15.0 s so far", "train      7 of 60"]
    assert capfd.readouterr().err.splitlines() == [prefix + line for line in told]


def test_on_a_terminal_a_stage_draws_a_bar_and_its_lines_are_told_beside_it(monkeypatch):
    monkeypatch.delenv(SHARED_TERMINAL, raising=False)
    ours, theirs = os.openpty()
    monkeypatch.setattr(sys, "stderr", os.fdopen(os.dup(theirs), "w"))
    told = []
    with _shown_progress(told.append, "mine-seed0") as descriptors:
        monkeypatch.setenv(PROGRESS_VARIABLE, ",".join(map(str, descriptors)))
        monkeypatch.setattr(progress, "LINE_SECONDS", 0.01)
        with progress.progress_bar("train") as report:
            report(3, 60, "loss 0.69")
            while not any("3 of 60" in line for line in told):
                assert len(told) < 10_000
    assert any("3 of 60 · loss 0.69" in line for line in told)
    sys.stderr.close()
    os.close(theirs)
    shown = os.read(ours, 4096).decode()
    os.close(ours)
    assert "train" in shown
    assert " so far" not in shown  # that is a line's, not a bar's
