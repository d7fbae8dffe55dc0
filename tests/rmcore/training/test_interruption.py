"""Ctrl-C and SIGTERM: the step is finished, its state saved, and resuming from it changes nothing."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from rmcore.training.interruption import ECHO_SECONDS, deferred_interruption
from rmcore.training.resume import find_resume_point


def at_step(wanted, number, times=1):
    """Raise the signal `times` times when that step is done."""

    def stop(step):
        if step == wanted:
            for _ in range(times):
                signal.raise_signal(number)

    return stop


@pytest.mark.slow
@pytest.mark.parametrize(("number", "step"), [(signal.SIGINT, 3), (signal.SIGTERM, 4)])
def test_an_interrupted_training_goes_on_to_the_same_bits(tmp_path, start, undisturbed, number, step, capfd):
    folder = tmp_path / "interrupted"
    interrupted = start(folder, stop=at_step(step, number, times=2))  # the echo of a signal is the same request
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        interrupted.run()
    assert signal.getsignal(number) is before
    assert capfd.readouterr().err.count("stopping after this step") == 1
    point = find_resume_point(folder)
    assert point.step == step
    saved = {name: value for file in point.state.glob("*.safetensors") for name, value in load_file(file).items()}
    assert all(torch.equal(value, saved[f"model.{name}"]) for name, value in interrupted.rm.model.named_parameters())
    assert (folder / "metrics.csv").is_file()

    resumed = start(folder).run()
    assert resumed.result.resumed_from == [step]
    resumed.assert_same(undisturbed)


@pytest.mark.slow
def test_a_signal_in_the_last_step_is_heard_too(tmp_path, start):
    """Whoever stops a pipeline does not want its next stage, even if this one was just about to end."""
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, stop=at_step(6, signal.SIGTERM)).run()
    resumed = start(tmp_path).run()
    assert (resumed.result.num_steps, resumed.result.resumed_from) == (6, [6])
    assert (tmp_path / "step_6").is_dir()


@pytest.mark.slow
def test_a_signal_to_the_whole_process_group_in_mid_step_saves_too(tmp_path):
    """As Slurm, systemd and `timeout` send it: to workers as well as to the trainer."""
    program = (
        "import os, subprocess, sys\n"
        "from pathlib import Path\n"
        "from conftest import Training\n"
        "from rmcore.config.data import GoldConfig\n"
        "from rmcore.data.gold.world import generate_pairs\n"
        "pairs = generate_pairs(GoldConfig(num_prompts=20, pairs_per_prompt=2), seed=0).pairs\n"
        "training = Training(Path(sys.argv[1]), pairs[:20], pairs[20:30], num_workers=2)\n"
        "def ask(head, *_):\n"
        "    if head.training and training.trainer.progress.step == 2 and not asked:\n"
        "        asked.append(True)\n"
        "        subprocess.run(['kill', '-TERM', '--', str(-os.getpgrp())], check=False, start_new_session=True)\n"
        "asked = []\n"
        "training.rm.model.score.register_forward_hook(ask)\n"
        "try:\n"
        "    training.run()\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
    )
    places = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], env=os.environ | {"PYTHONPATH": places},
        capture_output=True, text=True, start_new_session=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr[-2000:]
    assert find_resume_point(tmp_path).step == 3


def test_a_second_signal_later_ends_at_once():
    with deferred_interruption() as interruption:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert interruption.requested
        interruption.since -= 2 * ECHO_SECONDS
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.slow
def test_a_signal_while_something_is_printed_does_no_harm():
    """A handler may not use the buffered stream that it interrupts: that is a RuntimeError in the middle of a step."""
    program = (
        "import signal, sys, time\n"
        "from rmcore.training.interruption import deferred_interruption\n"
        "def ask(*_):\n"
        "    interruption.since = None\n"
        "    interruption.note(signal.SIGTERM, None)\n"
        "with deferred_interruption() as interruption:\n"
        "    signal.signal(signal.SIGALRM, ask)\n"
        "    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0005)\n"
        "    until = time.monotonic() + 0.5\n"
        "    while time.monotonic() < until:\n"
        "        print('x' * 100_000, file=sys.stderr)\n"
        "    signal.setitimer(signal.ITIMER_REAL, 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr[-500:]


def test_in_another_thread_nothing_is_caught():
    from concurrent.futures import ThreadPoolExecutor

    def enter():
        with deferred_interruption() as interruption:
            time.sleep(0)
            return interruption.requested, signal.getsignal(signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(enter).result() == (False, signal.getsignal(signal.SIGINT))


def test_what_is_ignored_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with deferred_interruption() as interruption:
        signal.raise_signal(signal.SIGINT)
        assert not interruption.requested
        signal.raise_signal(signal.SIGTERM)
        assert interruption.requested
