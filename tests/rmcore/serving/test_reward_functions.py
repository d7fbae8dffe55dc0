"""Reward functions in other trainers and on rollouts: TRL's for real, the others as their loops call them."""

import asyncio
import importlib.util
import logging
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from rmcore.config.rlhf import WatchConfig
from rmcore.core.errors import DataError, NotReadyError, RequestError
from rmcore.data.pair import Message
from rmcore.serving.async_client import AsyncRewardClient
from rmcore.serving.client import RewardClient
from rmcore.serving.reward_functions import openrlhf, verl
from rmcore.serving.reward_functions.trl import async_reward_function, reward_function
from rmcore.serving.scorer import RewardModelScorer, Rollout, Step
from small_policies import STOPS, new_policy
from torch_engine import answering_with

TOKEN = "a-token"
PROMPTS = ["What is 2 + 2?", "Name a colour."]


@pytest.fixture
def server(rm, tmp_path):
    with answering_with(rm, tmp_path, token=TOKEN, protocols=("openrlhf",)) as app:
        app.address = f"http://127.0.0.1:{app.port}"
        yield app


def trained(policy, out, reward, prompts):
    """The rewards that two steps of TRL's GRPO saw, and the weights that came of them."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    settings = GRPOConfig(
        output_dir=str(out), use_cpu=True, bf16=False, max_steps=2, per_device_train_batch_size=4, num_generations=2,
        max_completion_length=8, learning_rate=1e-3, report_to="none", disable_tqdm=True, logging_steps=1,
        save_strategy="no", seed=3,
    )  # fmt: skip
    trainer = GRPOTrainer(
        str(policy), reward_funcs=reward, args=settings, train_dataset=Dataset.from_dict({"prompt": prompts})
    )
    trainer.train()
    logged = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    return logged, torch.cat([one.detach().flatten() for one in trainer.model.parameters()])


@pytest.mark.slow
@pytest.mark.parametrize("sign", [-1, 1])
def test_the_lines_of_the_page_put_a_server_and_a_watch_around_grpo_of_trl(
    rm, server, tmp_path, monkeypatch, capsys, sign
):
    """With a judge that likes what the reward model likes, and one that hates it."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    monkeypatch.setenv("RM_OPT_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)
    policy = new_policy(tmp_path / "my-policy", eos_token_id=STOPS)
    settings = GRPOConfig(
        output_dir="out", use_cpu=True, bf16=False, max_steps=4, per_device_train_batch_size=4, num_generations=2,
        max_completion_length=8, learning_rate=1e-2, report_to="none", disable_tqdm=True, save_strategy="no", seed=3,
    )  # fmt: skip
    page = (Path(__file__).parents[3] / "docs" / "take-it-with-you.md").read_text(encoding="utf-8")
    [lines] = re.findall(r"### TRL\n\n```python\n(.*?)```", page, flags=re.S)
    small = "every=2, max_new_tokens=8, settings=WatchConfig(labels=80, final_labels=40)"
    for said, here in (("http://127.0.0.1:8100", server.address), ("every=10", small)):
        assert said in lines
        lines = lines.replace(said, here)
    known = {
        "GRPOTrainer": partial(GRPOTrainer, args=settings), "WatchConfig": WatchConfig, "Path": Path,
        "prompts": Dataset.from_dict({"prompt": PROMPTS}),
        "judge": lambda prompt, text: sign * rm.score(prompt, text).item(),
        "held_out_prompts": [f"What is {number} + 2?" for number in range(300)],
        "fresh_prompts": [f"What is {number} + 3?" for number in range(60)],
    }  # fmt: skip
    exec(lines, known)
    stop = known["stop"]
    assert stop.looks
    assert capsys.readouterr().out.rstrip().endswith(f"{stop.best_step} None" if stop.best_step == 0 else ")")
    start = torch.cat([one.detach().flatten() for one in AutoModelForCausalLM.from_pretrained(policy).parameters()])
    kept = torch.cat([one.detach().flatten() for one in known["trainer"].model.parameters()])
    assert (stop.best_step == 0) == torch.equal(kept, start)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["text", "messages"])
def test_grpo_of_trl_learns_the_same_from_the_library_and_from_the_server(rm, server, tmp_path, form):
    policy = new_policy(tmp_path / "policy")
    prompts = PROMPTS if form == "text" else [[{"role": "user", "content": prompt}] for prompt in PROMPTS]

    def local(prompts, completions, **_):
        if form == "text":
            return rm.score(prompts, completions).tolist()
        dialogues = [tuple(Message(**turn) for turn in prompt) for prompt in prompts]
        return rm.score(dialogues, [turns[-1]["content"] for turns in completions]).tolist()

    def make():
        return AsyncRewardClient(server.address, token=TOKEN)

    expected, weights = trained(policy, tmp_path / "0", local, prompts)
    with RewardClient(server.address, token=TOKEN) as client:
        found = [trained(policy, tmp_path / "1", reward_function(client), prompts)]
    found.append(trained(policy, tmp_path / "2", async_reward_function(make), prompts))
    assert len(expected) == 2
    assert len(set(expected)) == 2
    for rewards, learned in found:
        assert rewards == pytest.approx(expected, abs=1e-5)
        torch.testing.assert_close(learned, weights, atol=1e-5, rtol=0)


