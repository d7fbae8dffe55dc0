"""Samples from a vLLM of our own, many prompts at a time. If it dies, it is started again with the missing prompts.

Each prompt has its seed, but what else is computed besides it changes the last bits of a logit, so a second run gives
samples of the same distribution and not always the same ones.
"""

import asyncio
import contextlib
import shutil
import sys
import tempfile
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rmcore.core.errors import ConfigError, NotReadyError, RequestError, ServingError
from rmcore.core.processes import tail
from rmcore.policy.policy import Policy
from rmcore.policy.sampling.sampler import Keep, Sample, SamplingSettings, as_sample, broken_weights, prompt_seed
from rmcore.serving.vllm_process import EngineFailure, EngineSettings, VllmProcess, check, message

# The folder's own generation config would bring its top-k, top-p and penalties.
SAMPLING = ("--served-model-name", "policy", "--runner", "generate", "--generation-config", "vllm")
WHOLE_PROMPTS = ["--no-enable-chunked-prefill"]
"""Without a GPU: vLLM 0.32 dies there (`CPU Generator does not use offset`) when it cuts a prompt of a seeded request,
which it does as soon as prompts queue up."""
HIGHEST_TEMPERATURE = 2.0
"""vLLM refuses higher ones."""
MAX_RESTARTS = 2
SAMPLES_IN_FLIGHT = 1024
"""Samples of all prompts in flight together: vLLM computes some hundreds at once and has the next ones waiting."""
FEWEST_PROMPTS, MOST_PROMPTS = 8, 128
"""Prompts in flight."""
GPU_MEMORY_SHARE = 0.7
"""The reward model may lie next to it."""
NOT_FINITE = "Out of range float values are not JSON compliant"
"""Error of vLLM 0.32 for a log probability that is NaN. Without asking for those it would answer, with any tokens."""
PATIENCE_SECONDS = 3600.0
"""For one prompt's samples, and for the start. A vLLM that died is noticed within seconds."""


