"""`rm-opt serve` from its start to Ctrl-C: who finds its token, and who is refused."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import serving_world as world
import small_vllm
from machine import PATIENCE_S
from rmcore.serving.client import RewardClient
from rmcore.serving.token_file import token_file

pytestmark = pytest.mark.services


def test_a_server_without_a_given_token_has_one_that_its_users_clients_find(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RM_OPT_TOKEN", raising=False)
    words = ["serve", "--checkpoint", str(checkpoint), "--port", "0", "--protocols", "slime,openrlhf"]
    words += ["--vllm", str(small_vllm.make_program(tmp_path))]
    command = [str(Path(sys.executable).with_name("rm-opt")), *words]
    # Started by a shell in the background or by a CI system, a process would have Ctrl-C ignored.
    default = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, preexec_fn=default) as started:  # noqa: PLW1509
        try:
            said = {}
            for line in started.stdout:
                name, _, rest = line.partition(" ")
                said.setdefault(name, rest.strip())
                if name == "protocols":
                    break
            address, token = said["serving"], said["token"]
            with RewardClient(address) as client:
                answer = client.score(world.INPUTS)
            assert answer.rewards == world.close(world.expected(world.new_model(0)))
            assert httpx.get(f"{address}/health", timeout=PATIENCE_S).status_code == 401
            assert said["protocols"].startswith("slime, openrlhf, at ")
            trainers = said["protocols"].partition(" at ")[2].replace("…", "slime")
            sample = {"prompt": "2 + 2?", "response": "4", "label": None}
            assert isinstance(httpx.post(trainers, json=sample, timeout=PATIENCE_S).json(), float)
            kept = token_file(address)
            assert kept.read_text().strip() == token
            assert subprocess.run(["sh", "-c", said["try"] + " -sf"], capture_output=True, check=True).stdout
        finally:
            started.send_signal(signal.SIGINT)
            assert started.wait(PATIENCE_S) == 0
    assert not kept.exists()
    assert "RM_OPT_TOKEN" not in os.environ