def test_a_completion_of_several_turns_is_scored_after_all_of_them(rm, server):
    asked, answer = {"role": "user", "content": "And 3 + 3?"}, {"role": "assistant", "content": "6"}
    first = {"role": "assistant", "content": "4"}
    with RewardClient(server.address, token=TOKEN) as client:
        [found] = reward_function(client)([[{"role": "user", "content": PROMPTS[0]}]], [[first, asked, answer]])
    dialogue = (Message("user", PROMPTS[0]), Message("assistant", "4"), Message("user", "And 3 + 3?"))
    assert found == pytest.approx(rm.score([dialogue], ["6"]).item(), abs=1e-5)


def test_verls_reward_manager_gets_the_librarys_rewards(rm, server, monkeypatch):
    """`NaiveRewardManager.run_single` of verl 1dda039: keywords, in a thread of its loop, one sample a call."""
    monkeypatch.setenv("RM_OPT_TOKEN", TOKEN)

    async def run_single(extra_info, response):
        return await asyncio.get_running_loop().run_in_executor(
            None,
            lambda: verl.compute_score(
                data_source="a/b", solution_str=response, ground_truth="4", extra_info=extra_info, server=server.address
            ),
        )

    async def run():
        turns = np.array([{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPTS[1]}])
        texts = [{"question": PROMPTS[0], "num_turns": None}, {"raw_prompt": turns}]
        return await asyncio.gather(*(run_single(*one) for one in zip(texts, ("4", "Red."), strict=True)))

    asked = [PROMPTS[0], (Message("system", "Be brief."), Message("user", PROMPTS[1]))]
    try:
        assert asyncio.run(run()) == pytest.approx(rm.score(asked, ["4", "Red."]).tolist(), abs=1e-5)
        with pytest.raises(DataError, match=r"a row of a/b has none of .* in extra_info"):
            verl.compute_score("a/b", "4", "4", {}, server=server.address)
    finally:
        verl._client(server.address).close()
        verl._client.cache_clear()


