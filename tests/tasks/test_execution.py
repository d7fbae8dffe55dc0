"""A stage in a process of its own, and its artifact in the store."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

from rmcore.config.data import DataConfig, GoldConfig
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.store import Store
from rmcore.stages.registry import stage_call
from tasks.execution import SHARED_TERMINAL, _progress_told, execute


def test_of_callers_at_the_same_time_one_does_the_work_and_the_others_get_it(tmp_path):
    store = Store(tmp_path)
    config = PipelineConfig(data=DataConfig(gold=GoldConfig(num_prompts=40)))
    asked, began = stage_call("prepare", config, {}), []

    def call(_):
        follow = lambda path: nullcontext()  # noqa: E731
        return execute(store, asked, follow, lambda: began.append(1))

    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(call, range(3)))
    assert len({ref for ref, _ in answers}) == 1
    assert sorted(here for _, here in answers) == [False, False, True]
    assert len(began) == 1
    assert store.status("prepare", answers[0][0].key).state == "valid"


def test_lines_of_progress_are_told_and_are_on_standard_error(capfd, monkeypatch):
    monkeypatch.delenv(SHARED_TERMINAL, raising=False)
    told = []
    with _progress_told(told.append) as descriptor:
        os.write(descriptor, b"train      3 of 60, 15.0 s so far\ntrain      7 of 60\n")
    assert told == ["train      3 of 60, 15.0 s so far", "train      7 of 60"]
    assert capfd.readouterr().err.splitlines() == told


def test_where_stages_run_side_by_side_lines_of_progress_are_told_alone(capfd, monkeypatch):
    monkeypatch.setenv(SHARED_TERMINAL, "1")
    told = []
    with _progress_told(told.append) as descriptor:
        os.write(descriptor, b"train      3 of 60\n")
    assert told == ["train      3 of 60"]
    assert capfd.readouterr().err == ""
