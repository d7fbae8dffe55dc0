"""Rewards of held-out pairs during training, on one process or several."""

from collections.abc import Sequence

import numpy as np
import torch

from rmcore.data.rendering import TokenizedPair
from rmcore.models.batching import distinct_sides
from rmcore.models.precision import Precision
from rmcore.models.reward_model import SCORING_TOKEN_BUDGET, BradleyTerryRM
from rmcore.training.ranks import ALONE, Ranks
from rmcore.training.sharding import reshard


def score_tokenized(
    rm: BradleyTerryRM,
    pairs: Sequence[TokenizedPair],
    *,
    token_budget: int = SCORING_TOKEN_BUDGET,
    precision: Precision = "fp32",
    ranks: Ranks = ALONE,
) -> np.ndarray:
    """Rewards of both sides of P tokenized pairs: (P, 2) float32, chosen first.

    On several ranks each computes a share and all get the result; they compute equally many micro-batches, because
    sharded weights are gathered by all ranks together.
    """
    sides = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
    if ranks.world == 1:
        return rm.score_sides(sides, token_budget=token_budget, precision=precision).reshape(-1, 2)
    sides, which = distinct_sides(sides)
    chunks = rm.scoring_chunks(sides, token_budget=token_budget, precision=precision)
    rewards = torch.zeros(len(sides), dtype=torch.float64, device=rm.device)
    was_training = rm.model.training
    rm.model.eval()
    for start in range(0, len(chunks), ranks.world):
        mine = start + ranks.rank
        chunk = chunks[min(mine, len(chunks) - 1)]
        scored = rm.score_chunk(sides, chunk, precision=precision)
        if mine < len(chunks):
            rewards[[index for group in chunk for index in group]] = scored.double()
    rm.model.train(was_training)
    reshard(rm.model)
    return ranks.sum(rewards).cpu().numpy().astype(np.float32)[which].reshape(-1, 2)
