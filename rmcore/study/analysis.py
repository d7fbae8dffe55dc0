"""From measured cells to arms with intervals and hypotheses with verdicts."""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rmcore.core.arrays import FloatArray
from rmcore.core.metrics import CELL_METRICS, bands
from rmcore.evaluation.uncertainty import unseen_share
from rmcore.evaluation.verdicts.estimate import Estimate, SeedSample, collapsed, estimate_over_seeds
from rmcore.evaluation.verdicts.judgement import Claim, Judgement, judge
from rmcore.reporting.experiment_schema import HypothesisResult
from rmcore.reporting.schema import Metric
from rmcore.study.cells import ANSWER_METRICS, SHARES, Measured

Cells = Mapping[tuple[str, int], Measured]
"""Measured cells by arm and seed; a failed cell is absent."""
ACCURACY = "eval/test_pairwise_accuracy"
"""By which a training that collapsed is found, whatever is claimed."""
LARGEST_LOG_RATIO = math.log(sys.float_info.max)


def arm_metrics(cells: Cells, arm: str, seeds: Sequence[int], metrics: Sequence[str]) -> dict[str, Metric]:
    """Mean over seeds of every metric of one arm, with its interval; `num` counts the seeds."""
    return {metric: _metric(_level(cells, arm, seeds, metric), len(seeds)) for metric in metrics}


def arm_bands(metrics: Mapping[str, Metric]) -> dict[str, str]:
    """Bands of an arm's means."""
    return bands({name: entry["value"] for name, entry in metrics.items()})


def judge_hypotheses(
    hypotheses: Sequence[Mapping[str, Any]], cells: Cells, seeds: Sequence[int], *, control: str
) -> list[HypothesisResult]:
    """The verdict of each hypothesis, all of them sharing one error rate.

    Args:
        hypotheses: as declared: name, claim, metric, comparison, arm, versus, direction, threshold.
        cells: what was measured.
        seeds: the declared seeds, in order.
        control: what an arm is compared with where `versus` is None.
    """
    resolved = [
        {**item, "versus": None if item["comparison"] == "level" else item["versus"] or control} for item in hypotheses
    ]
    judged = {item["name"]: (_claim(item), _estimate(item, cells, seeds)) for item in resolved}
    judgements = judge(judged)
    return [_result(item, judged[item["name"]][1], judgements[item["name"]]) for item in resolved]


def _failed(item: Mapping[str, Any], cells: Cells, seeds: Sequence[int]) -> str | None:
    """That seeds failed which a claim needs; None where none did."""
    arms = [arm for arm in (item["arm"], item["versus"]) if arm is not None]
    failed = sum(any((arm, seed) not in cells for arm in arms) for seed in seeds)
    return f"{failed} of {len(seeds)} declared seeds failed" if failed else None


def _result(item: Mapping[str, Any], estimate: Estimate, judgement: Judgement) -> HypothesisResult:
    ends: list[float | None] = [estimate.value, estimate.ci_low, estimate.ci_high]
    if item["comparison"] == "ratio":  # estimated as its logarithm
        ends = [None if end is None else _exp(end) for end in ends]
    value, low, high = ends
    return {
        "name": item["name"],
        "claim": item["claim"],
        "metric": item["metric"],
        "comparison": item["comparison"],
        "arm": item["arm"],
        "versus": item["versus"],
        "direction": item["direction"],
        "threshold": item["threshold"],
        "value": None if value is None or math.isnan(value) else value,
        "ci_low": low,
        "ci_high": high,
        "num_seeds": estimate.num_seeds,
        "num_prompts": None if estimate.num_prompts is None else round(estimate.num_prompts),
        "p": judgement.p,
        "p_holm": judgement.p_holm,
        "smallest_detectable": _detectable(item, judgement.smallest_detectable),
        "verdict": judgement.verdict,
        "reason": judgement.reason,
        "method": estimate.method,
        "condition": estimate.condition if estimate.spread else None,
    }


