"""A state that is written while the training continues is that of the step that it names; a failure is not silent."""

import itertools
import os
import time
from contextlib import ExitStack, suppress
from threading import Condition, current_thread, main_thread
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from machine import PATIENCE_S, largest_file
from rmcore.core.errors import StoreError
from rmcore.training import loop, saving
from rmcore.training.ranks import ALONE
from rmcore.training.resume import RESUME_FOLDER, find_resume_point
from rmcore.training.saving import StateSaver
from rmcore.training.state import collect_state, random_state

CPU = torch.device("cpu")


@pytest.fixture
def always(monkeypatch):
    """A state is due as soon as none is being written."""
    monkeypatch.setattr(saving, "COSTS", 0)


def is_writing(folder):
    """Whether a state is being written."""
    return any((folder / RESUME_FOLDER).glob(".step_*.tmp"))


@pytest.mark.slow
@pytest.mark.parametrize("has_room", [True, False], ids=["with a copy", "without room for one"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "muon"])
def test_a_state_is_that_of_its_step_bit_for_bit(tmp_path, start, monkeypatch, capfd, always, optimizer, has_room):
    contexts, live, threads = [], {}, []
    make_context, write_alone = loop.make_context, saving.write_alone
    monkeypatch.setattr(loop, "make_context", lambda *given: contexts.append(make_context(*given)) or contexts[-1])
    moved, last = Condition(), 10

    def newest():
        return max(int(state.removeprefix("step_")) for state in live)

    def write(*given):
        threads.append(current_thread())
        with moved:
            begun = newest()
            if current_thread() is not main_thread():  # the model is another one by the time of writing
                moved.wait_for(lambda: newest() > begun or newest() == last, PATIENCE_S)
        return write_alone(*given)

    monkeypatch.setattr(saving, "write_alone", write)
    if not has_room:
        monkeypatch.setattr(saving, "free_bytes", lambda device: 0)

    def look(step):
        tensors = collect_state(training.rm.model, contexts[0].optimizer, [random_state(CPU)], np.zeros(0))
        with moved:
            live[f"step_{step}"] = {name: value.clone() for name, value in tensors.items()}
            moved.notify_all()

    more = {"model": {"lora": {"dropout": 0.3}}} if optimizer == "adamw" else {}
    more |= {"precision": "bf16" if optimizer == "adamw8bit" else "fp32", "optimizer": optimizer}
    training = start(tmp_path, stop=look, steps=last, eval_every=50, resume_every_seconds=0, **more)
    training.run()
    states = list((tmp_path / RESUME_FOLDER).glob("step_*"))
    assert states
    for state in states:
        saved = {name: value for file in state.glob("*.safetensors") for name, value in load_file(file).items()}
        del saved["best_rewards"], live[state.name]["best_rewards"]
        assert saved.keys() == live[state.name].keys()
        assert all(torch.equal(value, live[state.name][name]) for name, value in saved.items())
    assert {thread is main_thread() for thread in threads} == {not has_room}
    assert capfd.readouterr().err.count("no room for a copy") == (not has_room)


def test_a_disk_that_is_full_ends_the_training_and_leaves_the_state_before(tmp_path, start, always):
    limits = []

    def fill(step):
        if step > 2 and find_resume_point(tmp_path) and not limits:
            limits.append(largest_file(2**15))
            limits[0].__enter__()

    try:
        with pytest.raises(StoreError, match=r"the state of step \d+ could not be written.*is untouched. Free space"):
            start(tmp_path, stop=fill, steps=10_000, eval_every=10_000, resume_every_seconds=0).run()
    finally:
        limits[0].__exit__(None, None, None)
    assert find_resume_point(tmp_path)
    assert not is_writing(tmp_path)


class Steps:
    """What a `StateSaver` is given at each step, without a training."""

    def __init__(self, folder, tensors, every_seconds=0.0):
        self.saver, self.tensors = StateSaver(folder, every_seconds, ALONE), tensors

    def save(self, step, *, last=False):
        self.saver.save(step, self.tensors, {}, [], last=last)


