"""Policies of the tests that draw samples, and what they must draw."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM

from rmcore.core.errors import NotReadyError, ServingError
from rmcore.models.loading import quiet_libraries
from rmcore.models.tiny import build_tiny
from rmcore.policy.policy import Policy

STOPS = list(range(2, 1024, 8))
"""An eighth of all tokens, `<|im_end|>` among them."""
RECOMMENDED = {"do_sample": True, "top_k": 3, "top_p": 0.5, "temperature": 0.1, "repetition_penalty": 1.9, "min_p": 0.4}
"""What a folder may advise, of which nothing may be heard."""


def new_policy(folder: Path, *, seed: int = 0, size: str = "tiny-small", **generation_config) -> Path:
    """An untrained causal model of two layers; further arguments go to its generation_config.json."""
    quiet_libraries()
    build_tiny(folder, seed=seed, size=size)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).save_pretrained(folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | generation_config))
    return folder


def change_weights(folder: Path, change) -> Path:
    """Rewrite the weights as `change` leaves the dict of tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class TextScorer:
    """Rewards rollouts by their response's text, as one version of a served reward model."""

    def __init__(self, reward, versions=lambda index: 1):
        self.reward, self.versions, self.calls, self.waits = reward, versions, 0, 0

    def score(self, rollouts):
        self.calls += 1
        rewards = [float(self.reward(rollout.steps[0].completion)) for rollout in rollouts]
        for index, (rollout, reward) in enumerate(zip(rollouts, rewards, strict=True)):
            rollout.meta.update(rm_score=reward, rm_score_version=self.versions(index))
        return rewards

    def wait_ready(self, timeout_s):
        self.waits += 1


class AwayScorer(TextScorer):
    """Rewards length; fails the calls in `failing`, after which it says that it is ready again, or is gone for good."""

    def __init__(self, failing, *, comes_back):
        super().__init__(len)
        self.failing, self.comes_back = failing, comes_back

    def score(self, rollouts):
        if self.calls in self.failing:
            self.calls += 1
            raise NotReadyError("restarting")
        return super().score(rollouts)

    def wait_ready(self, timeout_s):
        super().wait_ready(timeout_s)
        if not self.comes_back:
            raise ServingError("no server")


class Prefers:
    """People who always prefer the later answer (1), or always the earlier one (-1)."""

    name, unit, limit, labels_per_pair, at_once, calibrates, scale = "them", "wins", 1.0, 1, None, False, None

    def __init__(self, preferred):
        self.preferred = preferred

    def compare(self, asked, prompts, later, earlier):
        return np.full(len(prompts), float(self.preferred))


def weights(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(first, second):
    return all(torch.equal(first[name], second[name]) for name in second)


def break_weights(tensors) -> None:
    tensors["model.norm.weight"][3] = float("nan")


@torch.inference_mode()
def first_texts(policy: Policy, prompt, temperature: float) -> dict[str, float]:
    """The probability of each text that a response of one token can be."""
    model = AutoModelForCausalLM.from_pretrained(policy.folder, dtype=torch.float32)
    logits = model(torch.tensor([policy.prompt_ids(prompt)])).logits[0, -1].double()
    texts: dict[str, float] = {}
    for token, probability in enumerate(torch.softmax(logits / temperature, 0).tolist()):
        text = "" if token in policy.stop_ids else policy.decode([token])
        texts[text] = texts.get(text, 0.0) + probability
    return texts


def p_value(texts, probabilities: dict[str, float]) -> float:
    """Of a chi-square test that the texts were drawn so; those expected fewer than 5 times count together."""
    counts, total = Counter(texts), len(texts)
    assert set(counts) <= set(probabilities)
    often = [text for text, probability in probabilities.items() if probability * total >= 5]
    observed = [counts[text] for text in often]
    expected = [probabilities[text] * total for text in often]
    return float(chisquare([*observed, total - sum(observed)], [*expected, total - sum(expected)]).pvalue)
