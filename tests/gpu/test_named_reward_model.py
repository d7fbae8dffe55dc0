"""A reward model that you name, behind a real vLLM: VLLM_RM_MODEL=FOLDER pytest -m integration tests/gpu

VLLM_RM_SYNC=1 publishes changed weights to it, too. It runs on whatever vLLM was built for.
"""

import os

import pytest
import torch

from rmcore.models.reward_model import BradleyTerryRM
from rmcore.serving.http_app import HttpSettings
from rmcore.serving.server import RewardServer, ServeSettings
from rmcore.serving.weight_sync import create_rm_publisher
from rmcore.tutorial import get_reward_model_version

MODEL = os.environ.get("VLLM_RM_MODEL")
TOKEN = "a-token-of-this-test"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.services,
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL, reason="VLLM_RM_MODEL names no reward model"),
]
ROWS = [("What is 2 + 2?", "4"), ("What is 2 + 2?", "Five, I think."), ("Name a colour.", "Blue.")]


@pytest.fixture(scope="module")
def server(vllm, tmp_path_factory):
    place = tmp_path_factory.mktemp("named")
    door = HttpSettings(token=TOKEN)
    settings = ServeSettings(str(MODEL), port=0, vllm=vllm, weights_folder=place / "weights", http=door)
    with RewardServer(settings, log=place / "server.log") as running:
        yield running


def answers(server):
    with server.client() as client:
        return list(client.score([{"prompt": prompt, "response": response} for prompt, response in ROWS]).rewards)


def test_the_rewards_are_those_of_transformers(server):
    expected = BradleyTerryRM.from_pretrained(str(MODEL)).score(*zip(*ROWS, strict=True)).tolist()
    assert answers(server) == pytest.approx(expected, abs=1e-2 if torch.cuda.is_available() else 1e-4)


@pytest.mark.skipif(os.environ.get("VLLM_RM_SYNC") != "1", reason="VLLM_RM_SYNC is not 1")
def test_published_weights_answer_under_the_next_version(server):
    rm = BradleyTerryRM.from_pretrained(str(MODEL))
    before = get_reward_model_version(server.address, token=TOKEN)
    with torch.no_grad():
        for name, parameter in rm.model.named_parameters():
            if "score" in name or "classifier" in name:
                parameter.mul_(1.5)
    published = create_rm_publisher(server.address, token=TOKEN, mode="head_only").publish(rm)
    assert published.weight_version == get_reward_model_version(server.address, token=TOKEN) == before + 1
    expected = rm.score(*zip(*ROWS, strict=True)).tolist()
    assert answers(server) == pytest.approx(expected, abs=1e-2 if torch.cuda.is_available() else 1e-4)
