"""Weights that are exchanged: whatever goes wrong, nobody is answered by weights that did not reproduce their probe."""

import asyncio
import os
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import torch
from safetensors.torch import save_file

import small_vllm
from machine import PATIENCE_S, family
from rmcore.core.errors import NotReadyError, RequestError, ServingError
from rmcore.serving.engine import VllmEngine
from rmcore.serving.http_app import HttpSettings, RewardApp
from rmcore.serving.model_files import folder_digest
from rmcore.serving.served import ServedModel, Weights
from rmcore.serving.staging import stage_checkpoint
from rmcore.serving.types import PoolingType, RewardProbe, WeightUpdate
from rmcore.serving.types import RewardModelTrainingMode as Mode
from rmcore.serving.updates import write_update
from rmcore.serving.vllm_process import EngineSettings
from rmcore.serving.weight_files import WeightLayout
from torch_engine import answering

ROWS = ((1, 2, 3), (4,))
MAX_TOKENS = 16


def probe_of(scale: float, rows=ROWS) -> RewardProbe:
    return RewardProbe(token_ids=rows, rewards=tuple(scale * len(row) for row in rows), tolerance=1e-4)


def state(scale: float) -> dict[str, torch.Tensor]:
    return {"layer.0": torch.ones(2), "score.weight": torch.full((1, 4), scale / 4)}


@asynccontextmanager
async def serving(place: Path):
    """A served model whose rewards are 1 a token, answered by a small program that speaks as vLLM does."""
    model = place / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    save_file(state(1.0), model / "model.safetensors")
    first = place / "weights" / "served-000001"
    stage_checkpoint(model, first)
    engine = VllmEngine(EngineSettings(small_vllm.make_program(place), "float32", MAX_TOKENS), place / "vllm.log")
    served = ServedModel(engine, Weights(1, first, folder_digest(first), Mode.FULL, probe_of(1.0)), "model")
    try:
        await served.start()
        yield served
    finally:
        await served.stop()


def published(served: ServedModel, scale: float, probe: RewardProbe | None = None) -> WeightUpdate:
    folder = served.weights.folder
    ref = write_update(folder.parent, state(scale), Mode.HEAD_ONLY, WeightLayout.read(folder))
    return WeightUpdate(folder=ref.folder_name, digest=ref.digest, mode=Mode.HEAD_ONLY, probe=probe or probe_of(scale))


async def settled(served: ServedModel) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while served.state in ("updating", "restarting"):
            await asyncio.sleep(0.02)


async def assert_answers(served: ServedModel, scale: float, version: int) -> None:
    rewards, weights = await served.score(ROWS)
    assert (rewards, weights.version) == (pytest.approx([3 * scale, scale]), version)
    assert served.state == "ready"


@pytest.mark.slow
def test_an_update_that_reproduces_its_probe_answers_as_the_next_version(tmp_path):
    async def run():
        async with serving(tmp_path) as served:
            await assert_answers(served, 1.0, 1)
            await served.update(published(served, 2.0))
            await assert_answers(served, 2.0, 2)

    asyncio.run(run())


@pytest.mark.slow
def test_a_probe_that_vllm_refuses_leaves_the_old_weights_answering(tmp_path):
    stranger = RewardProbe(token_ids=((small_vllm.VOCABULARY,),), rewards=(2.0,), tolerance=1e-4)

    async def run():
        async with serving(tmp_path) as served:
            with pytest.raises(ServingError, match=r"version 2 was not taken: vLLM refuses .* Version 1 serves on"):
                await served.update(published(served, 2.0, stranger))
            await assert_answers(served, 1.0, 1)
            await served.update(published(served, 3.0))  # and the next one is taken
            await assert_answers(served, 3.0, 2)
            assert served.num_updates == {"done": 1, "refused": 0, "failed": 1}

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("num_bad", [1, 2])
def test_what_nobody_expected_is_raised_and_the_old_weights_answer(tmp_path, num_bad):
    """One unexpected answer to the new weights' probe; one more to the old ones', after which vLLM starts anew."""

    async def run():
        async with serving(tmp_path) as served:
            update = published(served, 2.0)
            (tmp_path / "nonsense").write_text(str(num_bad))
            with pytest.raises(KeyError):
                await served.update(update)
            await settled(served)
            assert served.num_restarts == num_bad - 1
            await assert_answers(served, 1.0, 1)

    asyncio.run(run())


@pytest.mark.slow
def test_a_vllm_that_is_killed_during_an_update_comes_back_with_the_old_weights(tmp_path):
    async def run():
        async with serving(tmp_path) as served:
            gate = tmp_path / "gate"
            os.mkfifo(gate)
            update = asyncio.create_task(served.update(published(served, 2.0)))
            with await asyncio.to_thread(gate.open, "wb"):  # it has been told to load them
                gate.unlink()
                [program] = [one for one, words in family(os.getpid()).items() if str(tmp_path) in words]
                program.kill()
                with pytest.raises(ServingError):
                    await update
            await settled(served)
            assert served.num_restarts == 1
            await assert_answers(served, 1.0, 1)

    asyncio.run(run())


