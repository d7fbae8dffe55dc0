"""GRPO whose samples a real vLLM draws: other weights after each step, probabilities that are the trainer's, truncated
importance sampling where they are not, and a vLLM that is killed."""

import copy
import math
import stat
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import small_policies as policies
from machine import family
from rmcore.config.rlhf import RlhfConfig
from rmcore.core.errors import ModelError, ServingError
from rmcore.policy.grpo.grpo import HIGHEST_WEIGHT, make_grpo_with_rm
from rmcore.policy.policy import load_weights
from rmcore.policy.sampling.sampler import SamplingSettings

pytestmark = pytest.mark.services
PROMPTS = ["What is 2 + 2?", "Count.", "Grüße! 🙂", "word " * 100]
TEMPERATURE = 0.7
FURTHEST = "sampling/sampling_logp_difference/max"
ROUNDING = 1e-4
"""Nats; two float32 programs."""
SETTINGS = SamplingSettings(4, TEMPERATURE, max_new_tokens=12, seed=5)


class Length:
    """A reward that needs no server."""

    def score(self, rollouts):
        rewards = [float(len(rollout.steps[0].completion)) for rollout in rollouts]
        for rollout, reward in zip(rollouts, rewards, strict=True):
            rollout.meta.update(rm_score=reward, rm_score_version=1)
        return rewards


def trainer(served, out, *, steps, **options):
    settings = RlhfConfig(steps=steps, prompts_per_step=4, group_size=4, learning_rate=1e-3, measure_every=2)
    return make_grpo_with_rm(
        served.policy, PROMPTS, Length(), out=out, settings=settings, max_new_tokens=12, device="cpu",
        temperature=TEMPERATURE, served=served, **options,
    )  # fmt: skip


def moved(model, seed, size=0.05):
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.add_(size * torch.randn_like(parameter))
    return model


def token_log_probs(model, prompt, ids):
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
    return torch.log_softmax(logits.double(), -1).gather(1, torch.tensor(ids)[:, None])[:, 0]


def distance(model, prompts, groups):
    """The largest difference between what vLLM says of its tokens and what a model says of them."""
    return max(
        float((token_log_probs(model, prompt, one.ids) - torch.tensor(one.log_probs)).abs().max())
        for prompt, group in zip(prompts, groups, strict=True)
        for one in group
    )


def engines(served):
    return [process for process, words in family(served._vllm._process.pid).items() if "EngineCore" in words[0]]


def test_the_first_token_has_the_policys_distribution_and_ends_where_it_says(served):
    """Of the vLLM that `draw_samples` starts, too; one response in eight ends at each token."""
    policy, num_samples = served.policy, 3000
    for prompt in ("What is 2 + 2?", "Why?"):
        [drawn] = served.draw([policy.prompt_ids(prompt)], SamplingSettings(num_samples, 0.2, 1))
        ids = [one.ids[0] for one in drawn]
        texts = ["" if token in policy.stop_ids else policy.decode([token]) for token in ids]
        expected = policies.first_texts(policy, prompt, 0.2)
        assert policies.p_value(texts, expected) > 1e-3
        assert policies.p_value(texts, policies.first_texts(policy, prompt, 0.3)) < 1e-6
        ended = expected[""]  # no other token decodes to nothing, but for two
        scatter = math.sqrt(ended * (1 - ended) / num_samples)
        assert sum(token in policy.stop_ids for token in ids) / num_samples == pytest.approx(
            ended, abs=5 * scatter + 0.01
        )


def test_what_is_published_is_what_draws_from_then_on(served, policy_folder):
    ids = [served.policy.prompt_ids(prompt) for prompt in PROMPTS]
    model = load_weights(served.policy, torch.float32).train()
    before = distance(model, ids, served.draw(ids, SETTINGS))
    assert before < ROUNDING
    random_state, versions = torch.get_rng_state(), [served.version]
    for seed in range(2):
        former = copy.deepcopy(model).eval()
        versions.append(served.publish(moved(model, seed)))
        groups = served.draw(ids, SETTINGS)
        assert distance(model, ids, groups) < ROUNDING < distance(former, ids, groups)
        assert [len(group) for group in groups] == [4] * 4
        assert all(one.ids[-1] in served.policy.stop_ids or len(one.ids) == 12 for group in groups for one in group)
    assert versions == [versions[0], versions[0] + 1, versions[0] + 2]
    assert model.training
    assert torch.equal(torch.get_rng_state(), random_state)
    assert stat.S_IMODE(served._place.stat().st_mode) == 0o700
    assert [place.name for place in served._place.glob("version-*")] == [f"version-{served.version:06d}"]
    assert (
        not {"lm_head.weight"} & load_file(policy_folder / "model.safetensors").keys()
    )  # the policy's own stay as they are


