"""Weights that are exchanged: an answer is of one version and never a mix, and a failed exchange leaves the old one."""

import asyncio
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from safetensors.torch import load_file, save_file

import small_vllm
from machine import PATIENCE_S, group_leaders, wait_for
from rmcore.core.errors import ConfigError, NotReadyError, RequestError, ServingError
from rmcore.core.processes import runs
from rmcore.serving.served import ServedModel, Weights
from rmcore.serving.types import RewardModelTrainingMode as Mode
from rmcore.serving.types import RewardProbe, WeightUpdate
from rmcore.serving.updates import stage_checkpoint, write_update
from rmcore.serving.vllm_process import EngineSettings, VllmEngine, find_vllm
from rmcore.serving.weight_files import WeightLayout, folder_digest, write_index

pytestmark = pytest.mark.slow
ROWS = ((1, 2, 3), (4,))
MAX_TOKENS = 16
NAMES = ("a", "b", "score.weight")


def probe_of(scale: float, rows=ROWS) -> RewardProbe:
    return RewardProbe(token_ids=rows, rewards=tuple(scale * len(row) for row in rows), tolerance=1e-4)


def state(scale: float) -> dict[str, torch.Tensor]:
    """Weights that give a reward of `scale` a token."""
    return {name: torch.full((1, 4), scale / 4) for name in NAMES}


@asynccontextmanager
async def serving(place: Path, files=(0, 0, 0)):
    """A served model whose rewards are 1 a token, answered by a small program that speaks as vLLM does."""
    model = place / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for name, which in zip(NAMES, files, strict=True):
        shards.setdefault("model.safetensors" if len(set(files)) == 1 else f"part{which}.safetensors", {})[name] = (
            state(1.0)[name]
        )
    for file, tensors in shards.items():
        save_file(tensors, model / file)
    if len(shards) > 1:
        write_index(model, shards)
    first = place / "weights" / "served-000001"
    stage_checkpoint(model, first)
    engine = VllmEngine(EngineSettings(small_vllm.make_program(place), "float32", MAX_TOKENS), place / "vllm.log")
    served = ServedModel(engine, Weights(1, first, folder_digest(first), Mode.FULL, probe_of(1.0)), "model")
    try:
        await served.start()
        yield served
    finally:
        await served.stop()


def published(served: ServedModel, scale: float, mode=Mode.HEAD_ONLY, changed=()) -> WeightUpdate:
    ref = write_update(served.weights.folder, state(scale), mode, changed=changed)
    return WeightUpdate(folder=ref.folder_name, digest=ref.digest, mode=mode, probe=probe_of(scale))


async def settled(served: ServedModel) -> None:
    """When an exchange is over, a restart is the one state that passes by itself."""
    async with asyncio.timeout(PATIENCE_S):
        while served.state == "restarting":
            await asyncio.sleep(0.02)


def with_probe(probe: RewardProbe) -> Callable[[WeightUpdate, Path], WeightUpdate]:
    return lambda update, folder: update.model_copy(update={"probe": probe})


def flip_a_byte(update: WeightUpdate, folder: Path) -> WeightUpdate:
    file = next(one for one in folder.glob("*.safetensors") if "score.weight" in load_file(one))
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    return update


LONG = tuple(range(1, MAX_TOKENS + 2))
BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "a probe that vLLM refuses": (
        with_probe(RewardProbe(token_ids=((small_vllm.VOCABULARY,),), rewards=(2.0,), tolerance=1e-4)),
        ServingError, r"was not taken: vLLM refuses .* serves on",
    ),
    "other rewards than the probe's": (with_probe(probe_of(999.0)), ServingError, "not served"),
    "a probe longer than is read": (with_probe(probe_of(1.0, (LONG,))), RequestError, "row of 17 tokens"),
    "a flipped byte": (flip_a_byte, RequestError, "cut short, changed"),
}  # fmt: skip


