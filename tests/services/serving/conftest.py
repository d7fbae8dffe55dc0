"""One reward server and one policy's vLLM for all tests of this folder: each takes half a minute to start."""

import pytest

import serving_world as world
import small_policies as policies
from rmcore.policy.sampling.served_policy import create_vllm_policy_publisher
from rmcore.serving.http_app import HttpSettings
from rmcore.serving.server import RewardServer, ServeSettings


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "best"
    world.new_model(0).save(folder)
    return folder


@pytest.fixture(scope="package")
def server(vllm, checkpoint, tmp_path_factory):
    place = tmp_path_factory.mktemp("server")
    door = HttpSettings(token=world.TOKEN, max_body_bytes=2**20, max_pending_rows=600, protocols=("openrlhf", "slime"))
    settings = ServeSettings(str(checkpoint), port=0, vllm=vllm, weights_folder=place / "weights", http=door)
    log = place / "server.log"
    with RewardServer(settings, log=log) as running:
        yield running
        said = log.stat().st_size
    ending = log.read_bytes()[said:].decode()
    assert "stopping" in ending
    assert "Traceback" not in ending


@pytest.fixture(scope="package")
def policy_folder(tmp_path_factory):
    """Its output layer is its input embedding, as those of small models mostly are."""
    place = tmp_path_factory.mktemp("policy")
    return policies.new_policy(place, size="tiny", eos_token_id=policies.STOPS, **policies.RECOMMENDED)


@pytest.fixture(scope="package")
def served(vllm, policy_folder):
    with create_vllm_policy_publisher(policy_folder, max_seq_len=1024, vllm=vllm, device="cpu") as running:
        yield running
    assert not running._place.exists()


@pytest.fixture
def client(server):
    with server.client() as session:
        yield session
