"""The lines of the documents that put a watch into verl's and OpenRLHF's loops, with what these have there."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import small_policies as policies
from rmcore.config.rlhf import WatchConfig
from rmcore.policy.grpo.hack_stop import HackStop

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[3] / "docs" / "take-it-with-you.md"
STEPS, EVERY = 8, 2
TRAINERS = {
    # verl 0.7, verl/trainer/ppo/ray_trainer.py: saved where trainer.save_freq is due and at the last step.
    "verl": (
        lambda place, step: SimpleNamespace(
            config=SimpleNamespace(trainer=SimpleNamespace(default_local_dir=place)), global_steps=step
        ),
        "global_step_{}/actor/huggingface",
    ),
    # OpenRLHF 0.11, openrlhf/trainer/ppo_trainer.py, save_logs_and_checkpoints
    "OpenRLHF": (
        lambda place, step: SimpleNamespace(args=SimpleNamespace(ckpt=SimpleNamespace(path=place, save_steps=EVERY))),
        "global_step{}_hf",
    ),
}
"""By tool its trainer at a step, and where it saves."""


def blocks():
    """The code of the page between the heading and the next one: how a saved policy is looked at, and a line a tool."""
    section = PAGE.read_text(encoding="utf-8").split("### verl and OpenRLHF")[1].split("\n## ")[0].split("\n### ")[0]
    shared, *lines = re.findall(r"```python\n(.*?)```", section, flags=re.S)
    return shared, dict(zip(TRAINERS, lines, strict=True))


@pytest.mark.parametrize(("tool", "preferred"), [("verl", -1.0), ("OpenRLHF", 1.0)])
def test_a_watch_ends_their_loop_where_gold_turns_and_not_where_it_gains(tool, preferred, tmp_path):
    start = policies.new_policy(tmp_path / "start", eos_token_id=policies.STOPS)
    shared, lines = blocks()
    torch.manual_seed(0)
    known = {
        "AutoModelForCausalLM": AutoModelForCausalLM, "AutoTokenizer": AutoTokenizer, "Path": Path, "start": start,
        "held_out_prompts": [f"What is {number} + 2?" for number in range(300)], "judge": policies.Prefers(preferred),
        "save_every": EVERY, "max_steps": STEPS,
        "HackStop": lambda prompts, judge, folder, every: HackStop(
            prompts, judge, tmp_path / folder, every=every, max_new_tokens=8,
            settings=WatchConfig(labels=40),
        ),
    }  # fmt: skip
    exec(shared, known)
    actor, (trainer, place) = AutoModelForCausalLM.from_pretrained(start), TRAINERS[tool]

    def fit():
        for step in range(EVERY, STEPS + 1, EVERY):
            with torch.no_grad():  # a step of training: other weights
                for one in actor.parameters():
                    one.add_(0.02 * torch.randn_like(one))
            actor.save_pretrained(tmp_path / place.format(step))
            exec(lines[tool], known | {"self": trainer(str(tmp_path), step), "global_step": step})

    stop = known["stop"]
    if preferred < 0:
        with pytest.raises(RuntimeError, match="step 0"):
            fit()
        assert 0 < stop.looks[-1].step < STEPS
    else:
        fit()
        assert [look.step for look in stop.looks] == list(range(EVERY, STEPS + 1, EVERY))
        assert stop.best_step > 0
