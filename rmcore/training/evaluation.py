"""Measurements of held-out pairs during a training: their rewards, and what callbacks add to `eval/…`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from rmcore.data.rendering import TokenizedPair
from rmcore.models.batching import distinct_sides
from rmcore.models.precision import Precision
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.training.ranks import ALONE, Ranks
from rmcore.training.sharding import reshard

SCORED_TOGETHER = 16384
"""Pairs that are in memory, and sorted by length, at a time. Equal sides in different groups may differ by rounding."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation inside the training loop."""

    step: int
    rm: BradleyTerryRM
    """The model under training; a callback leaves weights, gradients, modes and random state as they are."""
    pairs: Sequence[TokenizedPair]
    """The validation pairs."""
    rewards: np.ndarray
    """(P, 2) float32 rewards of those pairs, chosen first."""


class Callback(Protocol):
    """Called after each evaluation; its numbers are logged at that step next to `eval/…`."""

    def __call__(self, evaluation: Evaluation) -> Mapping[str, float]:
        """Return metrics by name, each name with exactly one slash."""


def reward_distribution(rewards: np.ndarray) -> dict[str, dict]:
    """Describe (P, 2) rewards by side: mean, standard deviation, percentiles and a 20-bin histogram, in logits."""
    described = {}
    for column, side in enumerate(("chosen", "rejected")):
        values = rewards[:, column].astype(np.float64)
        counts, edges = np.histogram(values, bins=20)
        described[side] = {
            "num": len(values),
            "mean": float(values.mean()),
            "std": float(values.std()),
            "percentiles": {str(q): float(np.percentile(values, q)) for q in (1, 5, 25, 50, 75, 95, 99)},
            "histogram": {"counts": counts.tolist(), "edges": [float(edge) for edge in edges]},
        }
    return described


def score_tokenized(
    rm: BradleyTerryRM,
    pairs: Sequence[TokenizedPair],
    *,
    token_budget: int,
    precision: Precision = "fp32",
    ranks: Ranks = ALONE,
) -> np.ndarray:
    """Return the rewards of P tokenized pairs: (P, 2) float32, chosen first.

    On several ranks each computes a share, and all receive the whole result.
    """
    groups = range(0, len(pairs), SCORED_TOGETHER)
    scored = [_score_group(rm, pairs[at : at + SCORED_TOGETHER], token_budget, precision, ranks) for at in groups]
    return np.concatenate([np.zeros((0, 2), dtype=np.float32), *scored])


def _score_group(
    rm: BradleyTerryRM, pairs: Sequence[TokenizedPair], token_budget: int, precision: Precision, ranks: Ranks
) -> np.ndarray:
    sides = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
    if ranks.world == 1:
        return rm.score_sides(sides, token_budget=token_budget, precision=precision).reshape(-1, 2)
    sides, which = distinct_sides(sides)
    chunks = rm.scoring_chunks(sides, token_budget=token_budget, precision=precision)
    rewards = torch.zeros(len(sides), dtype=torch.float64, device=rm.device)  # (S,), of S distinct sides
    was_training = rm.model.training
    rm.model.eval()
    for start in range(0, len(chunks), ranks.world):
        mine = start + ranks.rank
        # All ranks gather sharded weights together, so a rank without a chunk of its own computes the last one again.
        chunk = chunks[min(mine, len(chunks) - 1)]
        scored = rm.score_chunk(sides, chunk, precision=precision)
        if mine < len(chunks):
            rewards[[index for group in chunk for index in group]] = scored.double()
    rm.model.train(was_training)
    reshard(rm.model)
    return ranks.sum(rewards).cpu().numpy().astype(np.float32)[which].reshape(-1, 2)
