"""Rollouts of GRPO: `generate` in the process against a vLLM that has the weights published to it, in one run.

    python benchmarks/policy_rollouts.py

Each size of the tiny policy's shape with random weights, of whose tokens a share ends a response, so lengths are
geometric as those of a real policy roughly are. A round is one step's rollouts on weights that have just changed: both
sides draw from the same prompts, in turns; vLLM's seconds include the publication. The first round is not counted.

rollouts   seconds of a step's rollouts: median of rounds, range.
tokens/s   tokens of responses over those seconds, publication included.
GRPO, s    seconds of a whole step of the trainer, by a reward that costs nothing: median of `--grpo-steps` after the
           first.
publish    seconds of writing, loading and checking the weights, of the rollouts.
start      seconds until vLLM answers, once a training.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, TrainerCallback

from rmcore.config.data import GoldConfig
from rmcore.config.rlhf import RlhfConfig
from rmcore.data.gold.world import generate_pairs
from rmcore.data.pair import Prompt
from rmcore.models.device import pick_device
from rmcore.models.loading import quiet_libraries, read_config
from rmcore.models.tiny import build_tiny, resized
from rmcore.policy.grpo.grpo import make_grpo_with_rm
from rmcore.policy.grpo.policy_meter import draw
from rmcore.policy.policy import Policy
from rmcore.policy.policy_weights import load_weights
from rmcore.policy.sampling.generate_sampler import whole_distribution
from rmcore.policy.sampling.sampler import SamplingSettings
from rmcore.policy.sampling.served_policy import ServedPolicy
from rmcore.serving.scorer import Rollout
from rmcore.serving.vllm_process import find_vllm

SHAPES = {"tiny": (1.0, 1.0), "23 M": (3.2, 2.0)}
"""Width and depth as multiples of the 160 and 4 of tiny."""


def new_policy(folder: Path, shape: tuple[float, float], mean_tokens: int) -> Policy:
    """A policy with random weights, one in `mean_tokens` of whose tokens ends a response."""
    build_tiny(folder)
    config = resized(read_config(str(folder), trust_remote_code=False), *shape)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    generation = folder / "generation_config.json"
    ends = list(range(2, config.vocab_size, mean_tokens))
    generation.write_text(json.dumps(json.loads(generation.read_text()) | {"eos_token_id": ends}))
    return Policy.load(folder)


def move(model: Any, seed: int) -> None:
    """Change all weights a little, as an optimizer step does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1e-4 * torch.randn(parameter.shape, generator=generator))


class Length:
    """A reward that costs nothing."""

    def score(self, rollouts: Sequence[Rollout]) -> list[float]:
        """See `RolloutScorer`."""
        for rollout in rollouts:
            rollout.meta.update(rm_score=float(len(rollout.steps[0].completion)), rm_score_version=1)
        return [rollout.meta["rm_score"] for rollout in rollouts]

    def wait_ready(self, timeout_s: float) -> None:
        """It is always there."""


class Clock(TrainerCallback):
    """Says when each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Look at the clock."""
        self.ends.append(time.perf_counter())


def grpo_step(
    args: argparse.Namespace, policy: Policy, prompts: Sequence[Prompt], served: ServedPolicy | None, out: Path
) -> str:
    """Median seconds of a whole step of the trainer."""
    clock, steps = Clock(), args.grpo_steps + 1
    settings = RlhfConfig(steps=steps, prompts_per_step=args.prompts, group_size=args.group, measure_every=steps)
    make_grpo_with_rm(
        policy,
        prompts,
        Length(),
        out=out / ("generate" if served is None else "vllm"),
        settings=settings,
        max_new_tokens=args.max_new_tokens,
        device=args.device,
        served=served,
        callbacks=[clock],
    ).train()
    return f"{statistics.median(after - before for before, after in pairwise(clock.ends)):.2f}"


def measure(args: argparse.Namespace, shape: tuple[float, float], folder: Path) -> dict[str, Any]:
    """Rounds of one shape."""
    policy = new_policy(folder, shape, args.mean_tokens)
    device = pick_device(args.device)
    model = load_weights(policy, torch.float32).to(device)
    pairs = generate_pairs(GoldConfig(num_prompts=200, pairs_per_prompt=1), seed=0).pairs[: args.prompts]
    ids = policy.fitting_ids([pair.prompt for pair in pairs], args.max_new_tokens)
    rows = [row for row in ids for _ in range(args.group)]
    whole = whole_distribution(policy, 1.0, args.max_new_tokens)
    found: dict[str, Any] = {"parameters": sum(value.numel() for value in model.parameters())}
    sides: dict[str, list[tuple[float, int]]] = {"generate": [], "vllm": []}
    publishing = []
    started = time.perf_counter()
    with ServedPolicy(policy, find_vllm(), device, max(map(len, ids)) + args.max_new_tokens) as served:
        served.wait_started()
        found["start"] = time.perf_counter() - started
        for number in range(args.rounds + 1):
            move(model, number)
            started = time.perf_counter()
            drawn = draw(model, policy, rows, whole, number)
            generated = time.perf_counter() - started, sum(map(len, drawn))
            started = time.perf_counter()
            served.publish(model)
            published = time.perf_counter() - started
            groups = served.draw(ids, SamplingSettings(args.group, 1.0, args.max_new_tokens, number))
            served_in = time.perf_counter() - started, sum(len(one.ids) for group in groups for one in group)
            if number:
                sides["generate"].append(generated)
                sides["vllm"].append(served_in)
                publishing.append(published)
        prompts = [pair.prompt for pair in pairs]
        steps = {
            "generate": grpo_step(args, policy, prompts, None, folder) if args.grpo_steps else "-",
            "vllm": grpo_step(args, policy, prompts, served, folder) if args.grpo_steps else "-",
        }
    found["publish"] = statistics.median(publishing)
    for name, rounds in sides.items():
        seconds = [took for took, _ in rounds]
        found[name] = {
            "seconds": (statistics.median(seconds), min(seconds), max(seconds)),
            "tokens_per_s": sum(tokens for _, tokens in rounds) / sum(seconds),
            "grpo_step": steps[name],
        }
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--prompts", type=int, default=8, help="of a step")
    parser.add_argument("--group", type=int, default=8, help="samples of each prompt")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--mean-tokens", type=int, default=64, help="one token in so many ends a response")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--grpo-steps", type=int, default=5, help="whole steps of the trainer; 0: none")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    args = parser.parse_args()
    quiet_libraries()
    print(f"{os.cpu_count()} CPUs, {torch.get_num_threads()} torch threads, {pick_device(args.device)}")
    print("| policy | parameters | side | rollouts, s | tokens/s | times generate | GRPO, s | publish, s | start, s |")
    print("| --- | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for name in args.shapes:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(args, SHAPES[name], Path(folder))
        base = found["generate"]["tokens_per_s"]
        for side in ("generate", "vllm"):
            one = found[side]
            median, low, high = one["seconds"]
            own = f"{found['publish']:.2f} | {found['start']:.0f}" if side == "vllm" else "- | -"
            print(
                f"| {name} | {found['parameters'] / 1e6:.1f} M | {side} | {median:.2f} ({low:.2f}–{high:.2f}) | "
                f"{one['tokens_per_s']:.0f} | {one['tokens_per_s'] / base:.2f} | {one['grpo_step']} | {own} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
