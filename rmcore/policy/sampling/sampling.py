"""Samples of a policy for many prompts, stored as they come: a second call continues where the first one ended.

The file has one line a prompt, whole or not there:

    {"samples_of": {"policy": "3f1c...", "temperature": 1.0, ...}}          what determines the samples
    {"prompt_index": 4, "samples": [{"response": "...", "num_tokens": 9, "finished": true}, ...]}

A line is flushed to the disk before the next prompt's; one that a kill cut in half is dropped on opening, and its
prompt is drawn again.
"""

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import pandas as pd
import torch

from rmcore.core.errors import ConfigError, DataError, ServingError
from rmcore.core.files import fsync_folder
from rmcore.core.progress import Report, silent
from rmcore.data.pair import Prompt, as_prompts, prompt_messages
from rmcore.models.device import pick_device
from rmcore.policy.policy import Policy
from rmcore.policy.sampling.sampler import GenerateSampler, Sample, Sampler, SamplingSettings
from rmcore.policy.sampling.vllm_sampler import VllmSampler
from rmcore.serving.vllm_process import find_vllm

EngineName = Literal["auto", "vllm", "generate"]
HEADER = "samples_of"


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
        out: JSONL file that takes each prompt's samples as soon as they are there (see above).
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


class SampleFile:
    """An open file of samples; made by `open_samples`.

    stored: {prompt index: its samples in their order}, those read and those appended.
    """

    def __init__(self, file: BinaryIO, stored: dict[int, list[Sample]]) -> None:
        self._file = file
        self.stored = stored

    def append(self, samples: Sequence[Sample]) -> None:
        """Store all samples of one prompt; they are on disk when this returns."""
        [index] = {sample.prompt_index for sample in samples}
        rows = [{"response": s.response, "num_tokens": s.num_tokens, "finished": s.finished} for s in samples]
        _write_line(self._file, {"prompt_index": index, "samples": rows})
        self.stored[index] = list(samples)


@contextmanager
def open_samples(path: Path, determined_by: Mapping[str, Any], *, num_samples: int) -> Iterator[SampleFile]:
    """Open a file to continue, or begin it, and hold it against other processes.

    Args:
        path: where; its folder is made.
        determined_by: whatever determines the samples, JSON-ready.
        num_samples: of each prompt; a line with another number is damaged.

    Raises:
        DataError: the file holds something else, samples of other settings or a damaged line, or another process has
            it open. It is left as it is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"another process draws samples into {path} now; wait for it or name another.") from None
        file.seek(0)
        content = file.read()
        if _line({HEADER: determined_by}).startswith(content):  # nothing, or this header cut in half
            file.truncate(0)
            _write_line(file, {HEADER: determined_by})
            fsync_folder(path.parent)
            yield SampleFile(file, {})
            return
        _check_header(path, content, determined_by)
        stored, num_bytes = _read(path, content, num_samples)
        file.truncate(num_bytes)
        yield SampleFile(file, stored)


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def _write_line(file: BinaryIO, record: Mapping[str, Any]) -> None:
    file.write(_line(record))
    file.flush()
    os.fsync(file.fileno())


def _check_header(path: Path, content: bytes, determined_by: Mapping[str, Any]) -> None:
    try:
        stored = dict(json.loads(content.split(b"\n", 1)[0])[HEADER])
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path} is there and holds no samples; nothing was written. Name another file.") from None
    names = sorted({*stored, *determined_by})
    differing = [name for name in names if stored.get(name) != determined_by.get(name)]
    if differing:
        changes = ", ".join(f"{name} {stored.get(name)!r} there, {determined_by.get(name)!r} now" for name in differing)
        raise DataError(
            f"{path} holds samples of something else ({changes}), which must not be mixed. Delete the file to draw "
            "again, or name another."
        )


def _read(path: Path, content: bytes, num_samples: int) -> tuple[dict[int, list[Sample]], int]:
    """Samples of the whole lines, and how many bytes those are with the header."""
    header, *lines = content.split(b"\n")[:-1]  # what follows the last line break is half a line
    stored: dict[int, list[Sample]] = {}
    num_bytes = len(header) + 1
    for number, line in enumerate(lines):
        samples = _parse(line, num_samples)
        if samples is None or samples[0].prompt_index in stored:
            if number == len(lines) - 1:  # a power cut may leave bytes that were never written
                break
            raise DataError(f"line {number + 2} of {path} is damaged; delete that line and its prompt is drawn again.")
        stored[samples[0].prompt_index] = samples
        num_bytes += len(line) + 1
    return stored, num_bytes


def _parse(line: bytes, num_samples: int) -> list[Sample] | None:
    """One prompt's samples, None where the line is none of ours."""
    try:
        record = json.loads(line)
        index, rows = int(record["prompt_index"]), record["samples"]
        samples = [
            Sample(index, number, str(row["response"]), int(row["num_tokens"]), bool(row["finished"]))
            for number, row in enumerate(rows)
        ]
    except (ValueError, KeyError, TypeError):
        return None
    return samples if len(samples) == num_samples else None
