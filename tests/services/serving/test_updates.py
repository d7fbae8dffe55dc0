"""Weights of a server that answers: exchanged as a whole, verified, or left as they were."""

from pathlib import Path

import pytest
import torch

import serving_world as world
from rmcore.config.data import GoldConfig
from rmcore.config.model import LoraSettings
from rmcore.config.train import TrainConfig
from rmcore.core.tracking import MemoryTracker
from rmcore.data.gold.world import generate_pairs
from rmcore.models.lora import make_lora_config
from rmcore.serving.weight_sync import PublishEvery
from rmcore.training.loop import Trainer

pytestmark = pytest.mark.services


def folders(version) -> list[str]:
    return [path.name for path in Path(version.weights_folder).iterdir() if path.is_dir()]


@pytest.mark.parametrize("mode", ["head_only", "lora"])
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
