"""What becomes of a server whose parts die, and what is refused before it starts."""

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest
import torch

import serving_world as world
import small_vllm
from machine import PATIENCE_S
from rmcore.config.model import LoraSettings, ModelConfig
from rmcore.core.errors import ConfigError, ServingError
from rmcore.core.processes import runs
from rmcore.models.lora import make_lora_config
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.serving.parity import BF16_TOLERANCE
from rmcore.serving.server import RewardServer, ServeSettings, serve

pytestmark = pytest.mark.services


@pytest.mark.night
def test_an_adapter_is_served_with_its_base_also_in_bf16_and_a_killed_program_leaves_nothing(
    vllm, checkpoint, tmp_path, monkeypatch
):
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")  # as users have it
    rm = BradleyTerryRM.from_pretrained(checkpoint, device="cpu")
    without = world.expected(rm)
    rm.add_lora(make_lora_config(LoraSettings(rank=4)), seed=3)
    drawn = torch.Generator().manual_seed(0)  # not of the tests before: as noise grows, so does what bf16 rounds
    with torch.no_grad():
        for parameter in rm.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.01 * torch.randn(parameter.shape, generator=drawn))
    rm.save(tmp_path / "trained")
    settings = ServeSettings(str(tmp_path / "trained" / "adapter"), port=0, vllm=vllm, dtype="bfloat16")
    with RewardServer(settings, log=tmp_path / "log") as running:
        with running.client() as session:
            answer = session.score(world.INPUTS)
            assert session.version().dtype == "bfloat16"
        family = psutil.Process(running.pid).children(recursive=True)
        assert len(family) >= 3
        os.kill(running.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert not [process for process in alive if runs(process)]
    truth = world.expected(rm)
    assert max(abs(one - other) for one, other in zip(truth, without, strict=True)) > 0.1  # the adapter matters
    assert answer.rewards == pytest.approx(truth, abs=BF16_TOLERANCE * max(1.0, max(truth) - min(truth)))
    assert answer.rewards != world.close(truth)  # it did compute in bf16


def serve_here(settings):
    """What the server's process does, in this one, which has imported everything: for what is refused at once."""
    asyncio.run(serve(settings, lambda address: pytest.fail(f"it serves at {address}")))


def program(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_rewards_that_are_not_the_checkpoints_are_never_served(checkpoint, tmp_path):
    """Other weights than it was told: what a wrong loader, pooling or head would look like."""
    other = tmp_path / "other"
    world.new_model(5).save(other)
    (tmp_path / "confused").mkdir()
    confused = f"""for word; do shift; case "$word" in */served-000001) word={other};; esac; set -- "$@" "$word"; done
exec {small_vllm.make_program(tmp_path)} "$@" """
    settings = ServeSettings(str(checkpoint), port=0, vllm=program(tmp_path / "confused" / "python", confused))
    with pytest.raises(ServingError, match=r"differ from PyTorch's by up to .* Worst: row \d+, \d+ tokens: expected"):
        serve_here(settings)


def test_a_vllm_that_does_not_answer_in_time_is_given_up(checkpoint, tmp_path):
    silent = program(tmp_path / "sleeper", "exec sleep 600")
    settings = ServeSettings(str(checkpoint), port=0, vllm=silent, start_timeout_s=1)
    with pytest.raises(ServingError, match="did not answer within 1 s"):
        serve_here(settings)


def test_a_vllm_that_does_not_start_is_quoted_and_what_a_rendering_function_prints_is_logged(tmp_path, monkeypatch):
    (tmp_path / "printing_renderer.py").write_text(
        "print('at its import')\n\ndef join(prompt, completion):\n    print('in a call ' * 9000)\n"
        "    return f'{prompt} => {completion}'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    printing = "printing_renderer:join"
    model = ModelConfig(name="tiny", max_seq_len=world.MAX_SEQ_LEN, render_fn=printing)
    BradleyTerryRM.new(model, seed=0, device=torch.device("cpu")).save(tmp_path / "custom")
    failing = program(tmp_path / "python", "echo no such device; exit 7")
    settings = ServeSettings(str(tmp_path / "custom"), port=0, vllm=failing, render_fn=printing)
    log = tmp_path / "log"
    with pytest.raises(ServingError, match=r"status 7 while it started(.*\n)+ +no such device"):
        RewardServer(settings, log=log).__enter__()
    assert "at its import" in log.read_text()
    assert "in a call" in log.read_text()


def test_a_vllm_that_is_not_there_is_said_before_anything_is_loaded(checkpoint):
    with pytest.raises(ConfigError, match="is no program"):
        serve_here(ServeSettings(str(checkpoint), vllm="/no/such/python"))
    settings = ServeSettings(str(checkpoint), vllm="rm-opt-no-such-program")  # and who started the process hears of it
    with pytest.raises(ConfigError, match="is no program"), RewardServer(settings):
        pass
