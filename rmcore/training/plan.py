"""The cost of a training before it runs, measured on two of its own steps, which are thrown away."""

import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rmcore.config.pipeline import PipelineConfig
from rmcore.core.errors import ModelError
from rmcore.core.tracking import NullTracker
from rmcore.data.rendering import TokenizedPair
from rmcore.data.tokenized import Pairs
from rmcore.data.tokenized_observations import Observations, TokenizedObservation
from rmcore.models.device import free_bytes, pick_device
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.training.loop import Trainer
from rmcore.training.material import Material, tokens_of
from rmcore.training.memory import StepCounter

WARM_STEPS, TIMED_STEPS, CUT_STEPS = 1, 2, 200
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

    Tokens are exact up to `CUT_STEPS` steps, which are cut as they would be; time is extrapolated by tokens from two
    real steps.
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
    tokens, fullest = _computed_tokens(trainer)
    seconds = timed.seconds / timed.num_tokens * tokens
    num_evaluations = math.ceil(trainer.num_steps / config.train.eval_every) if held_out else 0
    chosen = "" if config.train.token_budget else ", chosen from the memory that this device has in all"
    return {
        "model": f"{config.model.name}, {rm.num_parameters / 1e6:.1f} M parameters on {rm.device}",
        named: f"{len(pairs)} to train on, {len(held_out)} held out; {read.cut['num_cut_pairs']} longer than the "
        f"limit, {read.num_left_out} dropped",
        "steps": f"{trainer.num_steps} of {config.train.pairs_per_step} {named}, {num_evaluations} evaluations",
        "token budget": f"{trainer.progress.token_budget} tokens a micro-batch, {_form(trainer)}{chosen}",
        "tokens": f"{tokens / 1e6:.2f} M tokens computed in training steps",
        "memory": _memory(trainer, fullest),
        "time": f"about {seconds / 60:.1f} min in training steps "
        f"(from {TIMED_STEPS} steps measured in {timed.seconds:.1f} s)",
    }


def _form(trainer: Trainer) -> str:
    if trainer.packing is None:
        return "padded"
    return "packed, a common prompt once" if trainer.packing.causal else "packed"


def _memory(trainer: Trainer, fullest: int) -> str:
    """Memory of step `fullest`, counted with and without the gradients of an earlier micro-batch."""
    rm, config = trainer.rm, trainer.config
    free = f"{free_bytes(rm.device) / 2**30:.2f} GiB are free"
    batches = sorted(trainer.feed[fullest][1], key=lambda batch: -batch.rows.num_tokens)[:2]
    counter = StepCounter(rm.model, config, rm.device)
    recomputed_share = rm.recomputed_share if config.gradient_checkpointing else 0.0
    try:
        counted = [
            counter.step(batch.rows, recomputed=recomputed_share, accumulates=place > 0)
            for place, batch in enumerate(batches)
        ]
    except ModelError as reason:
        return f"cannot be counted: {reason}; {free}"
    first = counted[0]
    share = f"{100 * rm.recomputed_share:.0f} % of the layers"
    recomputed = f", activations recomputed in {share}" if config.gradient_checkpointing else ""
    return (
        f"{max(one.peak for one in counted) / 2**30:.2f} GiB at most: weights {first.weights / 2**30:.2f}, optimizer "
        f"{first.moments / 2**30:.2f}, the rest in a micro-batch of {first.num_tokens} tokens{recomputed}; {free}"
    )


def _computed_tokens(trainer: Trainer) -> tuple[int, int]:
    """Tokens of all steps, of which `CUT_STEPS` are cut, and the step, from 0, that has the largest micro-batch."""
    places = np.unique(np.linspace(0, trainer.num_steps - 1, CUT_STEPS, dtype=np.int64)).tolist()
    sizes = {step: [batch.rows.num_tokens for batch in trainer.feed[step][1]] for step in places}
    total = sum(map(sum, sizes.values())) * trainer.num_steps / len(sizes)
    return round(total), max(sizes, key=lambda step: max(sizes[step]))