class Exchanges(RuleBasedStateMachine):
    """A server, and what its weights must be after each exchange, whatever went wrong in it."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.temporary = TemporaryDirectory()
        self.place = Path(self.temporary.name)
        self.scale, self.version, self.restarts = 1.0, 1, 0
        self.expected = state(1.0)

    def run(self, what):
        return self.loop.run_until_complete(what)

    @initialize(files=st.lists(st.integers(0, 2), min_size=3, max_size=3))
    def start(self, files):
        self.opened = serving(self.place, files)
        self.served = self.run(self.opened.__aenter__())

    def teardown(self):
        self.run(self.opened.__aexit__(None, None, None))
        self.loop.close()
        self.temporary.cleanup()

    def fails(self, update, error, match=None):
        async def wait():
            with pytest.raises(error, match=match):
                await self.served.update(update)
            await settled(self.served)

        self.run(wait())

    def take(self, scale, mode=Mode.HEAD_ONLY, changed=()):
        """Expect what an update has brought."""
        self.scale, self.version = scale, self.version + 1
        for name in NAMES if mode is Mode.FULL else ("score.weight", *(changed if mode is Mode.LORA else ())):
            self.expected[name] = state(scale)[name]

    @rule(scale=st.integers(1, 50), mode=st.sampled_from(Mode), changed=st.sets(st.sampled_from("ab"), min_size=1))
    def exchange(self, scale, mode, changed):
        """While clients ask together all the time, some of whom leave: each answer is that of the version it names."""
        answers, inside, ended = [], [], asyncio.Event()

        async def client():
            while not ended.is_set():
                inside.append(self.served._gate._num_inside)
                answers.append(await self.served.score(ROWS))

        async def under_load():
            clients = [asyncio.create_task(client()) for _ in range(6)]
            await self.served.update(published(self.served, scale, mode, changed))
            clients[0].cancel()
            ended.set()
            await asyncio.wait(clients)
            assert not [one for one in clients[1:] if one.exception()]

        scale_of = {self.version: self.scale, self.version + 1: float(scale)}
        self.run(under_load())
        assert all(rewards == pytest.approx([3 * scale_of[w.version], scale_of[w.version]]) for rewards, w in answers)
        assert max(inside) > 1
        self.take(scale, mode, changed)

    @rule(scale=st.integers(1, 50), bad=st.sampled_from(sorted(BAD)))
    def not_taken(self, scale, bad):
        change, error, match = BAD[bad]
        update = published(self.served, scale)
        self.fails(change(update, self.served.weights.folder.parent / update.folder), error, match)

    @rule(num_bad=st.integers(1, 2))
    def answered_with_nonsense(self, num_bad):
        """One unexpected answer to the new weights' probe; one more to the old ones', after which vLLM is restarted."""
        update = published(self.served, 50.0)
        (self.place / "nonsense").write_text(str(num_bad))
        self.fails(update, KeyError)
        self.restarts += num_bad - 1

    @rule()
    def killed_during_an_exchange(self):
        async def kill():
            gate = self.place / "gate"
            os.mkfifo(gate)
            update = asyncio.create_task(self.served.update(published(self.served, 50.0)))
            with await asyncio.to_thread(gate.open, "wb"):  # it has been told to load them
                gate.unlink()
                [program] = group_leaders(str(self.place))
                program.kill()
                with pytest.raises(ServingError):
                    await update
            await settled(self.served)

        self.run(kill())
        self.restarts += 1

    @rule(scale=st.integers(1, 50))
    def two_of_which_the_first_ones_caller_leaves(self, scale):
        """It waits for a request under way, which its own version answers, and is over before the second begins."""

        async def leave():
            gate = self.place / "gate"
            os.mkfifo(gate)
            request = asyncio.create_task(self.served.score(ROWS))
            with await asyncio.to_thread(gate.open, "wb"):
                first = asyncio.create_task(self.served.update(published(self.served, 50.0)))
                async with asyncio.timeout(PATIENCE_S):
                    while self.served._gate._open.is_set():  # until it waits for the request
                        await asyncio.sleep(0.01)
                assert self.served.state == "ready"
                first.cancel()
                await asyncio.wait([first])
                second = asyncio.create_task(self.served.update(published(self.served, scale)))
                for _ in range(10):  # it is requested before the first one can continue
                    await asyncio.sleep(0)
                gate.unlink()
            return await request, await second

        (rewards, weights), info = self.run(leave())
        assert (rewards, weights.version) == (pytest.approx([3 * self.scale, self.scale]), self.version)
        self.take(50.0)
        self.take(scale)
        assert info.weight_version == self.version

    @invariant()
    def one_whole_version_answers(self):
        rewards, weights = self.run(self.served.score(ROWS))
        assert (rewards, weights.version) == (pytest.approx([3 * self.scale, self.scale]), self.version)
        assert (self.served.state, self.served.num_restarts) == ("ready", self.restarts)
        folder = weights.folder
        files = sorted(folder.glob("*.safetensors"))
        assert [file.name for file in files] == WeightLayout.read(folder).files
        found = {name: tensor for file in files for name, tensor in load_file(file).items()}
        assert found.keys() == self.expected.keys()
        assert all(torch.equal(found[name], self.expected[name]) for name in found)
        assert [one.name for one in folder.parent.glob("[!.]*")] == [folder.name]


def test_after_any_sequence_of_exchanges_the_last_that_was_taken_answers_alone():
    """A failure is shown as it was found: to look for a shorter one takes minutes of these seconds."""
    few = settings(max_examples=5, stateful_step_count=10, phases=[Phase.generate])
    run_state_machine_as_test(Exchanges, settings=few)


def test_a_restart_that_fails_unexpectedly_is_said_and_no_request_is_answered(tmp_path):
    async def run():
        async with serving(tmp_path) as served:
            update = published(served, 2.0)
            (tmp_path / "nonsense").write_text("3")
            with pytest.raises(KeyError):
                await served.update(update)
            await settled(served)
            assert served.state == "broken"
            with pytest.raises(NotReadyError, match=r"broken: .*KeyError"):
                await served.score(ROWS)

    asyncio.run(run())


def test_a_process_that_may_open_no_more_files_takes_no_living_vllm_for_a_dead_one(tmp_path):
    async def run():
        async with serving(tmp_path) as served:
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            lowest = os.dup(0)
            os.close(lowest)
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
            try:  # each but one needs a connection of its own
                answers = await asyncio.gather(*(served.score(ROWS) for _ in range(4)), return_exceptions=True)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            refused = [one for one in answers if isinstance(one, Exception)]
            assert refused
            assert all(isinstance(one, NotReadyError) and "ulimit" in str(one) for one in refused)
            assert (served.state, served.num_restarts) == ("ready", 0)
            assert (await served.score(ROWS))[0] == pytest.approx([3.0, 1.0])

    asyncio.run(run())


def test_a_row_without_a_finite_reward_is_named_and_the_others_are_scored_without_it(tmp_path):
    async def run():
        async with serving(tmp_path) as served:
            with pytest.raises(RequestError, match=r"inputs\.1: .*no finite reward") as refusal:
                await served.score([(1,), (2, small_vllm.POISON), (3,)])
            assert refusal.value.field == "inputs.1"
            assert (await served.score([(1,), (3,)]))[0] == pytest.approx([1.0, 1.0])

    asyncio.run(run())


def test_a_restart_that_the_machine_refuses_once_is_tried_again(tmp_path):
    async def run():
        async with serving(tmp_path) as served:
            served.engine.log = tmp_path / "gone" / "vllm.log"
            become = served._become

            def mended(state, reason=None):
                if "attempt 1" in (reason or ""):
                    served.engine.log.parent.mkdir()
                become(state, reason)

            served._become = mended
            await served.engine.kill()
            async with asyncio.timeout(PATIENCE_S):
                while served.num_restarts == 0 or served.state == "restarting":
                    await asyncio.sleep(0.02)
            assert (served.state, served.num_restarts) == ("ready", 2)

    asyncio.run(run())


def test_an_update_that_comes_while_vllm_restarts_is_kept_and_taken_later(tmp_path):
    async def run():
        async with serving(tmp_path) as served:
            update = published(served, 2.0)
            served._become("restarting", "vLLM ended.")
            with pytest.raises(NotReadyError):
                await served.update(update)
            served._become("ready")
            assert (await served.update(update)).weight_version == 2

    asyncio.run(run())


STARTER = """
import os, subprocess, sys
reading, writing = os.pipe()
command = [sys.executable, "-c", sys.argv[1], str(reading)]
program = subprocess.Popen(command, pass_fds=(reading,), start_new_session=True)
os.close(reading)
program.wait()
"""
ENDLESS = """
import os, signal, subprocess, sys, time
from rmcore.serving import vllm_start
vllm_start.ENDING_SECONDS = 0.1
vllm_start.end_with_starter(int(sys.argv[1]))
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
with subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE) as child:
    child.stdout.readline()
    signal.signal(signal.SIGTERM, ON_SIGTERM)
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("on_sigterm", ["signal.SIG_IGN", "lambda *_: os._exit(0)"])
def test_nothing_is_left_of_a_vllm_whose_starter_was_killed(on_sigterm):
    """Nor of an engine below it that does not hear SIGTERM, whether vLLM itself ends at that or not."""
    program = ENDLESS.replace("ON_SIGTERM", on_sigterm)
    with subprocess.Popen([sys.executable, "-c", STARTER, program], stdout=subprocess.PIPE) as starter:
        assert starter.stdout.readline() == b"ready\n"
        below = psutil.Process(starter.pid).children(recursive=True)
        assert len(below) == 3
        starter.kill()
        wait_for(lambda: not any(map(runs, below)))


def test_a_vllm_script_means_the_python_next_to_it(tmp_path):
    """Also by a link among other programs, one of which is another Python, as pipx and uv make it."""
    for name in ("environment", "linked"):
        (tmp_path / name).mkdir()
    python, other = (small_vllm.make_program(tmp_path / name) for name in ("environment", "linked"))
    script, link = python.with_name("vllm"), other.with_name("vllm")
    script.write_bytes(python.read_bytes())
    script.chmod(0o755)
    link.symlink_to(script)
    assert find_vllm(str(link)) == find_vllm(str(script)) == find_vllm(str(python)) == python
    python.unlink()
    with pytest.raises(ConfigError, match="is no program"):
        find_vllm(str(link))