def _claim(item: Mapping[str, Any]) -> Claim:
    ratio = item["comparison"] == "ratio"  # within 1.1 is between 1 / 1.1 and 1.1
    threshold = math.log(item["threshold"]) if ratio else item["threshold"]
    return Claim(item["name"], item["direction"], threshold)


def _detectable(item: Mapping[str, Any], distance: float | None) -> float | None:
    """In units of the metric; of a ratio, the distance of the ratio from its threshold on the claimed side."""
    if distance is None or item["comparison"] != "ratio":
        return distance
    ratio = _exp(-distance if item["direction"] == "below" else distance)
    return None if ratio is None else abs(item["threshold"] * (ratio - 1))


def _exp(log_ratio: float) -> float | None:
    """The ratio; None where it is beyond all bounds, as the end of an interval over two seeds may be."""
    return None if log_ratio > LARGEST_LOG_RATIO else math.exp(log_ratio)


def _estimate(item: Mapping[str, Any], cells: Cells, seeds: Sequence[int]) -> Estimate:
    if failed := _failed(item, cells, seeds):
        # Who survived may have survived because of what is asked: no verdict rests on the survivors.
        return _missing(failed)
    if item["comparison"] == "level":
        return _level(cells, item["arm"], seeds, item["metric"])
    both = [(cells[item["arm"], seed], cells[item["versus"], seed]) for seed in seeds]
    combined = [_combine(arm, versus, item["metric"], item["comparison"]) for arm, versus in both]
    return _over_seeds(combined, both, len(seeds), item["metric"], item["comparison"])


def _level(cells: Cells, arm: str, seeds: Sequence[int], metric: str) -> Estimate:
    finished = [cells[arm, seed] for seed in seeds if (arm, seed) in cells]
    estimate = _over_seeds(
        [cell.samples.get(metric) for cell in finished], [(cell,) for cell in finished], len(seeds), metric, "level"
    )
    return _within_unit(estimate) if metric in SHARES else estimate


def _within_unit(estimate: Estimate) -> Estimate:
    """The estimate of a share, without what is outside of [0, 1]: the share itself cannot.

    A t interval knows no bounds, and the mean of debiased ECEs may come out slightly negative. P values and verdicts
    are those of the interval before.
    """
    ends = {name: getattr(estimate, name) for name in ("value", "ci_low", "ci_high")}
    return replace(estimate, **{name: min(max(end, 0.0), 1.0) for name, end in ends.items() if end is not None})


def _combine(arm: Measured, versus: Measured, metric: str, comparison: str) -> SeedSample | None:
    """Difference or log ratio of one seed; None where either side has no value, or a ratio is undefined."""
    ours, theirs = arm.samples.get(metric), versus.samples.get(metric)
    if ours is None or theirs is None:
        return None
    if comparison == "difference":
        return SeedSample(ours.value - theirs.value, *_both(np.subtract, ours, theirs))
    if ours.value <= 0 or theirs.value <= 0:
        return None
    return SeedSample(math.log(ours.value / theirs.value), *_both(_log_ratio, ours, theirs))


def _both(operation: Any, ours: SeedSample, theirs: SeedSample) -> tuple[FloatArray | None, float | None]:
    """Replicates of both together and the prompts that carry both."""
    if ours.replicates is None or theirs.replicates is None:
        return None, None
    return operation(ours.replicates, theirs.replicates), _carrying([ours, theirs])


def _carrying(samples: Sequence[SeedSample]) -> float:
    """The number of prompts that carry each of some samples with replicates."""
    return min(sample.num_prompts for sample in samples if sample.num_prompts is not None)


def _log_ratio(ours: FloatArray, theirs: FloatArray) -> FloatArray:
    defined = (ours > 0) & (theirs > 0)
    return np.log(np.divide(ours, theirs, out=np.full_like(ours, np.nan), where=defined))


