"""`rm-opt serve` from its start to Ctrl-C: who finds its token, and who is refused."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import serving_world as world
import small_vllm
from rmcore.serving.client import RewardClient
from rmcore.serving.token_file import kept_token, token_file

pytestmark = pytest.mark.services


def test_a_server_without_a_given_token_has_one_that_its_users_clients_find(checkpoint, server, tmp_path, monkeypatch):
    """It adds the rewards of the server of all tests, whose token is kept for its address, and of a function."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RM_OPT_TOKEN", raising=False)
    (tmp_path / "mine.py").write_text("def length(prompt, response):\n    return len(response)\n")
    further = {server.address: 2.0, "mine:length": 0.5}
    words = ["serve", "--checkpoint", str(checkpoint), "--port", "0", "--protocols", "slime,vllm"]
    words += ["--vllm", str(small_vllm.make_program(tmp_path))]
    words += ["--more-rewards", json.dumps(further)]
    command = [str(Path(sys.executable).with_name("rm-opt")), *words]
    # Started by a shell in the background or by a CI system, a process would have Ctrl-C ignored.
    default = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731
    with (
        kept_token(server.address, world.TOKEN),
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, preexec_fn=default) as started,  # noqa: PLW1509
        server.client() as peer,
    ):
        try:
            said = {}
            for line in started.stdout:
                name, _, rest = line.partition(" ")
                said.setdefault(name, rest.strip())
                if name == "protocols":
                    break
            address, token = said["serving"], said["token"]
            with RewardClient(address) as client:
                answer, version = client.score(world.INPUTS), client.version()
            peers = peer.score(world.INPUTS)
            assert answer.parts["own"] == world.close(world.expected(world.new_model(0)))
            assert answer.parts[server.address] == world.close(2 * one for one in peers.rewards)
            assert answer.parts["mine:length"] == tuple(0.5 * len(response) for _, response in world.PAIRS)
            assert answer.rewards == world.close(map(sum, zip(*answer.parts.values(), strict=True)))
            assert answer.further[server.address].checkpoint_digest == peers.checkpoint_digest
            assert (version.more_rewards, version.checkpoint_digest) == (further, answer.checkpoint_digest)
            bearer = {"Authorization": f"Bearer {token}"}
            assert httpx.get(f"{address}/health", headers=bearer).status_code == 200
            assert httpx.get(f"{address}/health").status_code == 401
            for stranger, status in (({"Host": "evil.example"}, 421), ({"Origin": "http://evil.example"}, 403)):
                assert httpx.get(f"{address}/health", headers=bearer | stranger).status_code == status
            assert said["protocols"].startswith("slime, vllm, at ")
            trainers = said["protocols"].partition(" at ")[2].replace("…", "slime")
            sample = {"prompt": "2 + 2?", "response": "4", "label": None}
            assert isinstance(httpx.post(trainers, json=sample, timeout=60).json(), float)
            kept = token_file(address)
            assert kept.read_text().strip() == token
            assert subprocess.run(["sh", "-c", said["try"] + " -sf"], capture_output=True, check=True).stdout
        finally:
            started.send_signal(signal.SIGINT)
            assert started.wait(90) == 0
    assert not kept.exists()
    assert "RM_OPT_TOKEN" not in os.environ
