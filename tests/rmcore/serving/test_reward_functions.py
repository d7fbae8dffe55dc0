"""Reward functions in other trainers: TRL's for real, that of verl as its loop calls it."""

import asyncio
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rmcore.config.rlhf import WatchConfig
from rmcore.core.errors import DataError
from rmcore.data.pair import Message
from rmcore.serving import reward_functions
from rmcore.serving.client import RewardClient
from rmcore.serving.reward_functions import compute_score, reward_function
from small_policies import STOPS, new_policy
from torch_engine import answering_with

TOKEN = "a-token"
PROMPTS = ["What is 2 + 2?", "Name a colour."]


@pytest.fixture
def server(rm, tmp_path):
    with answering_with(rm, tmp_path, token=TOKEN) as app:
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
def test_the_lines_of_the_page_put_a_server_and_a_watch_around_grpo_of_trl(rm, server, tmp_path, monkeypatch, capsys):
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
        "judge": lambda prompt, text: rm.score(prompt, text).item(),
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

    expected, weights = trained(policy, tmp_path / "0", local, prompts)
    with RewardClient(server.address, token=TOKEN) as client:
        rewards, learned = trained(policy, tmp_path / "1", reward_function(client), prompts)
    assert len(expected) == 2
    assert len(set(expected)) == 2
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
            lambda: compute_score(
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
            compute_score("a/b", "4", "4", {}, server=server.address)
    finally:
        reward_functions._client(server.address).close()
        reward_functions._client.cache_clear()
