"""Samples from a vLLM of our own, many prompts at a time. If it dies, it is started again with the missing prompts.

Each prompt has its seed, but what else is computed besides it changes the last bits of a logit, so a second run gives
samples of the same distribution and not always the same ones.
"""

import asyncio
import contextlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from rmcore.core.errors import ConfigError, NotReadyError, RequestError, ServingError
from rmcore.core.loop_thread import LoopThread
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
Result = TypeVar("Result")


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
        folder, missing = policy.weights(), dict(prompt_ids)
        longest = max(map(len, missing.values())) + settings.max_new_tokens

        def keep_and_tick(samples: Sequence[Sample]) -> None:
            keep(samples)
            del missing[samples[0].prompt_index]

        logs = Path(tempfile.mkdtemp(prefix="rm-opt-vllm-log-"))
        log = logs / "vllm.log"
        vllm = new_generator(self.program, policy, self.device, longest, log, gpu_memory_share=GPU_MEMORY_SHARE)
        try:
            with contextlib.closing(RunningVllm(vllm, folder, log)) as running:
                running.insist(lambda: _draw_all(vllm, policy, dict(missing), settings, keep_and_tick), folder)
        except ServingError:  # its message may name the log
            raise
        except BaseException:
            shutil.rmtree(logs)
            raise
        shutil.rmtree(logs)


async def _draw_all(
    vllm: "VllmGenerator", policy: Policy, todo: Mapping[int, Sequence[int]], settings: SamplingSettings, keep: Keep
) -> None:
    waiting = iter(todo.items())

    async def work() -> None:
        for index, ids in waiting:
            rows = await vllm.complete(policy, ids, settings, prompt_seed(settings, index))
            keep([as_sample(policy, index, number, row.ids) for number, row in enumerate(rows)])

    num_workers = min(max(SAMPLES_IN_FLIGHT // settings.num_samples, FEWEST_PROMPTS), MOST_PROMPTS)
    workers = [asyncio.create_task(work()) for _ in range(num_workers)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


class RunningVllm:
    """A vLLM in a thread with its own event loop: the caller may be in one, as notebooks are. `close` it.

    It starts at once, and the calls wait for it.

    Args:
        vllm: not started yet.
        folder: whose weights it loads.
        log: what it says.
    """

    def __init__(self, vllm: "VllmGenerator", folder: Path, log: Path) -> None:
        self.vllm, self._log = vllm, log
        self._thread = LoopThread("vllm")
        self._thread.loop.set_exception_handler(report_unless_harmless)
        self._starting = self._thread.begin(vllm.start(folder))

    def wait_started(self) -> None:
        """Wait until vLLM answers; other calls do so by themselves.

        Raises:
            ServingError: it did not start; the message has the end of its log.
        """
        self._starting.result()

    def insist(self, work: Callable[[], Coroutine[Any, Any, Result]], folder: Path) -> Result:
        """Do `work`; where vLLM dies of it or fails, start it again from `folder` and do it again.

        Raises:
            ServingError: it died too often.
        """
        for restarts_left in range(MAX_RESTARTS, -1, -1):
            self.wait_started()
            try:
                return self.run(work())
            except (NotReadyError, EngineFailure) as error:
                if not restarts_left:
                    raise ServingError(
                        f"vLLM died {MAX_RESTARTS + 1} times while it sampled. {tail(self._log)}"
                    ) from error
                print(
                    f"warning: vLLM died while it sampled ({error}); it is started again with the same weights",
                    file=sys.stderr,
                )
                self.run(self.vllm.stop())
                self._starting = self._thread.begin(self.vllm.start(folder))
        raise AssertionError

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Do `work` in its event loop and wait for it."""
        return self._thread.run(work)

    def close(self) -> None:
        """End vLLM."""
        if not self._thread.loop.is_closed():
            self._thread.close(self.vllm.stop())


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


def report_unless_harmless(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Say what went wrong in the loop itself, but not that bytes came for a request that was given up (anyio 4)."""
    if not isinstance(context.get("exception"), asyncio.InvalidStateError):
        loop.default_exception_handler(context)
