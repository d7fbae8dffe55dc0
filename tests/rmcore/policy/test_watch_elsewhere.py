"""The lines of the documents that put a watch into verl's and OpenRLHF's loops, in stubs of what these call."""

import re
import textwrap
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
STUBS = {
    # verl 0.7, verl/trainer/ppo/ray_trainer.py: `fit` saves where trainer.save_freq is due and at the last step.
    "verl": """
        class Trainer:
            def __init__(self, actor, tokenizer, place):
                self.actor, self.tokenizer, self.global_steps = actor, tokenizer, 0
                self.config = SimpleNamespace(trainer=SimpleNamespace(default_local_dir=str(place), save_freq=EVERY))

            def fit(self):
                for self.global_steps in range(1, STEPS + 1):
                    update(self.actor)
                    if self.global_steps == STEPS or self.global_steps % self.config.trainer.save_freq == 0:
                        self._save_checkpoint()

            def _save_checkpoint(self):
                folder = f"{self.config.trainer.default_local_dir}/global_step_{self.global_steps}/actor"
                self.actor.save_pretrained(folder + "/huggingface")
                self.tokenizer.save_pretrained(folder + "/huggingface")
        """,
    # OpenRLHF 0.11, openrlhf/trainer/ppo_trainer.py: `train_step` is followed by save_logs_and_checkpoints.
    "OpenRLHF": """
        class Trainer:
            def __init__(self, actor, tokenizer, place):
                self.actor, self.tokenizer = actor, tokenizer
                self.args = SimpleNamespace(ckpt=SimpleNamespace(path=str(place), save_steps=EVERY))

            def fit(self):
                for global_step in range(1, STEPS + 1):
                    update(self.actor)
                    self.save_logs_and_checkpoints(global_step, {}, {})

            def save_logs_and_checkpoints(self, global_step, logs_dict=None, client_states=None):
                if global_step % self.args.ckpt.save_steps == 0:
                    self.actor.save_pretrained(f"{self.args.ckpt.path}/global_step{global_step}_hf")
                    self.tokenizer.save_pretrained(f"{self.args.ckpt.path}/global_step{global_step}_hf")
        """,
}


def update(actor):
    """A step of training: other weights."""
    with torch.no_grad():
        for one in actor.parameters():
            one.add_(0.02 * torch.randn_like(one))


def blocks():
    """The code of the page between the heading and the next one: how a saved policy is looked at, and a line a tool."""
    section = PAGE.read_text(encoding="utf-8").split("### verl and OpenRLHF")[1].split("\n## ")[0].split("\n### ")[0]
    shared, *lines = re.findall(r"```python\n(.*?)```", section, flags=re.S)
    return shared, dict(zip(STUBS, lines, strict=True))


@pytest.mark.parametrize(("tool", "preferred"), [("verl", -1.0), ("OpenRLHF", -1.0), ("OpenRLHF", 1.0)])
def test_a_watch_ends_their_loop_where_gold_turns_and_not_where_it_gains(tool, preferred, tmp_path):
    start = policies.new_policy(tmp_path / "start", eos_token_id=policies.STOPS)
    shared, lines = blocks()
    torch.manual_seed(0)
    known = {
        "AutoModelForCausalLM": AutoModelForCausalLM, "AutoTokenizer": AutoTokenizer, "Path": Path, "start": start,
        "SimpleNamespace": SimpleNamespace, "STEPS": STEPS, "EVERY": EVERY, "update": update,
        "held_out_prompts": [f"What is {number} + 2?" for number in range(300)], "judge": policies.Prefers(preferred),
        "reward": lambda prompts, texts: [float(len(one)) for one in texts],
        "save_every": EVERY, "max_steps": STEPS,
        "HackStop": lambda prompts, judge, reward, folder, every: HackStop(
            prompts, judge, reward, tmp_path / folder, every=every, max_new_tokens=8,
            settings=WatchConfig(labels=40),
        ),
    }  # fmt: skip
    exec(shared, known)
    body = textwrap.dedent(STUBS[tool]).rstrip() + "\n" + textwrap.indent(lines[tool], " " * 8)
    exec(body, known)
    actor = AutoModelForCausalLM.from_pretrained(start)
    trainer = known["Trainer"](actor, AutoTokenizer.from_pretrained(start), tmp_path / "saved")
    stop = known["stop"]
    if preferred < 0:
        with pytest.raises(RuntimeError, match="step 0"):
            trainer.fit()
        assert 0 < stop.looks[-1].step < STEPS
    else:
        trainer.fit()
        assert [look.step for look in stop.looks] == list(range(EVERY, STEPS + 1, EVERY))
        assert stop.best_step > 0