def furthest(one):
    """By step how far vLLM's log-probabilities were from the trainer's at most, as TRL logs it."""
    return {row["step"]: row[FURTHEST] for row in one.state.log_history if FURTHEST in row}


def test_a_killed_vllm_comes_back_with_its_weights_and_the_step_is_sampled_again(served, tmp_path, capfd):
    """Killed when the weights of a step have been published and its samples have not been requested."""
    killed, before = [], served.version
    one = trainer(served, tmp_path, steps=3)
    rollouts = one.vllm_generation

    def publish_and_kill():
        rollouts.sync_weights()
        if one.state.global_step == 1:
            [engine] = engines(served)
            killed.append(engine.pid)
            engine.kill()

    one.vllm_generation = SimpleNamespace(sync_weights=publish_and_kill)
    one.train()
    assert len(killed) == 1
    said = capfd.readouterr().err
    assert said.count("it is started again with the same weights") == 1
    assert "Traceback" not in said
    assert list(furthest(one)) == [1, 2, 3]
    assert max(furthest(one).values()) < ROUNDING
    assert served.version == before + 3


def test_a_training_that_goes_on_draws_from_the_weights_that_it_was_left_with(served, tmp_path):
    trainer(served, tmp_path, steps=2).train()
    served.publish(moved(load_weights(served.policy, torch.float32), 7))  # of another training
    one = trainer(served, tmp_path, steps=3)
    one.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert list(furthest(one)) == [1, 2, 3]
    assert furthest(one)[3] < ROUNDING


def test_truncated_weights_are_in_the_loss(served, tmp_path):
    """The policy moves far after its weights were published; the loss and its gradient are those of the formula."""
    one = trainer(served, tmp_path, steps=1)
    one.train()
    rows = [dict(one.train_dataset[place]) for place in range(4) for _ in range(4)]
    one._generate_and_score_completions(rows)
    moved(one.model, 3, size=0.08)
    inputs = one._generate_and_score_completions(rows)
    mask, advantages = inputs["completion_mask"].bool(), inputs["advantages"][:, None]
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    attended = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    width = inputs["completion_ids"].shape[1]
    one.model.zero_grad()
    logits = one.model(input_ids=ids, attention_mask=attended).logits[:, -width - 1 : -1] / TEMPERATURE
    log_probs = torch.log_softmax(logits, -1).gather(2, inputs["completion_ids"][..., None])[..., 0]
    ratio = (log_probs.detach() - inputs["sampling_per_token_logps"]).exp()
    weights = ratio.clamp(max=HIGHEST_WEIGHT)
    share = (ratio[mask] > HIGHEST_WEIGHT).float().mean()
    assert 0.02 < share < 0.98  # both kinds are there
    assert one._metrics["train"][FURTHEST][0] < ROUNDING < one._metrics["train"][FURTHEST][1]
    torch.testing.assert_close(inputs["importance_sampling_ratio"][mask], weights[mask], rtol=1e-4, atol=1e-5)
    expected = -(weights * advantages * log_probs * mask).sum() / mask.sum()
    wanted = torch.autograd.grad(expected, one.model.model.norm.weight)[0]
    plain = torch.autograd.grad(
        one.compute_loss(one.model, inputs) * inputs["num_items_in_batch"] / mask.sum(), one.model.model.norm.weight
    )[0]
    torch.testing.assert_close(plain, wanted, rtol=1e-3, atol=1e-6)


def test_broken_weights_and_those_that_vllm_computes_otherwise_are_not_drawn_from(served):
    """Those of a model that diverged, also where vLLM has them already, and those of a model that gives other numbers
    than its saved weights do, after which vLLM is ended."""
    version = served.publish(moved(load_weights(served.policy, torch.float32), 11))
    broken = moved(load_weights(served.policy, torch.float32), 12)
    with torch.no_grad():
        broken.model.norm.weight[3] = float("nan")
    with pytest.raises(ModelError, match="diverged"):
        served.publish(broken)
    assert served._vllm.exit_status is None
    served._running.run(served._vllm.reload(served._write(broken, version + 1)))
    with pytest.raises(ModelError, match="NaN or infinite: its weights are broken"):
        served.draw([served.policy.prompt_ids(PROMPTS[0])], SETTINGS)
    odd = moved(load_weights(served.policy, torch.float32), 12)
    odd.lm_head.register_forward_hook(lambda module, given, logits: 1.1 * logits)
    with pytest.raises(ServingError, match="nats a token after it loaded"):
        served.publish(odd)
    assert served._vllm.exit_status is not None
    assert served.version == version
