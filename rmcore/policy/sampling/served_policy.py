"""A policy in training, served by a vLLM of our own: other weights after each step, samples with their probabilities.

One publication: `save_pretrained` into a private folder, in memory where there is room -> vLLM reloads everything ->
what it gives a probe must be what the model itself gives, else it is ended. A vLLM that dies is started again from the
folder of the weights that it had, and what was asked of it is asked again.
"""

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors.torch import save_file
from torch import Tensor

from rmcore.core.errors import ModelError, ServingError
from rmcore.core.files import private_folder, remove_abandoned, write_json
from rmcore.core.saving import save_pretrained
from rmcore.models.device import pick_device
from rmcore.policy.policy import Policy, load_weights
from rmcore.policy.sampling.sampler import SamplingSettings, prompt_seed
from rmcore.policy.sampling.vllm_sampler import DrawnTokens, RunningVllm, new_generator
from rmcore.serving.vllm_process import find_vllm
from rmcore.serving.weight_files import text_files, weight_files, write_index

GPU_SHARE_BESIDE_TRAINING = 0.3
"""TRL's own default for a vLLM next to its trainer."""
IN_MEMORY = Path("/dev/shm")  # noqa: S108 - a folder of our own is made in it
TIMES_THE_WEIGHTS = 6
"""Bytes that must be free, in those of the policy's files: two versions lie there while one becomes the next, in
float32 where the files may be half as large, and vLLM may need memory meanwhile."""
CONFIG_FILE, HEAD_FILE = "config.json", "output.safetensors"
NAME = "rm-opt-policy"
PROBE = ("What is the capital of France?", "I do not know, and I will not look it up either.")
PROBE_TOKENS = 64
CPU_TOLERANCE, GPU_TOLERANCE = 1e-3, 0.1
"""Nats a token, mean over the probe. On a CPU both compute in float32, and 1e-6 to 1e-5 was measured; a GPU rounds to
bfloat16 or TF32, which leaves some hundredths: there mixed or foreign weights are seen, a single small step is not."""


class ServedPolicy:
    """A vLLM that draws from a policy whose weights change. Use it as a context, or `close` it.

    It starts at once, and the calls wait for it.

    Args:
        policy: what answers; its folder is never written to.
        program: starts vLLM (`find_vllm`).
        device: what that vLLM was built for.
        max_seq_len: tokens of a prompt with its response, at most.
    """

    def __init__(self, policy: Policy, program: Path, device: torch.device, max_seq_len: int) -> None:
        self.policy = policy
        self.version = 0
        """Number of publications that were made; 0: the weights served are those of the policy's folder."""
        self._held = ExitStack()
        self._place = self._held.enter_context(_place_for(policy.weights()))
        self._unties = device.type != "cuda" and bool(policy.config.get_text_config().tie_word_embeddings)
        self._folder = self._write(load_weights(policy, torch.float32), 0) if self._unties else policy.folder
        log = self._place / "vllm.log"
        flags = ["--logprobs-mode", "processed_logprobs"]  # at the temperature: of the distribution that is drawn from
        share = GPU_SHARE_BESIDE_TRAINING
        self._vllm = new_generator(program, policy, device, max_seq_len, log, gpu_memory_share=share, flags=flags)
        self._probe = _probe_ids(policy, max_seq_len)
        self._tolerance = GPU_TOLERANCE if device.type == "cuda" else CPU_TOLERANCE
        self._running = RunningVllm(self._vllm, self._folder, log)

    def wait_started(self) -> None:
        """See `RunningVllm.wait_started`."""
        self._running.wait_started()

    def publish(self, model: Any) -> int:
        """Have vLLM draw from the present weights of `model`, and give their version. The model stays as it is.

        Args:
            model: the causal model in training, whole (no adapters), of the policy's shapes.

        Raises:
            ModelError: the model has adapters, or its probabilities are not finite.
            StoreError, OSError: the weights could not be written.
            ServingError: vLLM did not take them, or gives other probabilities than the model; it is ended then.
        """
        if hasattr(model, "peft_config"):
            raise ModelError("the model has adapters, which vLLM would not see; publish what merge_and_unload gives.")
        expected = _log_probs(model, self._probe)
        folder = self._write(model, self.version + 1)
        try:
            self._running.insist(lambda: self._load(folder, expected), folder)
        except BaseException:
            self._running.run(self._vllm.kill())  # whatever it has loaded by now, no sample may come from it
            raise
        former, self._folder = self._folder, folder
        self.version += 1
        if former.parent == self._place:
            shutil.rmtree(former)
        return self.version

    def draw(self, prompt_ids: Sequence[Sequence[int]], settings: SamplingSettings) -> list[list[DrawnTokens]]:
        """Draw from the weights that were published last: `settings.num_samples` responses to each prompt, in order.

        All of one call are drawn by one version. A vLLM that dies meanwhile is started again with the same weights and
        requested all of them again.

        Args:
            prompt_ids: token ids of each prompt, as `Policy.prompt_ids` gives them.
            settings: how; the seed of each prompt follows from its place and `settings.seed`.

        Raises:
            RequestError: vLLM refuses a prompt.
            ModelError: a token had no probability: the weights are broken.
            ServingError: vLLM died too often, or did not answer.
        """
        return self._running.insist(lambda: self._draw(prompt_ids, settings), self._folder)

    async def _draw(self, prompt_ids: Sequence[Sequence[int]], settings: SamplingSettings) -> list[list[DrawnTokens]]:
        asked = [
            self._vllm.complete(self.policy, ids, settings, prompt_seed(settings, place))
            for place, ids in enumerate(prompt_ids)
        ]
        rows: list[list[DrawnTokens]] = []
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(answer, BaseException):
                raise answer
            rows.append(answer)
        return rows

    async def _load(self, folder: Path, expected: Tensor) -> None:
        """Have vLLM load a folder, and compare what it then gives the probe with what is expected."""
        await self._vllm.reload(folder)
        served = torch.tensor(await self._vllm.prompt_log_probs(self.policy, self._probe))
        difference = float((served - expected).abs().mean())
        if not difference <= self._tolerance:  # a NaN is not
            raise ServingError(
                f"vLLM's log-probabilities differ from the model's by {difference:.3g} nats a token after it loaded "
                f"the model's weights, and {self._tolerance:g} is rounding: it computes another model, so nothing is "
                "drawn from it. Draw with rollouts=generate, and report the architecture."
            )

    def _write(self, model: Any, version: int) -> Path:
        """The model's weights next to the policy's own configuration and tokenizer, as a folder that vLLM loads."""
        folder = self._place / f"version-{version:06d}"
        shutil.rmtree(folder, ignore_errors=True)  # of a publication that failed
        save_pretrained(model, folder)
        for name in [*text_files(self.policy.folder), *(path.name for path in self.policy.folder.glob("*.py"))]:
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(self.policy.folder / name)
        if self._unties:
            _untie(model, folder)
        return folder

    def close(self) -> None:
        """End vLLM, and remove the published weights."""
        self._running.close()
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def create_vllm_policy_publisher(
    policy: str | Path, *, max_seq_len: int, vllm: str | None = None, device: str = "auto"
) -> ServedPolicy:
    """Start a vLLM for a training loop of one's own, which publishes to it and draws from it.

    For example

        with create_vllm_policy_publisher("my-policy", max_seq_len=1024) as served:
            for step, prompts in enumerate(batches):
                served.publish(model)
                ids = [served.policy.prompt_ids(prompt) for prompt in prompts]
                groups = served.draw(ids, SamplingSettings(num_samples=8, max_new_tokens=256, seed=step))
                ...                        # groups[i][j].ids and .log_probs; rewards, loss, optimizer.step()

    Args:
        policy: the folder or hub model that the training starts from; configuration and tokenizer are read from it.
        max_seq_len: tokens of a prompt with its response, at most.
        vllm: the Python of an environment with vLLM, or its `vllm`; None looks for one (`find_vllm`).
        device: auto, cpu or cuda: what that vLLM was built for.

    Raises:
        ConfigError: there is no vLLM.
        ModelError: the policy cannot be read.
    """
    return ServedPolicy(Policy.load(policy), find_vllm(vllm), pick_device(device), max_seq_len)


