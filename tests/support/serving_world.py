"""Reward models and the server of the tests in this folder."""

import psutil
import pytest
import torch

from machine import family
from rmcore.config.model import ModelConfig
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.serving.parity import FLOAT32_TOLERANCE
from rmcore.serving.weight_sync import create_rm_publisher

TOKEN = "a-secret-of-this-test"
MAX_SEQ_LEN = 96
PAIRS = [("What is 2 + 2?", "4"), ("What is 2 + 2?", "Five, I think."), ("Grüße! 🙂", ""), ("Count.", "one two " * 8)]
INPUTS = [{"prompt": prompt, "response": response} for prompt, response in PAIRS]


def new_model(seed: int) -> BradleyTerryRM:
    """A tiny reward model whose rewards differ by tenths of a logit from those of another seed."""
    settings = ModelConfig(name="tiny", max_seq_len=MAX_SEQ_LEN)
    return BradleyTerryRM.new(settings, seed=seed, device=torch.device("cpu"))


def close(rewards) -> object:
    return pytest.approx(list(rewards), abs=FLOAT32_TOLERANCE)


def expected(rm: BradleyTerryRM, pairs=PAIRS) -> list[float]:
    return rm.score(*zip(*pairs, strict=True)).tolist()


def publisher_of(server, mode="full"):
    return create_rm_publisher(server.address, token=TOKEN, mode=mode)


def served_model(client) -> BradleyTerryRM:
    """The weights that are served now, as PyTorch reads them."""
    return BradleyTerryRM.from_pretrained(client.version().layout_folder, device="cpu")


def engine_of(server) -> psutil.Process:
    """vLLM's engine; its API server is another process, which notices later that the engine is gone."""
    [engine] = [one for one, words in family(server.pid).items() if "EngineCore" in words[0]]
    return engine
