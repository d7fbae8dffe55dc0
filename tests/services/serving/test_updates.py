"""Weights of a server that answers: exchanged as a whole, verified, or left as they were."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import serving_world as world
from machine import PATIENCE_S
from rmcore.config.data import GoldConfig
from rmcore.config.model import LoraSettings
from rmcore.config.train import TrainConfig
from rmcore.core.errors import ServingError
from rmcore.core.tracking import MemoryTracker
from rmcore.data.gold.world import generate_pairs
from rmcore.models.lora import make_lora_config
from rmcore.serving.weight_sync import PublishEvery
from rmcore.training.loop import Trainer

pytestmark = pytest.mark.services


def folders(version) -> list[str]:
    return [path.name for path in Path(version.weights_folder).iterdir() if path.is_dir()]


@pytest.mark.parametrize("mode", ["full", "head_only", "lora"])
def test_published_weights_answer_as_the_next_version(server, client, mode):
    before = client.version()
    rm = world.served_model(client)
    if mode == "lora":
        rm.add_lora(make_lora_config(LoraSettings(rank=4)), seed=3)
    torch.manual_seed(len(mode))
    with torch.no_grad():
        for name, parameter in rm.model.named_parameters():
            if (parameter.requires_grad and mode != "head_only") or "score" in name:
                parameter.add_(0.05 * torch.randn_like(parameter))
    published = world.publisher_of(server, mode).publish(rm)
    assert published.weight_version == before.weight_version + 1
    assert published.mode == mode
    assert published.checkpoint_digest != before.checkpoint_digest
    answer = client.score(world.INPUTS)
    assert answer.rewards == world.close(world.expected(rm))
    assert (answer.weight_version, answer.checkpoint_digest) == (published.weight_version, published.checkpoint_digest)
    assert world.expected(world.served_model(client)) == world.close(world.expected(rm))
    assert folders(published) == [Path(published.layout_folder).name]  # nothing older is kept


def test_a_training_publishes_as_it_goes(server, client, tmp_path):
    begin = client.version().weight_version
    rm = world.served_model(client)
    pairs = rm.renderer.tokenize_pairs(generate_pairs(GoldConfig(num_prompts=20), seed=0).pairs)
    tracker = MemoryTracker()
    Trainer(
        rm,
        TrainConfig(
            steps=4, pairs_per_step=2, lr=1e-3, eval_every=1, warmup_steps=0, early_stopping_patience=None,
            best_metric="last",
        ),
        train=pairs[:8],
        validation=pairs[8:12],
        folder=tmp_path,
        seed=0,
        tracker=tracker,
        callbacks=[PublishEvery(world.publisher_of(server), num_steps=2)],
    ).run()  # fmt: skip
    versions = [values.get("cost/published_version") for _, values in tracker.rows]
    assert [version for version in versions if version] == [begin + 1, begin + 2]
    assert client.score(world.INPUTS).rewards == world.close(world.expected(rm))


def test_a_head_of_other_weights_is_not_taken(server, client):
    """Only the head travels, but the backbone was trained too: the probe shows it, and the old weights serve on."""
    before, rewards = client.version(), client.score([[5, 6, 7]]).rewards
    stranger = world.new_model(41)
    with pytest.raises(ServingError, match=rf"differ .*(\n.*)*Version {before.weight_version} serves on"):
        world.publisher_of(server, "head_only").publish(stranger)
    assert client.version().weight_version == before.weight_version
    assert client.health().ready
    assert client.score([[5, 6, 7]]).rewards == world.close(rewards)


def test_updates_go_by_while_requests_are_answered(server, client):
    """At least 150 requests, 64 at a time, while 5 updates go by: each reward is that of its version, in order."""
    rms = [world.new_model(seed) for seed in (100, 101)]
    sides = rms[0].renderer.tokenize_sides([(f"{n} + {n}?", f"{2 * n}, " * (n % 9)) for n in range(200)])
    truth = [rm.score_sides(sides).tolist() for rm in rms]
    publisher, published = world.publisher_of(server), threading.Event()
    begin = client.version().weight_version
    numbers = itertools.count()

    def ask_on(busy):
        answers = []
        while (number := next(numbers)) < 150 or not published.is_set():
            rows = [(number * 31 + offset) % len(sides) for offset in range(1 + number % 7)]
            answers.append((rows, busy.score([sides[row].ids for row in rows])))
        return answers

    with server.client(max_concurrency=64, timeout_s=PATIENCE_S) as busy, ThreadPoolExecutor(64) as pool:
        publisher.publish(rms[0])
        asking = [pool.submit(ask_on, busy) for _ in range(64)]
        for number in range(1, 6):
            publisher.publish(rms[number % 2])
        published.set()
        answers = [answer for one in asking for answer in one.result()]
    assert len(answers) >= 150
    versions = {answer.weight_version - begin - 1 for _, answer in answers}
    assert versions <= set(range(6))
    assert len(versions) > 2
    for rows, answer in answers:
        of_version = truth[(answer.weight_version - begin - 1) % 2]
        assert answer.rewards == world.close(of_version[row] for row in rows)
    assert client.version().weight_version == begin + 6
