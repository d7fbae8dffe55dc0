"""Whether a conservative reward, from members that may disagree, gains more of the gold reward at the same n."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rmcore.core.arrays import FloatArray
from rmcore.ensembles.agreement import Aggregation, aggregate, disagreement
from rmcore.evaluation.uncertainty import cluster_bootstrap, metric_value
from rmcore.policy.sampling.best_of_n import best_of_n_weights, pooled_deviation

PENALTY = 0.5
"""Weight of the members' variance, as Coste et al. 2023 (arXiv:2310.02743) show for best-of-n."""
AGGREGATIONS: tuple[Aggregation, ...] = ("mean", "worst_case", "uncertainty_weighted")


def conservative_gains(
    rewards: Sequence[FloatArray],
    members: Sequence[FloatArray],
    gold: Sequence[FloatArray],
    *,
    num_resamples: int,
    seed: int,
) -> dict[str, Any]:
    """Gold gain of best-of-n with n the smallest pool, by the reward model alone and by each way to use its members.

    Args:
        rewards: (K,) of each prompt's samples by the reward model.
        members: (M, K) by the members.
        gold: (K,) by the judge.
        num_resamples: of the bootstrap over prompts.
        seed: of the bootstrap.

    Returns:
        {"n": n, "gains": {name: value with interval}, "differences": {name: gain minus that of the reward model}}, in
        standard deviations of the gold reward within prompts.
    """
    n = min(len(pool) for pool in rewards)
    scaled = in_own_deviations(members)
    choices: dict[str, Sequence[FloatArray]] = {"reward_model": rewards}
    choices |= {name: [aggregate(pool, name, PENALTY) for pool in scaled] for name in AGGREGATIONS}
    deviation = pooled_deviation(gold)
    gains = {
        name: np.array(
            [
                (best_of_n_weights(pool, n) @ judged - judged.mean()) / deviation
                for pool, judged in zip(by, gold, strict=True)
            ]
        )
        for name, by in choices.items()
    }
    quantities = gains | {f"{name} more": gains[name] - gains["reward_model"] for name in AGGREGATIONS}

    def compute(weights: FloatArray) -> dict[str, FloatArray]:
        return {name: weights @ values / weights.sum(axis=1) for name, values in quantities.items()}

    drawn = cluster_bootstrap(compute, len(gold), num_resamples=num_resamples, seed=seed)

    def value(name: str) -> dict[str, Any]:
        replicates = drawn.replicates.get(name)
        samples = sum(map(len, gold))
        return metric_value(drawn.point[name], replicates, num_prompts=len(gold), num_pairs=samples).to_dict()

    return {
        "n": n,
        "gains": {name: value(name) for name in choices},
        "differences": {name: value(f"{name} more") for name in AGGREGATIONS},
    }


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
