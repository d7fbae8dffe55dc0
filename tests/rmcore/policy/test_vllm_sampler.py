"""The loop that asks vLLM runs apart from its caller; what vLLM itself does is tested with the services."""

import asyncio
import os
import signal

import pytest

from rmcore.policy.sampling import vllm_sampler


@pytest.fixture
def hears_ctrl_c():
    """A shell that starts the tests in the background, as many CI systems do, has them ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_what_runs_apart_and_waits_for_its_end(hears_ctrl_c):
    ended = []

    async def work():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        vllm_sampler._run(work())
    assert ended == [True]


def test_it_runs_where_an_event_loop_runs_already():
    ended = []

    async def work():
        ended.append(True)

    async def notebook():
        vllm_sampler._run(work())

    asyncio.run(notebook())
    assert ended == [True]
