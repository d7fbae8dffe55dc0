"""The cost of a training before it runs, measured on two of its own steps, which are thrown away."""

import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rmcore.config.pipeline import PipelineConfig
from rmcore.core.tracking import NullTracker
from rmcore.data.rendering import TokenizedPair
from rmcore.data.tokenized import Pairs, token_lengths
from rmcore.data.tokenized_observations import Observations, TokenizedObservation
from rmcore.models.batching import StepOrder, pack_pairs, packed_units, pair_tokens, row_tokens
from rmcore.models.device import pick_device
from rmcore.models.observation_batching import observation_tokens
from rmcore.models.packing.layout import Packing
from rmcore.models.plain_batching import plain_groups
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.training.feed import ObservationFeed
from rmcore.training.loop import Trainer
from rmcore.training.material import Material, tokens_of
from rmcore.training.memory import activation_bytes_per_token, free_bytes

WARM_STEPS, TIMED_STEPS = 1, 2
Trained = Sequence[TokenizedPair] | Sequence[TokenizedObservation]


class TimedSteps(NamedTuple):
    """The first steps of a training, timed: pairs and tokens that they computed, and seconds."""

    trainer: Trainer
    num_pairs: int
    num_tokens: int
    seconds: float


def time_steps(rm: BradleyTerryRM, config: PipelineConfig, pairs: Trained) -> TimedSteps:
    """Time the steps after the first one, in which libraries and caches warm up; `rm` is of no use afterwards."""
    with tempfile.TemporaryDirectory() as nothing:
        trainer = Trainer(
            rm, config.train, train=pairs, validation=[], folder=Path(nothing), tracker=NullTracker(), seed=config.seed
        )
        trainer.probe(WARM_STEPS)
        started = time.perf_counter()
        num_tokens = trainer.probe(TIMED_STEPS)
        seconds = time.perf_counter() - started
    num_pairs = min(TIMED_STEPS, trainer.num_steps) * min(config.train.pairs_per_step, len(pairs))
    return TimedSteps(trainer, num_pairs, num_tokens, seconds)


def plan(
    config: PipelineConfig, train: Pairs, held_out: Pairs, observations: Observations | None = None
) -> dict[str, Any]:
    """Steps, tokens, memory and expected time of a training, by label; nothing is written.

    `observations` are all that the data say, where that is more than strict pairs.

    Tokens are exact (every step is cut as it would be); time is extrapolated by tokens from two real steps.
    """
    material = Material.choose(config.train, train, observations, config.data.attribute_weights)
    rm = BradleyTerryRM.new(config.model, seed=config.seed, device=pick_device(config.device))
    material.attach_to(rm)
    with tempfile.TemporaryDirectory() as folder:  # mapped files outlive their names
        material.write(rm.renderer, Path(folder), config.train)
        read = material.open(Path(folder))
    pairs = tokens_of(read)
    named = "pairs" if material.design is None else "observations"
    timed = time_steps(rm, config, pairs)
    trainer = timed.trainer
    tokens = _computed_tokens(trainer, pairs)
    seconds = timed.seconds / timed.num_tokens * tokens
    num_evaluations = math.ceil(trainer.num_steps / config.train.eval_every) if held_out else 0
    per_token = activation_bytes_per_token(
        rm.model.config,
        config.model.max_seq_len,
        trainer.config.chosen_precision,
        gradient_checkpointing=config.train.gradient_checkpointing,
    )
    budget = trainer.at.token_budget
    memory = 4 * rm.num_parameters + 12 * rm.num_trained_parameters + budget * per_token
    return {
        "model": f"{config.model.name}, {rm.num_parameters / 1e6:.1f} M parameters on {rm.device}",
        named: f"{len(pairs)} to train on, {len(held_out)} held out; {read.cut['num_cut_pairs']} longer than the "
        f"limit, {read.num_left_out} dropped",
        "steps": f"{trainer.num_steps} of {config.train.pairs_per_step} {named}, {num_evaluations} evaluations",
        "token budget": f"{budget} tokens a micro-batch, {_form(trainer)}",
        "tokens": f"{tokens / 1e6:.2f} M tokens computed in training steps",
        "memory": f"about {memory / 2**30:.1f} GiB at most; {free_bytes(rm.device) / 2**30:.1f} GiB are free",
        "time": f"about {seconds / 60:.1f} min in training steps "
        f"(from {TIMED_STEPS} steps measured in {timed.seconds:.1f} s)",
    }


def _form(trainer: Trainer) -> str:
    if trainer.packing is None:
        return "padded"
    return "packed, a common prompt once" if trainer.packing.causal else "packed"


def _grouped_tokens(trainer: Trainer, packing: Packing, step: Sequence[int]) -> int:
    """Tokens of a step whose pairs share prompts and answers, in one process."""
    feed: Any = trainer.feed
    pairs, prompts = [feed.pairs[index] for index in step], feed.prompts[list(step)].tolist()
    return sum(packed_units(pairs, prompts, row_tokens(trainer.at.token_budget, packing), packing)[1])


def _computed_tokens(trainer: Trainer, pairs: Trained) -> int:
    config, packing = trainer.config, trainer.packing
    if trainer.feed.prompts is not None and packing is not None:
        return sum(_grouped_tokens(trainer, packing, step) for step in trainer.feed.order)
    steps = StepOrder(len(pairs), config.pairs_per_step, trainer.num_steps, seed=trainer.seed)
    observed = isinstance(trainer.feed, ObservationFeed)
    trained: Any = pairs
    if packing is not None:
        tokens: Any = observation_tokens if observed else pair_tokens
        costs = np.fromiter((tokens(one, packing) for one in trained), np.int64)
        return sum(int(costs[step].sum()) for step in steps)
    if observed:
        cut = (batch for step in steps for batch in trainer.feed.cut(step, trainer.at.token_budget))
        return sum(batch.rows.num_tokens for batch in cut)
    total, longer = 0, token_lengths(trained).max(axis=1)
    groups = plain_groups if config.batching == "plain" else pack_pairs
    for step in steps:
        lengths = longer[step].tolist()
        for group in groups(lengths, trainer.at.token_budget):
            total += 2 * len(group) * max(lengths[index] for index in group)
    return total