class VllmSampler:
    """Starts vLLM for a call and ends it after.

    Args:
        program: the Python of an environment with vLLM (`find_vllm`).
        device: what that vLLM was built for; it decides precision and compilation.
    """

    name = "vllm"

    def __init__(self, program: Path, device: torch.device) -> None:
        self.program = program
        self.device = device

    def draw(
        self, policy: Policy, prompt_ids: Mapping[int, Sequence[int]], settings: SamplingSettings, keep: Keep
    ) -> None:
        """See `Sampler.draw`. `keep` is called from another thread.

        Raises:
            ConfigError: a temperature that vLLM refuses.
        """
        if settings.temperature > HIGHEST_TEMPERATURE:
            raise ConfigError(
                f"temperature={settings.temperature:g}, and vLLM refuses more than {HIGHEST_TEMPERATURE:g}; lower it, "
                "or draw with engine=generate."
            )
        policy.weights()
        logs = Path(tempfile.mkdtemp(prefix="rm-opt-vllm-log-"))
        try:
            _run(self._draw(policy, dict(prompt_ids), settings, keep, logs / "vllm.log"))
        except ServingError:  # its message may name the log
            raise
        except BaseException:
            shutil.rmtree(logs)
            raise
        shutil.rmtree(logs)

    async def _draw(
        self, policy: Policy, missing: dict[int, Sequence[int]], settings: SamplingSettings, keep: Keep, log: Path
    ) -> None:
        def keep_and_tick(samples: Sequence[Sample]) -> None:
            keep(samples)
            del missing[samples[0].prompt_index]

        for restarts_left in range(MAX_RESTARTS, -1, -1):
            try:
                await self._draw_until_death(policy, dict(missing), settings, keep_and_tick, log)
                return
            except NotReadyError as error:
                if not restarts_left:
                    raise ServingError(
                        f"vLLM died {MAX_RESTARTS + 1} times while it sampled, {len(missing)} prompts are missing. "
                        f"{tail(log)}"
                    ) from error
                print(
                    f"warning: vLLM died while it sampled ({error}); it is started again for the {len(missing)} "
                    "missing prompts",
                    file=sys.stderr,
                )

    async def _draw_until_death(
        self, policy: Policy, todo: dict[int, Sequence[int]], settings: SamplingSettings, keep: Keep, log: Path
    ) -> None:
        longest = max(map(len, todo.values())) + settings.max_new_tokens
        vllm = new_generator(self.program, policy, self.device, longest, log, gpu_memory_share=GPU_MEMORY_SHARE)
        waiting = iter(todo.items())

        async def work() -> None:
            for index, ids in waiting:
                rows = await vllm.complete(policy, ids, settings, prompt_seed(settings, index))
                keep([as_sample(policy, index, number, row.ids) for number, row in enumerate(rows)])

        num_workers = min(max(SAMPLES_IN_FLIGHT // settings.num_samples, FEWEST_PROMPTS), MOST_PROMPTS)
        workers: list[asyncio.Task[None]] = []
        try:
            await vllm.start(policy.folder)
            workers = [asyncio.create_task(work()) for _ in range(num_workers)]
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            await vllm.stop()


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """One response as vLLM drew it.

    ids: (T,) token ids, with the one that ended it.
    log_probs: (T,) of those tokens, in nats; at the temperature only where vLLM was started to say so.
    """

    ids: list[int]
    log_probs: list[float]


class VllmGenerator(VllmProcess):
    """A running vLLM that draws from a policy. Use `start`, and `stop` whatever happens."""

    async def complete(
        self, policy: Policy, ids: Sequence[int], settings: SamplingSettings, seed: int
    ) -> list[DrawnTokens]:
        """The samples of one prompt, as they were drawn.

        Raises:
            NotReadyError: vLLM died.
            RequestError: it refuses the prompt.
            EngineFailure: it failed.
            ModelError: a token had no probability: the policy's weights are broken.
            ServingError: it did not answer in time, or not as asked.
        """
        body = {
            "model": "policy",
            "prompt": list(ids),
            "n": settings.num_samples,
            "max_tokens": settings.max_new_tokens,
            "seed": seed,  # vLLM adds the sample's number
            "temperature": settings.temperature,
            **{"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
            # Only the policy's own stop tokens, as in `generate`: vLLM reads others from other files.
            **{"ignore_eos": True, "stop_token_ids": list(policy.stop_ids)},
            "return_token_ids": True,
            "logprobs": 0,  # of the tokens drawn: where weights are broken, nothing else tells (NOT_FINITE)
        }
        choices = sorted(await self._choices(policy, body), key=lambda choice: int(choice["index"]))
        if len(choices) != settings.num_samples or not all(choice["token_ids"] for choice in choices):
            raise ServingError(f"vLLM gave {len(choices)} samples in place of {settings.num_samples}, or empty ones.")
        return [DrawnTokens(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in choices]

    async def prompt_log_probs(self, policy: Policy, ids: Sequence[int]) -> list[float]:
        """Log-probabilities of T tokens but the first, each given those before: T - 1; errors as of `complete`."""
        body = {"model": "policy", "prompt": list(ids), "max_tokens": 1, "prompt_logprobs": 0}
        [choice] = await self._choices(policy, body)
        seen = zip(ids[1:], choice["prompt_logprobs"][1:], strict=True)
        return [float(known[str(token)]["logprob"]) for token, known in seen]

    async def _choices(self, policy: Policy, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Ask for completions of token ids and give the choices of the answer; errors as of `complete`."""
        answer = await self._post("/v1/completions", json=body)
        if answer.status_code == 400 and NOT_FINITE in answer.text:
            raise broken_weights(policy)
        if answer.status_code in (400, 422):
            raise RequestError(f"vLLM refuses the prompt: {message(answer)}")
        try:
            check(answer, "sampled")
        except EngineFailure as error:
            if not await self.is_healthy():
                raise NotReadyError("its engine ended") from error
            raise
        return list(answer.json()["choices"])


def new_generator(
    program: Path,
    policy: Policy,
    device: torch.device,
    longest: int,
    log: Path,
    *,
    gpu_memory_share: float,
    flags: Sequence[str] = (),
) -> VllmGenerator:
    """A vLLM for a policy's samples, not started yet.

    Args:
        program: see `VllmSampler`.
        policy: what answers.
        device: see `VllmSampler`.
        longest: tokens of a prompt with its response, at most.
        log: file for what it says.
        gpu_memory_share: of one GPU.
        flags: further ones.
    """
    settings = EngineSettings(
        program,
        policy.compute_dtype(device.type),
        longest,
        gpu_memory_share,
        eager=device.type != "cuda",
        start_timeout_s=PATIENCE_SECONDS,
        request_timeout_s=PATIENCE_SECONDS,
    )
    task = [
        *SAMPLING,
        *(["--trust-remote-code"] if policy.trust_remote_code else []),
        *([] if device.type == "cuda" else WHOLE_PROMPTS),
        *flags,
    ]
    return VllmGenerator(settings, log, task)


def _run(work: Coroutine[Any, Any, None]) -> None:
    """Run to the end in a thread with its own event loop: the caller may be in one, as notebooks are.

    Ctrl-C cancels it and waits until it has ended what it started.
    """
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(report_unless_harmless)
    task, ended = loop.create_task(work), threading.Event()

    def run() -> None:
        with contextlib.suppress(BaseException):  # the task has it
            loop.run_until_complete(task)
        loop.close()
        ended.set()

    try:
        threading.Thread(target=run).start()
        ended.wait()
    except BaseException:
        with contextlib.suppress(RuntimeError):  # it has ended just now
            loop.call_soon_threadsafe(task.cancel)
        ended.wait()
        raise
    task.result()


def report_unless_harmless(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Say what went wrong in the loop itself, but not that bytes came for a request that was given up (anyio 4)."""
    if not isinstance(context.get("exception"), asyncio.InvalidStateError):
        loop.default_exception_handler(context)
