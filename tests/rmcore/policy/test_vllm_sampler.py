"""The loop that asks vLLM runs apart from its caller; what vLLM itself does is tested with the services."""

import asyncio
import contextlib
import os
import signal

import pytest

from rmcore.policy.sampling.vllm_sampler import RunningVllm


class Idle:
    """In vLLM's place."""

    ended = False

    async def start(self, folder):
        pass

    async def stop(self):
        self.ended = True


@pytest.fixture
def hears_ctrl_c():
    """A shell that starts the tests in the background, as many CI systems do, has them ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_what_runs_apart_and_waits_for_its_end(hears_ctrl_c, tmp_path):
    ended, vllm = [], Idle()
    running = RunningVllm(vllm, tmp_path, tmp_path / "log")

    async def work():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        running.insist(work, tmp_path)
    running.close()
    assert ended == [vllm.ended] == [True]


def test_it_runs_where_an_event_loop_runs_already(tmp_path):
    async def work():
        return 7

    async def notebook():
        with contextlib.closing(RunningVllm(Idle(), tmp_path, tmp_path / "log")) as running:
            return running.insist(work, tmp_path)

    assert asyncio.run(notebook()) == 7