@pytest.mark.slow
def test_a_restart_that_fails_unexpectedly_is_said_and_nobody_is_answered(tmp_path):
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


@pytest.mark.slow
def test_a_probe_that_is_longer_than_the_server_reads_is_refused_before_anything_is_touched(tmp_path):
    rows = (tuple(range(1, MAX_TOKENS + 1)), tuple(range(1, MAX_TOKENS + 2)))

    async def run():
        async with serving(tmp_path) as served:
            with pytest.raises(RequestError, match=f"row of {MAX_TOKENS + 1} tokens"):
                await served.update(published(served, 2.0, probe_of(2.0, rows)))
            assert served.num_updates == {"done": 0, "refused": 1, "failed": 0}
            await assert_answers(served, 1.0, 1)
            await served.update(published(served, 2.0, probe_of(2.0, rows[:1])))  # as long as it reads is read
            await assert_answers(served, 2.0, 2)

    asyncio.run(run())


@pytest.mark.slow
def test_an_exchange_whose_caller_left_is_over_before_the_next_one_begins(tmp_path):
    """The first waits for a request under way when its caller leaves and the second one comes."""

    async def run():
        async with serving(tmp_path) as served:
            gate = tmp_path / "gate"
            os.mkfifo(gate)
            request = asyncio.create_task(served.score(ROWS))
            with await asyncio.to_thread(gate.open, "wb"):
                first = asyncio.create_task(served.update(published(served, 2.0)))
                async with asyncio.timeout(PATIENCE_S):
                    while not (served.weights.folder.parent / "served-000002").exists():
                        await asyncio.sleep(0.01)
                first.cancel()
                await asyncio.wait([first])
                second = asyncio.create_task(served.update(published(served, 3.0)))
                for _ in range(10):  # it is asked for before the first one can go on
                    await asyncio.sleep(0)
                gate.unlink()
            assert (await request)[1].version == 1
            assert (await second).weight_version == 3
            await assert_answers(served, 3.0, 3)
            assert served.num_updates == {"done": 2, "refused": 0, "failed": 0}

    asyncio.run(run())


NUM_CLIENTS, NUM_ROWS, ROWS_OF_A_REQUEST = 64, 10_000, 8


@pytest.mark.slow
def test_an_update_under_the_load_of_another_protocol_loses_and_mixes_nothing(rm, tmp_path):
    """64 clients that know no versions, 10,000 rows, some of the clients gone before they are answered."""
    rows = [[1 + index % 7] * (1 + index * 7 % MAX_TOKENS) for index in range(NUM_ROWS)]
    parts = [range(start, min(start + ROWS_OF_A_REQUEST, NUM_ROWS)) for start in range(0, NUM_ROWS, ROWS_OF_A_REQUEST)]
    settings = HttpSettings(token="t", protocols=("vllm",))
    opened = serving(tmp_path)

    async def make():
        served = await opened.__aenter__()
        return RewardApp(served, rm.renderer, pooling=PoolingType.LAST, vocab_size=1000, settings=settings)

    async def ask(session, app, part):
        body = {"input": [rows[index] for index in part], "use_activation": False}
        async with session.post(f"http://rm:t@127.0.0.1:{app.port}/classify", json=body) as answer:
            answer.raise_for_status()
            data = (await answer.json())["data"]
        return int(answer.headers["X-Weight-Version"]), [row["probs"][0] for row in data]

    async def work(app):
        waiting, answers, half = list(parts), {}, asyncio.Event()

        async def client(session):
            while waiting:
                part = waiting.pop()
                if part.start % 25 == 0:  # one whose client leaves, and asks again
                    with pytest.raises(TimeoutError):
                        async with asyncio.timeout(0.0):
                            await ask(session, app, part)
                answers[part] = await ask(session, app, part)
                if len(answers) > len(parts) // 2:
                    half.set()

        async def publish():
            await half.wait()
            update = published(app.served, 2.0)
            url, body = f"http://rm:t@127.0.0.1:{app.port}/weights", update.model_dump(mode="json")
            async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
                answer.raise_for_status()

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=NUM_CLIENTS)) as session:
            await asyncio.gather(publish(), *(client(session) for _ in range(NUM_CLIENTS)))
        return answers

    with answering(make) as app:
        answers = asyncio.run(work(app))
        assert (app._pending_rows, app._pending_bytes) == (0, 0)
    assert answers.keys() == set(parts)
    assert {version for version, _ in answers.values()} == {1, 2}
    for part, (version, rewards) in answers.items():  # a reward is the version times the number of tokens
        assert rewards == pytest.approx([version * len(rows[index]) for index in part])
