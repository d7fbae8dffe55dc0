"""GRPO against a real vLLM reward server: new weights on the way, a killed engine, texts that are cut."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import TrainerCallback

import serving_world as world
from rmcore.config.rlhf import RlhfConfig
from rmcore.core.errors import NotReadyError
from rmcore.policy.grpo.grpo import make_grpo_with_rm
from rmcore.serving.scorer import RewardModelScorer

pytestmark = pytest.mark.services
PROMPTS = ["What is 2 + 2?", "Count.", "Grüße! 🙂", "word " * 150]


def train(policy, scorer, out, *, steps, record, callbacks=(), group_size=4):
    settings = RlhfConfig(
        steps=steps, prompts_per_step=4, group_size=group_size, learning_rate=1e-3, measure_every=steps
    )
    one = make_grpo_with_rm(
        policy, PROMPTS, scorer, out=out, settings=settings, max_new_tokens=12, device="cpu", record=record,
        callbacks=callbacks,
    )  # fmt: skip
    one.train()


class After(TrainerCallback):
    """Calls a function after one step."""

    def __init__(self, step, function):
        self.step, self.function = step, function

    def on_step_end(self, args, state, control, **given):
        if state.global_step == self.step:
            self.function()


def moved(rm):
    with torch.no_grad():
        for parameter in rm.model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return rm


def test_steps_are_rewarded_by_the_weights_that_were_published_in_between(server, client, policy_folder, tmp_path):
    first = client.version().weight_version
    models = {first: world.served_model(client)}
    seen = []

    def publish():
        models[first + 1] = moved(world.served_model(client))
        assert world.publisher_of(server).publish(models[first + 1]).weight_version == first + 1

    scorer = RewardModelScorer(client, over_length="cut")

    def record(step, rollouts, credits):
        seen.append((rollouts, credits))

    train(policy_folder, scorer, tmp_path, steps=5, record=record, callbacks=[After(2, publish)])
    versions = [{rollout.meta["rm_score_version"] for rollout in rollouts} for rollouts, _ in seen]
    assert versions == [{first}] * 2 + [{first + 1}] * 3
    for (rollouts, credits), [version] in zip(seen, versions, strict=True):
        pairs = [(rollout.steps[0].prompt, rollout.steps[0].completion) for rollout in rollouts]
        assert credits == world.close(world.expected(models[version], pairs))
    last = [rollout for rollouts, _ in seen for rollout in rollouts]
    cut = {rollout.steps[0].prompt for rollout in last if rollout.meta["rm_score_num_cut"] > 0}
    assert cut == {PROMPTS[3]}


@pytest.mark.night
def test_a_killed_engine_is_said_waited_for_and_comes_back_with_the_same_weights(
    server, client, policy_folder, tmp_path
):
    """The training waits for it; others who ask meanwhile get the right rewards or are told."""
    rm, seen, asked = world.served_model(client), [], []
    before, rewards, restarts = client.version(), client.score([[5, 6, 7]]).rewards, client.health().num_restarts
    scorer = RewardModelScorer(client, over_length="cut")

    def record(step, rollouts, credits):
        seen.append((rollouts, credits))

    with ThreadPoolExecutor(8) as pool:

        def kill():
            asked.extend(pool.submit(client.score, [[5, 6, 7]] * 64) for _ in range(40))
            world.engine_of(server).kill()

        train(policy_folder, scorer, tmp_path, steps=4, record=record, callbacks=[After(2, kill)])
        for answer in asked:
            try:
                assert answer.result().rewards == world.close(rewards * 64)
            except NotReadyError:
                continue
    assert len(seen) == 4
    for rollouts, credits in seen:
        pairs = [(rollout.steps[0].prompt, rollout.steps[0].completion) for rollout in rollouts]
        assert credits == world.close(world.expected(rm, pairs))
    assert client.health().num_restarts == restarts + 1
    assert client.version() == before
    assert client.score([[5, 6, 7]]).rewards == world.close(rewards)
