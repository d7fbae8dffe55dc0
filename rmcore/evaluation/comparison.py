"""Two reward models on the same pairs: whether the difference is real.

Both models meet the same prompts, so the paired difference is far surer than the two accuracies: one bootstrap draws
the prompts for both, and the p value flips whole prompts. McNemar's test over pairs would take pairs of one prompt for
independent and be too sure.
"""

from typing import Any

import numpy as np
import pandas as pd

from rmcore.core.arrays import BoolArray, FloatArray
from rmcore.core.errors import DataError
from rmcore.evaluation.ranking import PairMean, correctness, mean_statistic, prompt_sizes
from rmcore.evaluation.rewards import RewardTable
from rmcore.evaluation.uncertainty import MetricValue, cluster_bootstrap, sign_flip_test


def paired_comparison(a: pd.DataFrame, b: pd.DataFrame, *, num_resamples: int = 1000, seed: int = 0) -> dict[str, Any]:
    """Compare the rewards of models A and B on the same pairs; rows may be in different order.

    Args:
        a: rewards of model A, columns as in `rmcore.evaluation.rewards.COLUMNS`.
        b: rewards of model B on the same pairs.
        num_resamples: bootstrap resamples over prompts.
        seed: of the resampling and the sign flips.

    Returns:
        JSON-ready: num_pairs, num_prompts; accuracy_a, accuracy_b, accuracy_difference (A - B; a tie is half
        right) and the same three with length_matched_ before, each value/ci_low/ci_high/num/reason; sign_flip_p (over
        prompts; a tie scores 0.5); only_a_right, only_b_right, both_right, neither_right (a tie is not right);
        margin_pearson, margin_spearman (null where a model's margins are all equal).

    Raises:
        DataError: the pair ids or their prompts differ (with counts), or a frame is unusable.
    """
    from scipy.stats import rankdata  # here: scipy.stats takes a second to import, and few commands need it

    first, second = _aligned(a, b)
    metrics: dict[str, Any] = {"num_pairs": first.num_pairs, "num_prompts": first.num_prompts}
    every = np.ones(first.num_pairs, dtype=bool)
    for prefix, mask in (("", every), ("length_matched_", first.length_matched)):
        compared = _accuracies(first, second, mask, num_resamples, seed)
        metrics |= {f"{prefix}{name}": value.to_dict() for name, value in compared.items()}
    score_a, score_b = (correctness(table.margin) for table in (first, second))
    by_prompt = np.bincount(first.prompt, score_a - score_b, minlength=first.num_prompts)
    right_a, right_b = first.margin > 0, second.margin > 0
    return metrics | {
        "sign_flip_p": sign_flip_test(by_prompt, seed=seed),
        "only_a_right": int((right_a & ~right_b).sum()),
        "only_b_right": int((right_b & ~right_a).sum()),
        "both_right": int((right_a & right_b).sum()),
        "neither_right": int((~right_a & ~right_b).sum()),
        "margin_pearson": _correlation(first.margin, second.margin),
        "margin_spearman": _correlation(rankdata(first.margin), rankdata(second.margin)),
    }


def on_common_pairs(a: pd.DataFrame, b: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the rows of the pairs that both tables have; of a pair that is repeated, as many as both repeat it."""
    unit = ["pair_id", "prompt_id"]
    keys = [pd.MultiIndex.from_frame(table[unit].assign(at=table.groupby(unit).cumcount())) for table in (a, b)]
    return a[keys[0].isin(keys[1])], b[keys[1].isin(keys[0])]


def _aligned(a: pd.DataFrame, b: pd.DataFrame) -> tuple[RewardTable, RewardTable]:
    """Both tables in the order of (pair_id, occurrence): repeated pairs are matched occurrence by occurrence."""
    RewardTable.from_frame(a, "A"), RewardTable.from_frame(b, "B")  # messages about columns before those about ids
    keyed = []
    for frame in (a, b):
        ids = frame["pair_id"].astype(str)
        index = pd.MultiIndex.from_arrays([ids, frame.groupby(ids, sort=False).cumcount()])
        keyed.append(frame.set_axis(index, axis=0))
    only_a, only_b = len(keyed[0].index.difference(keyed[1].index)), len(keyed[1].index.difference(keyed[0].index))
    if only_a or only_b:
        raise DataError(
            f"A has {len(a)} pairs and B has {len(b)}: {only_a} are only in A, {only_b} only in B. A paired comparison "
            "needs the same pairs. Score both models on the same file with the same limit."
        )
    frame_a = keyed[0].sort_index()
    frame_b = keyed[1].loc[frame_a.index]
    differing = int((frame_a["prompt_id"].astype(str).to_numpy() != frame_b["prompt_id"].astype(str).to_numpy()).sum())
    if differing:
        raise DataError(
            f"{differing} pairs have another prompt_id in B than in A: prompts are the unit of resampling and must "
            "agree. Score both models on the same prepared data."
        )
    return RewardTable.from_frame(frame_a, "A"), RewardTable.from_frame(frame_b, "B")


def _accuracies(
    first: RewardTable, second: RewardTable, mask: BoolArray, num_resamples: int, seed: int
) -> dict[str, MetricValue]:
    """accuracy_a, accuracy_b and accuracy_difference over the pairs of `mask`, from one set of resamples."""
    sides = [
        PairMean(name, correctness(table.margin), mask, True, "")
        for name, table in (("accuracy_a", first), ("accuracy_b", second))
    ]

    def compute(weights: FloatArray) -> dict[str, FloatArray]:
        values = {side.name: mean_statistic(side, first.prompt, weights) for side in sides}
        return values | {"accuracy_difference": values["accuracy_a"] - values["accuracy_b"]}

    resampled = cluster_bootstrap(compute, first.num_prompts, num_resamples=num_resamples, seed=seed)
    if not mask.any():
        return dict.fromkeys(resampled.point, MetricValue(None, None, None, 0, "no pair is length-matched"))
    return {
        name: resampled.value(
            name,
            num_prompts=len(np.unique(first.prompt[mask])),
            num_pairs=int(mask.sum()),
            is_share=name != "accuracy_difference",
            is_difference=name == "accuracy_difference",
            sizes=prompt_sizes(first.prompt[mask]),
        )
        for name in resampled.point
    }


def _correlation(x: FloatArray, y: FloatArray) -> float | None:
    """Pearson correlation, None where one side does not vary."""
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    return float(np.corrcoef(x, y)[0, 1])
