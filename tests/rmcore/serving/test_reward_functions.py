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
        "prompts": Dataset.from_dict({"prompt": [[{"role": "user", "content": prompt}] for prompt in PROMPTS]}),
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


def test_trls_prompts_and_completions_get_the_librarys_rewards(rm, server):
    """Texts, one alone, and messages, where a completion of several turns is scored after all of them."""
    asked, answer = {"role": "user", "content": "And 3 + 3?"}, {"role": "assistant", "content": "6"}
    user, first = {"role": "user", "content": PROMPTS[0]}, {"role": "assistant", "content": "4"}
    dialogue = (Message("user", PROMPTS[0]), Message("assistant", "4"), Message("user", "And 3 + 3?"))
    with RewardClient(server.address, token=TOKEN) as client:
        reward = reward_function(client)
        texts = reward(prompts=PROMPTS, completions=["4", "Red."], completion_ids=[[1], [2]])
        one = reward(PROMPTS[0], "4")
        messages = reward([[user], [user]], [[first], [first, asked, answer]])
    assert [*texts, *one, *messages] == pytest.approx(
        rm.score([*PROMPTS, PROMPTS[0], PROMPTS[0], dialogue], ["4", "Red.", "4", "4", "6"]).tolist(), abs=1e-5
    )


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