def _over_seeds(
    samples: Sequence[SeedSample | None],
    cells: Sequence[tuple[Measured, ...]],
    num_declared: int,
    metric: str,
    comparison: str,
) -> Estimate:
    """Estimate from one sample a seed and the cells, one or two, that each is made of."""
    named = CELL_METRICS[metric].cell_label or CELL_METRICS[metric].label
    what = f"{named} as a ratio of positive numbers" if comparison == "ratio" else named
    if metric in ANSWER_METRICS and len({cell.answers for of_seed in cells for cell in of_seed}) > 1:
        # Neither the same prompts, nor others: no interval is for prompts of which some recur.
        return _missing(
            "the cells choose among different judged answers: other prompts of the file are in their training pairs. "
            "Take these out of it, or name held-out pairs of your own (data.eval_source)"
        )
    defined = [sample for sample in samples if sample is not None]
    if not defined:
        return _missing(f"no seed has a value of {what}" if cells else f"no cell finished that {what} needs")
    if len(defined) < len(samples):
        # A mean over the seeds that reached a target, say, would be of the lucky ones.
        return _missing(f"{what} has a value in only {len(defined)} of {len(samples)} seeds")
    resampled = [sample.replicates is not None for sample in defined]
    if any(resampled) and not all(resampled):
        # A seed with one test prompt has none, so the prompts differ by seed, and the spread over seeds holds both.
        defined = [SeedSample(sample.value, None) for sample in defined]
    estimate = estimate_over_seeds(
        defined,
        num_prompts=_carrying(defined) if all(resampled) else None,
        prompts_shared=len({tuple(cell.prompts_of(metric) for cell in of_seed) for of_seed in cells}) == 1,
    )
    condition, said = _collapses(cells)
    estimate = replace(estimate, method=" ".join([estimate.method, *said]), condition=condition)
    if len(defined) == num_declared:
        return estimate
    failed = f"{num_declared - len(defined)} of {num_declared} declared seeds failed and are not in it."
    return replace(estimate, method=f"{estimate.method} {failed}")


def _collapses(cells: Sequence[tuple[Measured, ...]]) -> tuple[str | None, list[str]]:
    """Say what the interval holds under, of trainings that collapse, and which seeds did; all of them are in it."""
    condition, said = None, []
    for arm in dict.fromkeys(cell.arm for of_seed in cells for cell in of_seed):
        trained = [cell for of_seed in cells for cell in of_seed if cell.arm == arm and ACCURACY in cell.samples]
        samples = [cell.samples[ACCURACY] for cell in trained]
        values = [sample.value for sample in samples]
        errors = [0.0 if sample.replicates is None else float(np.nanstd(sample.replicates)) for sample in samples]
        for position in collapsed(values, errors):
            condition = "if trainings collapse as often as here"
            said.append(
                f"Seed {trained[position].seed} of {arm} collapsed (accuracy {100 * values[position]:.1f} %, the "
                f"median of its seeds {100 * float(np.median(values)):.1f} %) and is in it: the interval assumes that "
                "trainings collapse about as often as here, which so few seeds hardly show."
            )
    num_seeds = len(cells)
    if num_seeds > 1 and not said and all(ACCURACY in cell.samples for of_seed in cells for cell in of_seed):
        condition = "if no training collapses"
        said.append(
            "It assumes that trainings do not collapse: none of these did, and "
            f"up to {100 * unseen_share(num_seeds):.0f} % may."
        )
    return condition, said


def _missing(reason: str) -> Estimate:
    return Estimate(math.nan, None, None, 0, None, "No estimate.", reason, None)


def _metric(estimate: Estimate, num_declared: int) -> Metric:
    defined = not math.isnan(estimate.value)
    return {
        "value": estimate.value if defined else None,
        "ci_low": estimate.ci_low,
        "ci_high": estimate.ci_high,
        "num": estimate.num_seeds,
        "reason": estimate.reason if estimate.num_seeds == num_declared else estimate.reason or estimate.method,
    }
