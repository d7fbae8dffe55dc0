"""Samples of a policy for many prompts, stored as they come: a second call continues where the first one ended.

The file has one line a prompt, whole or not there: {"prompt_index": 4, "samples": [{"response": "...", "num_tokens": 9,
"finished": true}, ...]}. One that a kill cut in half is dropped, and its prompt is drawn again.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pandas as pd
import torch

from rmcore.core.errors import ConfigError, DataError, ServingError
from rmcore.core.files import append_json_lines, read_json_lines, write_json_lines
from rmcore.core.progress import Report, silent
from rmcore.data.pair import Prompt, as_prompts
from rmcore.models.device import pick_device
from rmcore.policy.policy import Policy
from rmcore.policy.sampling.sampler import GenerateSampler, Sample, Sampler, SamplingSettings
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
    """Draw the samples of all prompts; those that an earlier call of the same kind left in `out` are not drawn again.

    A prompt that the policy's template refuses or that is too long for it has no samples; how many is said on stderr.

    Args:
        policy: what answers.
        prompts: P of them; each may be a dialogue.
        settings: how many samples of each, and how.
        out: JSONL file of this call alone, which takes each prompt's samples as soon as they are there (see above).
        engine: vllm, generate, or auto: vllm where it is found and the device is a GPU.
        device: auto, cpu or cuda.
        report: called with the prompts done, all of them and a text; vLLM calls it from another thread.

    Raises:
        DataError: no prompts, or none that can be answered (before anything is drawn).
        ConfigError: vLLM is requested and not there, or refuses the temperature.
        ModelError: the policy cannot be loaded, or its weights are broken.
        ServingError: vLLM did not start or died too often; the message says what is stored.
    """
    prompts = as_prompts(prompts)
    if not prompts:
        raise DataError("draw_samples got no prompts: there is nothing to answer. Pass at least one.")
    sampler = choose_sampler(engine, pick_device(device))
    prompt_ids = policy.readable_ids(prompts, settings.max_new_tokens)
    stored = {row["prompt_index"]: row["samples"] for row in read_json_lines(out)}
    kept = [{"prompt_index": index, "samples": samples} for index, samples in stored.items()]
    write_json_lines(out, kept)  # without a line that a kill has cut

    def keep(samples: Sequence[Sample]) -> None:
        index = samples[0].prompt_index
        rows = [{"response": s.response, "num_tokens": s.num_tokens, "finished": s.finished} for s in samples]
        append_json_lines(out, [{"prompt_index": index, "samples": rows}])
        stored[index] = rows
        report(len(stored), len(prompt_ids), "prompts sampled")

    report(len(stored), len(prompt_ids), "prompts sampled")
    missing = {index: ids for index, ids in prompt_ids.items() if index not in stored}
    if missing:
        try:
            sampler.draw(policy, missing, settings, keep)
        except ServingError as error:
            raise ServingError(
                f"{error}\nThe samples of {len(stored)} of {len(prompt_ids)} prompts are stored in {out}; the same "
                "call continues with the others."
            ) from error
    table = [
        {"prompt_index": index, "sample": number, **row}
        for index in prompt_ids
        for number, row in enumerate(stored[index])
    ]
    return SampleSet(pd.DataFrame(table), sampler.name)


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
