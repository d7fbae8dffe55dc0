"""A stage in processes of its own, and its artifact in the store; also a training that several processes share."""

import json
import os
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

import psutil
import pytest

from light_stages import probe_variables
from machine import PATIENCE_S
from rmcore.config.data import DataConfig, GoldConfig
from rmcore.config.model import ModelConfig
from rmcore.config.pipeline import PipelineConfig
from rmcore.config.train import TrainConfig
from rmcore.core import progress
from rmcore.core.child_process import PLACE
from rmcore.core.errors import TrainingError
from rmcore.core.files import read_json_lines
from rmcore.core.progress import PROGRESS_VARIABLE
from rmcore.core.store import Store
from rmcore.stages.order import stage_of
from rmcore.training.resume import FINISHED_FILE, RESUME_FOLDER
from tasks.device import Wait
from tasks.execution import LOG_FILE, SHARED_TERMINAL, _shown_progress, execute, run_processes


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
    assert reason.startswith(f"the same prepare, which mine-seed0 (pid {os.getpid()})")
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


STEPS = 16


def settings(model, processes, **changes):
    return PipelineConfig(
        device="cpu",
        data=DataConfig(gold=GoldConfig(num_prompts=40)),
        model=ModelConfig(name=str(model), max_seq_len=64),
        train=TrainConfig(
            steps=STEPS, pairs_per_step=4, log_every=1, eval_every=8, num_processes=processes,
            precision="fp32", **changes,
        ),
    )  # fmt: skip


def train(store, config, follow=lambda path: nullcontext()):
    """The artifact of the training, made here."""
    prepared, _ = execute(store, stage_of("prepare", config, {}), lambda path: nullcontext(), lambda: None)
    trained, here = execute(store, stage_of("train", config, {"prepare": prepared}), follow, lambda: None)
    assert here
    return trained


def losses(trained):
    rows = read_json_lines(Path(trained.path) / "metrics.jsonl")
    return [row["metrics"]["train/loss"] for row in rows if "train/loss" in row["metrics"]]


def test_a_stage_takes_no_place_among_processes_that_the_run_was_started_in(tmp_path, monkeypatch):
    """Such as that of a shell below torchrun: it would wait for the others, or write nothing as the second of them."""
    inherited = probe_variables(tmp_path) | dict.fromkeys(PLACE, "1") | {"WORLD_SIZE": "2"}
    (tmp_path / "places.py").write_text(
        "import json, os\ndef run_from_file(spec):\n    print(json.dumps(dict(os.environ)))\n    return 0\n"
    )
    monkeypatch.setattr("tasks.execution.MODULE", "places")
    told = []
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        assert run_processes(tmp_path / str(number), {}, number, inherited) == (0, tmp_path / str(number) / "0")
        logs = (tmp_path / str(number) / str(rank) / LOG_FILE for rank in range(number))
        told += [json.loads(log.read_text()) for log in logs]
    assert not set(PLACE) & told[0].keys()
    assert [(one["RANK"], one["WORLD_SIZE"]) for one in told[1:]] == [("0", "2"), ("1", "2")]


@pytest.mark.slow
def test_one_of_two_killed_is_the_one_that_is_named_and_the_same_command_resumes(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    store, config = Store(tmp_path / "store"), settings(tiny_folder, 2, resume_every_seconds=0)
    over = threading.Event()

    def kill_the_second(metrics):
        while not over.wait(0.01):
            if any(metrics.parent.glob(f"{RESUME_FOLDER}/step_*")):
                [second] = [process for process in psutil.process_iter() if writes(process, tmp_path, "1/log.txt")]
                second.kill()
                return

    @contextmanager
    def killing(metrics):
        killer = threading.Thread(target=kill_the_second, args=(metrics,))
        killer.start()
        try:
            yield
        finally:
            over.set()
            killer.join()

    with pytest.raises(TrainingError, match="stage train was killed, often for lack of memory"):
        train(store, config, killing)
    trained = train(store, config)
    record = json.loads((Path(trained.path) / FINISHED_FILE).read_text())
    [resumed] = record["resumed_from"]
    assert 0 < resumed < STEPS
    assert len(losses(trained)) == STEPS
    assert not (Path(trained.path) / RESUME_FOLDER).exists()


def writes(process, folder, name):
    """Whether a process has that file below `folder` open."""
    try:
        return any(one.path.startswith(str(folder)) and one.path.endswith(name) for one in process.open_files())
    except psutil.Error:
        return False