def test_openrlhf_loads_the_file_and_gets_the_librarys_rewards(rm, server, monkeypatch, caplog):
    """`SingleTurnAgentExecutor` of OpenRLHF 3c3be62: the file is executed by its path, a query a call, in a thread."""
    monkeypatch.setenv("RM_OPT_TOKEN", TOKEN)
    monkeypatch.setenv("RM_OPT_SERVER", server.address)
    spec = importlib.util.spec_from_file_location("reward_func", openrlhf.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    messages = [{"role": "user", "content": PROMPTS[0]}]
    prompt = rm.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    with caplog.at_level(logging.WARNING):
        info = asyncio.run(asyncio.to_thread(module.reward_func, [prompt + "4<|im_end|>"], [prompt], ["4"]))
        assert not caplog.records
        module.reward_func([prompt + "4"], [prompt], ["4"])
    assert torch.tensor([info.get("rewards")]).item() == pytest.approx(rm.score(PROMPTS[:1], ["4"]).item(), abs=1e-5)
    assert "does not end as answers do" in caplog.text


STEPS = st.lists(st.builds(Step, prompt=st.text(max_size=3), completion=st.text(max_size=3)), min_size=1, max_size=3)


@pytest.fixture
def client(server):
    with RewardClient(server.address, batch_size=2, backoff_s=0.001) as open_client:
        yield open_client


def rollouts(count):
    return [Rollout([Step(prompt="p", completion=chr(97 + index))], {"id": index}) for index in range(count)]


def text_of(steps):
    return "".join(step.prompt + step.completion for step in steps)


@pytest.mark.slow
@settings(max_examples=15)
@given(st.lists(STEPS, max_size=7), st.integers(1, 4))
def test_every_rollout_gets_the_reward_of_its_own_steps(running_server, all_steps, batch_size):
    with running_server() as server, RewardClient(server.address, batch_size=batch_size) as client:
        scored = [Rollout(steps) for steps in all_steps]
        rewards = RewardModelScorer(client).score(scored)
        assert rewards == [server.reward(text_of(steps)) for steps in all_steps]
        assert [rollout.meta for rollout in scored] == [
            {"rm_score": reward, "rm_score_version": 1} for reward in rewards
        ]
        assert len(server.seen) == -(-len(all_steps) // batch_size)


def test_steps_are_joined_into_one_dialogue_that_ends_with_the_last_completion(server, client):
    system = Message("system", "be brief")
    steps = [
        Step(prompt=[system, Message("user", "p1")], completion="c1"),
        Step(prompt="p2", completion="c2"),
        Step(prompt=[{"role": "tool", "content": "p3"}], completion="c3"),
    ]
    RewardModelScorer(client).score([Rollout(steps), Rollout(steps[1:2])], policy_version=4)
    turns = [("system", "be brief"), ("user", "p1"), ("assistant", "c1"), ("user", "p2"), ("assistant", "c2")]
    prompt = [{"role": role, "content": content} for role, content in [*turns, ("tool", "p3")]]
    assert server.seen[0].inputs == [{"prompt": prompt, "response": "c3"}, {"prompt": "p2", "response": "c2"}]
    assert server.seen[0].body["policy_version"] == 4


def test_without_a_chat_template_steps_are_paragraphs(server, client):
    steps = [
        Step(prompt="p1", completion="c1"),
        Step(prompt=[Message("system", "s"), Message("user", "u")], completion=""),
    ]
    RewardModelScorer(client, use_chat_template=False).score([Rollout(steps), Rollout(steps[:1])])
    assert server.seen[0].inputs == [
        "Prompt: p1\n\nResponse: c1\n\nPrompt: System: s\n\nUser: u\n\nResponse: ",
        "Prompt: p1\n\nResponse: c1",  # the platform's plain format
    ]
    for use in (True, False):  # a render function decides whatever the format
        own = RewardModelScorer(client, use_chat_template=use, render_fn=lambda one: f"<{one.steps[0].completion}>")
        assert own.score(rollouts(1)) == [server.reward("<a>")]


def test_names_settings_and_cuts_are_written(server, client):
    scored = rollouts(3)
    scorer = RewardModelScorer(client, score_key="quality", normalize=True, over_length="cut")
    rewards = scorer.score(scored)
    assert all(0 < reward < 1 for reward in rewards)
    assert [rollout.meta for rollout in scored] == [
        {"id": index, "quality": reward, "quality_version": 1, "quality_num_cut": 2}
        for index, reward in enumerate(rewards)
    ]
    assert {(seen.body["normalize"], seen.body["over_length"]) for seen in server.seen} == {(True, "cut")}


def test_all_rollouts_of_a_call_are_scored_by_one_version(server, client):
    server.weights = lambda seen: (1, "d") if seen.number == 1 else (2, "e")
    scored = rollouts(6)
    rewards = RewardModelScorer(client).score(scored)
    assert {rollout.meta["rm_score_version"] for rollout in scored} == {2}
    assert rewards == [server.reward(text_of(rollout.steps), 2) for rollout in scored]
    server.weights = lambda seen: (3, "f")
    RewardModelScorer(client).score(scored)  # replaces what was written
    assert {rollout.meta["rm_score_version"] for rollout in scored} == {3}


@pytest.mark.parametrize(("status", "error"), [(422, RequestError), (503, NotReadyError)])
def test_a_call_that_fails_writes_nothing_and_names_the_rollout(server, client, status, error):
    answer = (status, {"error": "no", "message": "too long.", "field": "inputs.1.response"})
    server.behave = lambda seen: answer if seen.inputs[0]["response"] == "e" else None
    scored = rollouts(6)
    with pytest.raises(error, match=r"inputs\.5\.response: too long"):
        RewardModelScorer(client).score(scored)
    assert [rollout.meta for rollout in scored] == [{"id": index} for index in range(6)]


def test_a_rollout_that_cannot_be_scored_is_named_before_anything_is_sent(server, client):
    scored = [*rollouts(4), Rollout([]), *rollouts(1)]
    with pytest.raises(RequestError, match="rollout 4 of the list has no steps"):
        RewardModelScorer(client).score(scored)
    with pytest.raises(RequestError, match="render_fn returned NoneType for rollout 0"):
        RewardModelScorer(client, render_fn=lambda rollout: None).score(rollouts(2))
    with pytest.raises(RequestError, match=r"inputs\.1: String should have at least 1 character"):
        RewardModelScorer(client, render_fn=lambda rollout: "x" * (rollout.meta["id"] != 1)).score(rollouts(2))
    assert RewardModelScorer(client).score([]) == []
    assert server.seen == []
    assert [rollout.meta for rollout in scored] == [{"id": 0}, {"id": 1}, {"id": 2}, {"id": 3}, {}, {"id": 0}]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "p"},
        {"prompt": "p", "completion": None},
        {"prompt": None, "completion": "c"},
        {"prompt": [{"role": "user"}], "completion": "c"},
        {"prompt": "p", "completion": "c", "reward": 1.0},
    ],
)
def test_a_step_that_is_none_cannot_be_made(fields):
    with pytest.raises(ValidationError):
        Step(**fields)
