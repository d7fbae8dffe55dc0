"""Whether a score, such as the disagreement of an ensemble, tells unusual responses and wrong rankings.

As in all metrics the unit of intervals is the prompt: a resample draws prompts of both groups together.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rmcore.core.arrays import FloatArray, IntArray
from rmcore.core.errors import ConfigError, DataError
from rmcore.evaluation.ranking import PairMean, correctness, mean_statistic, ratio
from rmcore.evaluation.uncertainty import MetricValue, cluster_bootstrap, metric_value


def auroc(
    inside: npt.ArrayLike,
    outside: npt.ArrayLike,
    inside_prompts: Sequence[str],
    outside_prompts: Sequence[str],
    *,
    num_resamples: int = 1000,
    seed: int = 0,
) -> MetricValue:
    """Probability that a response from outside scores higher than one from inside, ties half, with its 95 % interval.

    0.5 is what a coin gives, 1 a perfect detector; below 0.5 the responses from outside score lower.

    Args:
        inside: (N,) scores of responses from the distribution.
        outside: (K,) scores of responses out of it.
        inside_prompts: (N,) prompt of each.
        outside_prompts: (K,) prompt of each; never counted as one of the others, whatever its id.
        num_resamples: bootstrap resamples.
        seed: of the resampling.

    Raises:
        DataError: a group is empty, lengths differ, or a score is not finite.
        ConfigError: num_resamples is below 1.
    Source:
        Mann and Whitney 1947, Annals of Mathematical Statistics 18(1).
    """
    low, low_prompt = _group(inside, inside_prompts, "inside")
    high, high_prompt = _group(outside, outside_prompts, "outside")
    num_low, num_high = int(low_prompt.max()) + 1, int(high_prompt.max()) + 1
    order = np.argsort(low, kind="stable")
    low, low_prompt = low[order], low_prompt[order]
    below, not_above = (np.searchsorted(low, high, side=side) for side in ("left", "right"))

    def compute(weights: FloatArray) -> dict[str, FloatArray]:
        low_weights, high_weights = weights[:, low_prompt], weights[:, num_low + high_prompt]
        passed = np.zeros((len(weights), len(low) + 1))
        np.cumsum(low_weights, axis=1, out=passed[:, 1:])
        wins = np.einsum("bk,bk->b", high_weights, passed[:, below] + passed[:, not_above]) / 2
        return {"auroc": ratio(wins, passed[:, -1] * high_weights.sum(axis=1))}

    found = cluster_bootstrap(
        compute, num_low + num_high, num_resamples=num_resamples, seed=seed, row_size=len(low) + len(high)
    )
    return metric_value(
        found.point["auroc"],
        found.replicates.get("auroc"),
        num_prompts=min(num_low, num_high),  # the smaller group limits what is known
        num_pairs=len(low) + len(high),
        is_share=True,
    )


def accuracies(
    margins: npt.ArrayLike,
    prompt_ids: Sequence[str],
    *,
    masks: npt.ArrayLike | None = None,
    num_resamples: int = 1000,
    seed: int = 0,
) -> list[MetricValue]:
    """Pairwise accuracy of K margins for P pairs, each with its 95 % interval over prompts; ties half.

    Args:
        margins: (K, P) chosen minus rejected, any unit.
        prompt_ids: (P,)
        masks: (K, P) which pairs count; None: all.
        num_resamples: bootstrap resamples.
        seed: of the resampling.

    Raises:
        DataError: there are no pairs, lengths differ, or a margin is not finite.
    """
    values = np.asarray(margins, dtype=np.float64)
    prompt = next(_group(row, prompt_ids, "margins")[1] for row in values)
    counted = np.ones(values.shape, dtype=bool) if masks is None else np.asarray(masks, dtype=bool)
    means = [
        PairMean(str(number), correctness(row), mask, True, "no pair counts")
        for number, (row, mask) in enumerate(zip(values, counted, strict=True))
    ]
    found = cluster_bootstrap(
        lambda weights: {mean.name: mean_statistic(mean, prompt, weights) for mean in means},
        int(prompt.max()) + 1,
        num_resamples=num_resamples,
        seed=seed,
    )
    return [
        metric_value(
            found.point[mean.name],
            found.replicates.get(mean.name),
            num_prompts=len(np.unique(prompt[mean.mask])),
            num_pairs=int(mean.mask.sum()),
            is_share=True,
        )
        if mean.mask.any()
        else MetricValue(None, None, None, 0, mean.undefined)
        for mean in means
    ]


def accuracy_by_score(
    margins: npt.ArrayLike,
    scores: npt.ArrayLike,
    prompt_ids: Sequence[str],
    *,
    num_bins: int = 10,
    num_resamples: int = 1000,
    seed: int = 0,
) -> list[tuple[float, MetricValue]]:
    """Accuracy where a score is lowest, and so on up to where it is highest: (median score, accuracy) of each bin.

    Args:
        margins: (P,) chosen minus rejected.
        scores: (P,) for example how much the members disagree on the margin.
        prompt_ids: (P,)
        num_bins: bins of equally many pairs; fewer where there are fewer pairs.
        num_resamples: bootstrap resamples.
        seed: of the resampling.

    Raises:
        ConfigError: num_bins is below 1.
        DataError: see `accuracies`.
    """
    if num_bins < 1:
        raise ConfigError(f"num_bins={num_bins}: pairs cannot be cut into so few bins; ask for at least one.")
    order = np.argsort(_group(scores, prompt_ids, "scores")[0], kind="stable")
    parts = np.array_split(order, min(num_bins, len(order)))
    masks = np.stack([np.isin(np.arange(len(order)), part) for part in parts])
    rows = np.broadcast_to(np.asarray(margins, dtype=np.float64), masks.shape)
    found = accuracies(rows, prompt_ids, masks=masks, num_resamples=num_resamples, seed=seed)
    values = np.asarray(scores, dtype=np.float64)
    return [(float(np.median(values[part])), value) for part, value in zip(parts, found, strict=True)]


def _group(scores: npt.ArrayLike, prompt_ids: Sequence[str], name: str) -> tuple[FloatArray, IntArray]:
    """Finite scores (N,) and which prompt each is of, as numbers from 0."""
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 1 or len(values) == 0 or len(values) != len(prompt_ids) or not np.isfinite(values).all():
        raise DataError(
            f"{name} of shape {values.shape} with {len(prompt_ids)} prompt ids and {int((~np.isfinite(values)).sum())} "
            "values not finite: a rank needs at least one finite number, and a prompt each. Look for a diverged model."
        )
    return values, np.unique(np.asarray(prompt_ids), return_inverse=True)[1]