def _untie(model: Any, folder: Path) -> None:
    """Give the output layer of a written model, which is its input embedding, a tensor of its own.

    On a CPU vLLM 0.32 packs the tied output layer at its start, and never again: after a reload, logits come from new
    layers and the old output. It packs one of its own at each reload.
    """
    config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    (folder / CONFIG_FILE).unlink()  # a link to the policy's own
    write_json(folder / CONFIG_FILE, config | {"tie_word_embeddings": False})
    files = weight_files(folder)
    head = model.get_output_embeddings().weight.detach().cpu().contiguous()
    save_file({"lm_head.weight": head}, folder / HEAD_FILE, metadata={"format": "pt"})
    write_index(folder, [*files, HEAD_FILE])


def _log_probs(model: Any, ids: Sequence[int]) -> Tensor:
    """Log-probabilities of all tokens but the first, given those before: (T - 1,), on the CPU."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        row = torch.tensor([list(ids)], device=model.device)
        logits = model(input_ids=row).logits[0, :-1].float()
        log_probs = torch.log_softmax(logits, dim=-1).gather(1, row[0, 1:, None])[:, 0].cpu()
    model.train(was_training)
    if not bool(torch.isfinite(log_probs).all()):
        raise ModelError("the policy in training gives probabilities that are not finite: it has diverged; see its KL.")
    return log_probs


def _probe_ids(policy: Policy, max_seq_len: int) -> list[int]:
    """A prompt and an answer to it, with room for the one token that vLLM draws behind."""
    prompt, response = PROBE
    ids = [*policy.prompt_ids(prompt), *policy.reader.response_ids(response)]
    return ids[: min(PROBE_TOKENS, max_seq_len - 1)]


def _place_for(weights: Path) -> AbstractContextManager[Path]:
    """A folder that only this user may enter, in memory where there is room.

    What killed processes left in memory or on the disk is removed: it would stay until the machine is switched off.
    """
    for place in (IN_MEMORY, Path(tempfile.gettempdir())):
        remove_abandoned(place, lambda name: name == NAME)
    size = sum(path.stat().st_size for path in weights.glob("*.safetensors"))
    has_room = os.access(IN_MEMORY, os.W_OK) and shutil.disk_usage(IN_MEMORY).free > TIMES_THE_WEIGHTS * size
    return private_folder((IN_MEMORY if has_room else Path(tempfile.gettempdir())) / NAME)
