"""A policy whose weights are those of a model in training: its answers, its checkpoints, its distance from one."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from rmcore.core.arrays import FloatArray
from rmcore.core.errors import TrainingError
from rmcore.core.files import atomic_file
from rmcore.data.pair import Prompt
from rmcore.policy.grpo.policy_meter import TOKENS_AT_ONCE, draw
from rmcore.policy.policy import Policy, stop_ids
from rmcore.policy.sampling.sampler import whole_distribution
from rmcore.policy.sft import Example, longest_first, response_log_probs


class Snapshots:
    """Keeps what is trained of a model: all weights, or those of its adapters.

    Args:
        folder: for the files, `NUMBER.safetensors`; readable by their owner only.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def save(self, model: Any, number: int) -> None:
        """Write the model's trained weights as `number`, whole or not at all."""
        with atomic_file(self._file(number), mode=0o600) as unfinished:
            # Parameters are named once each, so a head tied to the embeddings is written once.
            save_file({name: parameter.detach().cpu().contiguous() for name, parameter in _trained(model)}, unfinished)

    def load(self, model: Any, number: int) -> None:
        """Put the weights `number` into the model, in place."""
        kept = load_file(self._file(number))
        with torch.no_grad():
            for name, parameter in _trained(model):
                parameter.copy_(kept[name])

    def has(self, number: int) -> bool:
        """Whether the weights `number` are still there."""
        return self._file(number).is_file()

    def keep(self, numbers: Sequence[int]) -> None:
        """Delete all weights but those of these numbers."""
        for file in self.folder.glob("*.safetensors"):
            if int(file.stem) not in numbers:
                file.unlink()

    @contextmanager
    def inside(self, model: Any, number: int) -> Iterator[Any]:
        """The model with the weights `number`; after the block it has those from before it, to the bit."""
        present = {name: parameter.detach().clone() for name, parameter in _trained(model)}
        try:
            self.load(model, number)
            yield model
        finally:
            with torch.no_grad():
                for name, parameter in _trained(model):
                    parameter.copy_(present[name])

    def _file(self, number: int) -> Path:
        return self.folder / f"{number}.safetensors"


def _trained(model: Any) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


class PolicyInTraining:
    """Answers prompts with whatever weights a model has at the moment; random states stay as they were.

    Args:
        policy: what prompts and responses mean in token ids.
        temperature, max_new_tokens: of the sampling.
    """

    def __init__(self, policy: Policy, *, temperature: float, max_new_tokens: int) -> None:
        self.policy, self.temperature, self.max_new_tokens = policy, temperature, max_new_tokens

    def answers(self, model: Any, prompts: Sequence[Prompt], seed: int) -> list[str]:
        """One response to each of N prompts."""
        return [self.policy.response_text(row) for row in self._drawn(model, prompts, seed)[1]]

    def distance(self, model: Any, snapshots: Snapshots, number: int, prompts: Sequence[Prompt], seed: int) -> float:
        """Nats from checkpoint `number`: mean log-ratio over one response to each prompt.

        Raises:
            TrainingError: it is not finite: the policy's weights are broken.
        """
        ids, drawn = self._drawn(model, prompts, seed)
        examples = [Example(tuple(prompt), tuple(row)) for prompt, row in zip(ids, drawn, strict=True)]
        now = self._log_probs(model, examples)
        with snapshots.inside(model, number):
            kl = float((now - self._log_probs(model, examples)).mean())
        if not math.isfinite(kl):
            raise TrainingError(
                "the policy's distance from its start is not a finite number: its weights are broken. Lower the "
                "learning rate, or raise the KL penalty."
            )
        return kl

    def _drawn(self, model: Any, prompts: Sequence[Prompt], seed: int) -> tuple[list[list[int]], list[list[int]]]:
        """Token ids of the prompts and of one response to each."""
        ids = self.policy.fitting_ids(prompts, self.max_new_tokens)
        config = whole_distribution(self.policy, self.temperature, self.max_new_tokens)
        return ids, draw(model, self.policy, ids, config, seed)

    @torch.no_grad()
    def _log_probs(self, model: Any, examples: Sequence[Example]) -> FloatArray:
        """Log-probabilities of E responses, in nats: (E,)."""
        was_training = model.training
        model.eval()
        log_probs = np.zeros(len(examples))
        for taken in longest_first(examples, TOKENS_AT_ONCE):
            part = response_log_probs(model, [examples[index] for index in taken], self.temperature)
            log_probs[taken] = part.double().cpu().numpy()
        model.train(was_training)
        return log_probs


def policy_of(model: Any, tokenizer: Any) -> Policy:
    """A trainer's model as a policy: its tokenizer's and its configurations' tokens end a response."""
    name = str(model.config.name_or_path)
    ends = stop_ids(tokenizer, model.config.get_text_config(), model.generation_config)
    return Policy(name, Path(name), model.config, tokenizer, ends)
