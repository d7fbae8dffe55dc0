"""Samples of a policy for many prompts, stored as they come: a second call continues where the first one ended."""

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import pandas as pd
import torch

from rmcore.core.errors import ConfigError, DataError, ServingError
from rmcore.core.progress import Report, silent
from rmcore.data.pair import Prompt, as_prompts, prompt_messages
from rmcore.models.device import pick_device
from rmcore.policy.policy import Policy
from rmcore.policy.sampling.generate_sampler import GenerateSampler
from rmcore.policy.sampling.sample_file import open_samples
from rmcore.policy.sampling.sampler import Sample, Sampler, SamplingSettings
from rmcore.policy.sampling.vllm_sampler import VllmSampler
from rmcore.serving.vllm_process import find_vllm

EngineName = Literal["auto", "vllm", "generate"]


@dataclass(frozen=True)
class SampleSet:
    """Samples of P prompts, S of each.

    rows: P x S rows, by prompt and sample: prompt_index, sample, response, num_tokens, finished (see `Sample`). Prompts
        that cannot be answered have none.
    engine: what drew them, `vllm` or `generate`.
    """

    rows: pd.DataFrame
    engine: str

    @property
    def num_empty(self) -> int:
        """Responses without any text: kept, as the policy gives them."""
        return int((self.rows["response"] == "").sum())

    @property
    def num_cut(self) -> int:
        """Responses that the policy had not ended at max_new_tokens."""
        return int((~self.rows["finished"]).sum())


def draw_samples(
    policy: Policy,
    prompts: Sequence[Prompt],
    settings: SamplingSettings,
    out: Path,
    *,
    engine: EngineName = "auto",
    device: str = "auto",
    report: Report = silent,
) -> SampleSet:
    """Draw the samples of all prompts; those that `out` holds already are not drawn again.

    A prompt that the policy's template refuses or that is too long for it has no samples; how many is said on stderr.

    Args:
        policy: what answers.
        prompts: P of them; each may be a dialogue.
        settings: how many samples of each, and how.
        out: JSONL file that takes each prompt's samples as soon as they are there (`sample_file`).
        engine: vllm, generate, or auto: vllm where it is found and the device is a GPU.
        device: auto, cpu or cuda.
        report: called with the prompts done, all of them and a text; vLLM calls it from another thread.

    Raises:
        DataError: no prompts, none that can be answered (before anything is drawn), or `out` holds something else.
        ConfigError: vLLM is requested and not there, or refuses the temperature.
        ModelError: the policy cannot be loaded, or its weights are broken.
        ServingError: vLLM did not start or died too often; the message says what is stored.
    """
    prompts = as_prompts(prompts)
    if not prompts:
        raise DataError("draw_samples got no prompts: there is nothing to answer. Pass at least one.")
    torch_device = pick_device(device)
    sampler = choose_sampler(engine, torch_device)
    prompt_ids = policy.readable_ids(prompts, settings.max_new_tokens)
    determined_by = {
        "policy": policy.digest(),
        "prompts": _prompts_digest(prompts),
        "num_prompts": len(prompts),
        "engine": sampler.name,
        "device": torch_device.type,
        **asdict(settings),
    }
    with open_samples(out, determined_by, num_samples=settings.num_samples) as file:
        missing = {index: ids for index, ids in prompt_ids.items() if index not in file.stored}

        def keep(samples: Sequence[Sample]) -> None:
            file.append(samples)
            report(len(file.stored), len(prompt_ids), "prompts sampled")

        report(len(file.stored), len(prompt_ids), "prompts sampled")
        if missing:
            try:
                sampler.draw(policy, missing, settings, keep)
            except ServingError as error:
                raise ServingError(
                    f"{error}\nThe samples of {len(file.stored)} of {len(prompt_ids)} prompts are stored in {out}; the "
                    "same call continues with the others."
                ) from error
        rows = [asdict(sample) for index in prompt_ids for sample in file.stored[index]]
        return SampleSet(pd.DataFrame(rows), sampler.name)


def choose_sampler(engine: EngineName, device: torch.device) -> Sampler:
    """The sampler of that name; auto takes vLLM where it is found and the device is a GPU, else generate.

    Raises:
        ConfigError: vLLM is requested and not there, or the name is another.
    """
    if engine not in ("auto", "vllm", "generate"):
        raise ConfigError(f"engine={engine} is none of auto, vllm, generate; choose one of them.")
    if engine == "vllm":
        return VllmSampler(find_vllm(), device)
    if engine == "auto" and device.type == "cuda":
        with contextlib.suppress(ConfigError):
            return VllmSampler(find_vllm(), device)
    return GenerateSampler(device)


def _prompts_digest(prompts: Sequence[Prompt]) -> str:
    dialogues = [
        [[turn.role, turn.content, *filter(None, [turn.fields])] for turn in prompt_messages(prompt)]
        for prompt in prompts
    ]
    return hashlib.sha256(json.dumps(dialogues).encode()).hexdigest()