def test_a_state_that_failed_ends_no_training_that_has_ended_and_keeps_no_last_one_from_the_disk(tmp_path, capsys):
    steps = Steps(tmp_path, {"model.weight": torch.zeros(2**16)})
    with steps.saver:
        with largest_file(2**15):
            steps.save(1)
            while is_writing(tmp_path):
                time.sleep(0.01)
        steps.save(2, last=True)
        assert find_resume_point(tmp_path).step == 2
        with largest_file(2**15):
            steps.save(3)
            while is_writing(tmp_path):
                time.sleep(0.01)
    said = capsys.readouterr().err
    assert all(f"warning: the state of step {step} could not be written" in said for step in (1, 3))


class Last(dict):
    """Tensors; as they are taken, a worker of a DataLoader dies and torch tells so, in a handler of SIGCHLD."""

    def items(self):
        self.worker.kill()
        for _ in range(6000):
            time.sleep(0.01)
        return super().items()


@pytest.mark.parametrize("last", [False, True], ids=["as they are copied", "as they are written"])
def test_the_death_of_a_worker_is_not_told_as_a_disk_or_a_memory_that_is_full(tmp_path, last):
    tensors, batches = Last({"model.weight": torch.zeros(4)}), iter(DataLoader([1, 2, 3], num_workers=1))
    [tensors.worker] = batches._workers
    steps = Steps(tmp_path, tensors)
    try:
        with pytest.raises(RuntimeError, match=r"^DataLoader worker"), steps.saver:
            steps.save(1, last=last)
    finally:
        with suppress(RuntimeError):
            batches._shutdown_workers()
    assert find_resume_point(tmp_path) is None
    assert not is_writing(tmp_path)


def test_a_training_that_ends_waits_for_its_state_and_one_that_is_left_at_once_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr("rmcore.training.state.FILE_BYTES", 1)  # a file for each tensor
    first, second = (
        Steps(tmp_path, {f"model.{number}": torch.zeros(1) for number in range(count)}) for count in (3, 300)
    )
    with first.saver:
        first.save(1)
    assert find_resume_point(tmp_path).step == 1

    def leave():
        with second.saver:
            second.save(2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        leave()
    while is_writing(tmp_path):
        time.sleep(0.01)
    assert find_resume_point(tmp_path).step == 1


@pytest.mark.parametrize("others", [0, 7])
def test_the_trainings_that_run_on_a_machine_together_take_half_of_the_memory_that_is_free(
    tmp_path, monkeypatch, capsys, others
):
    """All of them count the same memory as free, as none has made its copy yet; how many could run does not matter."""
    monkeypatch.setenv("RM_OPT_DEVICE_SLOTS", "4")
    monkeypatch.setattr(saving, "NAME", f"test-{os.getpid()}-")  # others than those of tests that run meanwhile
    monkeypatch.setattr(saving, "peak_memory_bytes", lambda device: 0)
    tensors = {"model.weight": torch.zeros(2**10)}
    together = (others + 1) * tensors["model.weight"].nbytes
    with ExitStack() as running:
        for number in range(others):
            running.enter_context(StateSaver(tmp_path / f"other {number}", 1e9, ALONE))
        with StateSaver(tmp_path / "ended", 1e9, ALONE):
            pass
        for free, is_copied in ((2 * together, True), (2 * together - 2 * (others + 1), False)):
            monkeypatch.setattr(saving, "free_bytes", lambda device, free=free: free)
            steps = Steps(tmp_path / str(free), tensors)
            with steps.saver:
                steps.save(1)
            assert ("no room for a copy" not in capsys.readouterr().err) == is_copied


@pytest.mark.parametrize("every", [10, 80])
def test_fifty_times_what_the_last_one_took_passes_before_the_next_and_never_less_than_is_set(
    tmp_path, monkeypatch, every
):
    ticks = itertools.count()  # the clock moves by a second as it is read, so a state takes one
    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    # Room for the copy is made once, and takes ten seconds.
    monkeypatch.setattr(saving, "free_bytes", lambda device: [next(ticks) for _ in range(10)] and 2**40)
    steps = Steps(tmp_path, {"model.weight": torch.zeros(3)}, every)
    with steps.saver:
        waited = []
        for step in (1, 2):
            waited.append(next(count for count in itertools.count(1) if steps.saver.is_due()))
            steps.save(step)
            steps.saver.wait()
        waited.append(next(count for count in itertools.count(1) if steps.saver.is_due()))
    assert waited == [every, max(50, every), max(50, every)]
