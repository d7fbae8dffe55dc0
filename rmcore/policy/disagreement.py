"""How much members of an ensemble disagree on the sample that best-of-n picks."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rmcore.core.arrays import FloatArray
from rmcore.ensembles.agreement import disagreement
from rmcore.evaluation.uncertainty import cluster_bootstrap, metric_value
from rmcore.policy.sampling.best_of_n import best_of_n_weights, pooled_deviation


def disagreement_along_n(
    rewards: Sequence[FloatArray], members: Sequence[FloatArray], *, num_resamples: int, seed: int
) -> list[dict[str, Any]]:
    """Expected disagreement of the members on the sample that best-of-n picks, for n = 1, 2, 4, ...

    In the members' standard deviations within prompts. Where it rises with n, the choice goes to samples that the
    members are less sure of than of the policy's usual ones.
    """
    smallest = min(len(pool) for pool in rewards)
    counts = [2**power for power in range(smallest.bit_length()) if 2**power <= smallest]
    spread = [disagreement(pool) for pool in in_own_deviations(members)]
    by_prompt = np.array(
        [[best_of_n_weights(pool, n) @ one for n in counts] for pool, one in zip(rewards, spread, strict=True)]
    )

    def compute(weights: FloatArray) -> dict[str, FloatArray]:
        means = weights @ by_prompt / weights.sum(axis=1, keepdims=True)
        return {str(n): means[:, index] for index, n in enumerate(counts)}

    drawn = cluster_bootstrap(compute, len(rewards), num_resamples=num_resamples, seed=seed)
    samples = sum(map(len, rewards))
    return [
        {"n": n}
        | metric_value(
            drawn.point[str(n)], drawn.replicates.get(str(n)), num_prompts=len(rewards), num_pairs=samples
        ).to_dict()
        for n in counts
    ]


def in_own_deviations(members: Sequence[FloatArray]) -> list[FloatArray]:
    """Rewards (M, K) of each prompt with every member's level in the prompt removed, in its deviation within prompts.

    Bradley-Terry leaves the level of a prompt free, so members may differ in it without disagreeing.
    """
    scale = np.array([pooled_deviation([pool[m] for pool in members]) for m in range(len(members[0]))])
    return [(pool - pool.mean(axis=1, keepdims=True)) / scale[:, None] for pool in members]
