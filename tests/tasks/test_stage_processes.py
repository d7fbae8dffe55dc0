"""A training that several processes of a machine share, as a stage of a pipeline."""

import json
import os
import tempfile
import threading
from contextlib import contextmanager, nullcontext
from pathlib import Path

import psutil
import pytest

from rmcore.config.data import DataConfig, GoldConfig
from rmcore.config.model import ModelConfig
from rmcore.config.pipeline import PipelineConfig
from rmcore.config.train import TrainConfig
from rmcore.core.child_process import PLACE
from rmcore.core.errors import ConfigError, TrainingError
from rmcore.core.files import read_json_lines
from rmcore.core.store import Store
from rmcore.stages.order import stage_of
from rmcore.training.resume import FINISHED_FILE, RESUME_FOLDER
from tasks import stage_processes
from tasks.execution import execute
from tasks.stage_processes import LOG_FILE, run_processes

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
    inherited = os.environ | dict.fromkeys(PLACE, "1") | {"WORLD_SIZE": "2", "PYTHONPATH": str(tmp_path)}
    (tmp_path / "rmcore_probe.py").write_text(
        "import json, os\ndef run_from_file(spec):\n    print(json.dumps(dict(os.environ)))\n    return 0\n"
    )
    monkeypatch.setattr(stage_processes, "MODULE", "rmcore_probe")
    told = []
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        assert run_processes(tmp_path / str(number), {}, number, inherited) == (0, tmp_path / str(number) / "0")
        logs = (tmp_path / str(number) / str(rank) / LOG_FILE for rank in range(number))
        told += [json.loads(log.read_text()) for log in logs]
    assert not set(PLACE) & told[0].keys()
    assert [(one["RANK"], one["WORLD_SIZE"]) for one in told[1:]] == [("0", "2"), ("1", "2")]


@pytest.mark.slow
def test_two_processes_make_the_artifact_that_one_makes(tiny_folder, tmp_path):
    """Under the same key, as how it is run is no part of it."""
    alone, together = (train(Store(tmp_path / str(number)), settings(tiny_folder, number)) for number in (1, 2))
    assert alone.key == together.key
    assert len(losses(alone)) == STEPS
    assert losses(together) == pytest.approx(losses(alone), rel=1e-3)
    record = json.loads((Path(together.path) / FINISHED_FILE).read_text())
    assert (record["num_processes"], record["num_steps"]) == (2, STEPS)


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


def test_more_processes_than_gpus_are_refused_before_anything_waits(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    config = settings("tiny", 4).model_copy(update={"device": "cuda"})
    with pytest.raises(ConfigError, match=r"train.num_processes=4, but this process sees 2 GPUs"):
        train(Store(tmp_path), config)
