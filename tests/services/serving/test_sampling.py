"""Samples from a vLLM that dies meanwhile; what a real one draws: test_rollouts.py."""

import json
import os

import pytest

import small_vllm
from machine import family, group_leaders
from rmcore.core.errors import ServingError
from rmcore.core.processes import runs
from rmcore.policy.policy import Policy
from rmcore.policy.sampling.sampler import SamplingSettings
from rmcore.policy.sampling.sampling import draw_samples

pytestmark = pytest.mark.services


def test_a_vllm_that_dies_is_started_again_and_after_that_the_same_call_goes_on(
    policy_folder, tmp_path, capfd, monkeypatch
):
    """A small program is in its place; what a real one answers when its engine dies, test_rollouts.py shows."""
    monkeypatch.setenv("RM_OPT_VLLM", str(small_vllm.make_program(tmp_path)))
    monkeypatch.setattr("rmcore.policy.sampling.vllm_sampler.MAX_RESTARTS", 1)
    # One that is killed at its first answer may have computed all that it was asked by then: a third of the prompts.
    monkeypatch.setattr("rmcore.policy.sampling.vllm_sampler.SAMPLES_IN_FLIGHT", 20 * 16)
    policy, prompts = Policy.load(policy_folder), [f"What is {number} + 2?" for number in range(60)]
    settings, out, killed = SamplingSettings(16, max_new_tokens=24), tmp_path / "s.jsonl", []

    def engines():
        found = [one for one, words in family(os.getpid()).items() if str(tmp_path) in words]
        return [one for one in found if runs(one)]

    def draw(**options):
        return draw_samples(policy, prompts, settings, out, engine="vllm", device="cpu", **options)

    def kill_each_engine_after_its_first_prompt(done, total, text):
        for engine in group_leaders(str(tmp_path)):
            if done and engine.pid not in killed:
                killed.append(engine.pid)
                engine.kill()

    with pytest.raises(ServingError, match=r"died 2 times while it sampled(.*\n)+.*are stored in") as caught:
        draw(report=kill_each_engine_after_its_first_prompt)
    assert len(killed) == 2
    assert not engines()
    said = capfd.readouterr().err
    assert said.count("vLLM died while it sampled") == 1
    assert "Traceback" not in said
    stored = out.read_bytes()
    num_stored = stored.count(b"\n")
    assert 2 <= num_stored <= 2 * 20
    assert f"The samples of {num_stored} of 60 prompts are stored" in str(caught.value)

    found = draw()
    rows, before = ([json.loads(line) for line in text.splitlines()] for text in (out.read_bytes(), stored))
    assert rows[:num_stored] == before
    assert sorted(row["prompt_index"] for row in rows) == list(range(60))
    assert len(found.rows) == 60 * 16
    assert (found.rows["finished"] | (found.rows["num_tokens"] == 24)).all()
    assert found.rows["finished"].mean() == pytest.approx(1 - (7 / 8) ** 24, abs=0.05)
    assert not engines()
