"""Samples from a vLLM of a call's own: the policy's distribution by a real one, and what happens when it dies."""

import json
import math
import os

import pytest

import small_policies as policies
import small_vllm
from machine import family
from rmcore.core.errors import ServingError
from rmcore.core.processes import runs
from rmcore.policy.policy import Policy
from rmcore.policy.sampling.sampler import SamplingSettings
from rmcore.policy.sampling.sampling import draw_samples

pytestmark = pytest.mark.services


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """Ends one response in eight at each token, and recommends what nobody asked for."""
    advice = policies.RECOMMENDED | {"eos_token_id": policies.STOPS}
    return Policy.load(policies.new_policy(tmp_path_factory.mktemp("policy"), size="tiny", **advice))


def draw(policy, prompts, settings, out, **options):
    return draw_samples(policy, prompts, settings, out, engine="vllm", device="cpu", **options)


OTHERS: set[int] = set()
"""What ran before a test began, such as the server that other files of this folder share."""


@pytest.fixture(autouse=True)
def others():
    OTHERS.clear()
    OTHERS.update(process.pid for process in family(os.getpid()))


def left_over(name="vllm"):
    found = {one: " ".join(words).lower() for one, words in family(os.getpid()).items() if one.pid not in OTHERS}
    return [process for process, words in found.items() if name in words and runs(process)]


def test_the_first_token_has_the_policys_distribution_and_ends_where_it_says(vllm, policy, tmp_path):
    prompts, num_samples = ["What is 2 + 2?", "Why?"], 3000
    found = draw(policy, prompts, SamplingSettings(num_samples, 0.2, 1), tmp_path / "s")
    assert (found.engine, len(found.rows)) == ("vllm", 2 * num_samples)
    assert not left_over()
    for index, prompt in enumerate(prompts):
        rows = found.rows[found.rows["prompt_index"] == index]
        assert policies.p_value(rows["response"], policies.first_texts(policy, prompt, 0.2)) > 1e-3
        assert policies.p_value(rows["response"], policies.first_texts(policy, prompt, 0.3)) < 1e-6
        ended = policies.first_texts(policy, prompt, 0.2)[""]  # no other token decodes to nothing, but for two
        scatter = math.sqrt(ended * (1 - ended) / num_samples)
        assert rows["finished"].mean() == pytest.approx(ended, abs=5 * scatter + 0.01)


def test_a_vllm_that_dies_is_started_again_and_after_that_the_same_call_goes_on(policy, tmp_path, capfd, monkeypatch):
    """A small program is in its place; what a real one answers when its engine dies, test_rollouts.py shows."""
    monkeypatch.setenv("RM_OPT_VLLM", str(small_vllm.make_program(tmp_path)))
    monkeypatch.setattr("rmcore.policy.sampling.vllm_sampler.MAX_RESTARTS", 1)
    # One that is killed at its first answer may have computed all that it was asked by then: a third of the prompts.
    monkeypatch.setattr("rmcore.policy.sampling.vllm_sampler.SAMPLES_IN_FLIGHT", 20 * 16)
    prompts = [f"What is {number} + 2?" for number in range(60)]
    settings, out, killed = SamplingSettings(16, max_new_tokens=24), tmp_path / "s.jsonl", []

    def kill_each_engine_after_its_first_prompt(done, total, text):
        for engine in left_over("small_vllm.py"):
            if done and engine.pid not in killed:
                killed.append(engine.pid)
                engine.kill()

    with pytest.raises(ServingError, match=r"died 2 times while it sampled(.*\n)+.*are stored in") as caught:
        draw(policy, prompts, settings, out, report=kill_each_engine_after_its_first_prompt)
    assert len(killed) == 2
    assert not left_over()
    said = capfd.readouterr().err
    assert said.count("vLLM died while it sampled") == 1
    assert "Traceback" not in said
    stored = out.read_bytes()
    num_stored = stored.count(b"\n") - 1
    assert 2 <= num_stored <= 2 * 20
    assert f"The samples of {num_stored} of 60 prompts are stored" in str(caught.value)

    found = draw(policy, prompts, settings, out)
    assert out.read_bytes().startswith(stored)
    drawn = [json.loads(line)["prompt_index"] for line in out.read_text().splitlines()[1:]]
    assert sorted(drawn) == list(range(60))
    assert len(found.rows) == 60 * 16
    assert (found.rows["finished"] | (found.rows["num_tokens"] == 24)).all()
    assert found.rows["finished"].mean() == pytest.approx(1 - (7 / 8) ** 24, abs=0.05)
    assert not left_over()
