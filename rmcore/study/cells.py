"""Measurements of one cell of an experiment, read from its artifacts.

Numbers over held-out pairs come with bootstrap replicates over prompts. The weights of resample b are a function of the
prompts alone, so arms and seeds that share their test prompts are resampled together: differences are paired.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from rmcore.core.arrays import FloatArray, IntArray
from rmcore.core.files import read_json_lines
from rmcore.core.manifests import make_key
from rmcore.core.metrics import CELL_METRICS, METRICS
from rmcore.core.tracking import METRICS_FILE
from rmcore.evaluation.calibration import BinnedCalibration
from rmcore.evaluation.diagnosis import Diagnosis, GateCheck, diagnose, validation_gate
from rmcore.evaluation.ranking import PairMean, mean_statistic, pair_means, prompt_sizes
from rmcore.evaluation.rewards import RewardTable
from rmcore.evaluation.uncertainty import cluster_bootstrap, effective_prompts, heaviest_tail
from rmcore.evaluation.verdicts.estimate import SeedSample
from rmcore.readiness.judged_answers import stored_judged_answers
from rmcore.readiness.logged_answers import MIN_PROMPTS
from rmcore.readiness.rank import gains, in_deviations, win_rates

NUM_RESAMPLES = 1000
NUM_BINS = 10
VALIDATION_ACCURACY = "eval/pairwise_accuracy"
GAP = METRICS["train_test_gap"].cell_name
TEST_METRICS = {name: spec.name for name, spec in CELL_METRICS.items() if "/test_" in name and spec.stage == "evaluate"}
"""Metrics of the test pairs, by the name under which `rmcore.evaluation` computes them."""
ANSWER_METRICS = {name: int(name.rpartition("_")[2]) for name in CELL_METRICS if name.startswith("eval/answers_")}
"""Metrics of judged answers, with the number that the best is chosen from."""
SHARES = frozenset(name for name, spec in CELL_METRICS.items() if spec.within_unit)
"""Metrics whose true value cannot lie outside of [0, 1]; a gap can."""
BYTES_PER_WEIGHT = 4
"""Weights stay float32, also under bf16 autocast."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One arm under one seed."""

    arm: str
    seed: int
    samples: Mapping[str, SeedSample]
    """By metric; a metric without a value is absent."""
    prompts: str = ""
    """Digest of the test prompts: equal where cells were tested on the same ones."""
    answers: str = ""
    """Digest of the judged answers that were chosen among; empty where no metric is of them."""
    history: Sequence[Mapping[str, Any]] = ()
    """Rows of `metrics.jsonl`."""
    gate: Sequence[GateCheck] = ()
    diagnoses: Sequence[Diagnosis] = field(default=())

    def value(self, metric: str) -> float | None:
        """The cell's number as it is shown, None where it has none.

        A debiased calibration error may be estimated below 0; `samples` keeps that, so that means over seeds stay
        honest.
        """
        sample = self.samples.get(metric)
        if sample is None or metric not in SHARES:
            return None if sample is None else sample.value
        return min(max(sample.value, 0.0), 1.0)

    def prompts_of(self, metric: str) -> str:
        """Digest of the prompts that a metric is measured on."""
        return self.answers if metric in ANSWER_METRICS else self.prompts


def read_cell(
    arm: str, seed: int, folders: Mapping[str, Path], metrics: Sequence[str], *, target_accuracy: float | None = None
) -> Measured:
    """Read the metrics of one finished cell.

    Args:
        arm: its arm.
        seed: its seed.
        folders: the artifact of each stage that it ran.
        metrics: names to read.
        target_accuracy: validation accuracy that steps and seconds to the target are measured to.
    """
    history = read_json_lines(folders["train"] / METRICS_FILE)
    samples = dict(_summaries(folders, metrics)) | dict(_training(folders["train"], history, target_accuracy))
    if "evaluate" not in folders:
        return Measured(arm, seed, _wanted(samples, metrics), history=history, diagnoses=diagnose(history))
    rewards = pd.read_parquet(folders["evaluate"] / "rewards.parquet")
    test = rewards[rewards["split"] == "test"]
    card = json.loads((folders["evaluate"] / "metrics.json").read_text())
    table, prompts = RewardTable.from_frame(test, beta=card.get("beta", 1.0)), prompts_digest(test)
    samples |= _over_prompts(table, prompts)
    train = rewards[rewards["split"] == "train"]
    gap = _gap(samples.get("eval/test_pairwise_accuracy"), train) if GAP in metrics and len(train) else None
    if gap is not None:
        samples[GAP] = gap
    answers = ""
    if any(name in ANSWER_METRICS for name in metrics):
        of_answers, answers = _of_answers(folders["evaluate"], metrics)
        samples |= of_answers
    kept = _wanted(samples, metrics)
    gate = validation_gate(card["metrics"]["test"], card["metrics"]["train"]["pairwise_accuracy"]["value"])
    return Measured(arm, seed, kept, prompts, answers, history, gate, diagnose(history))


def _wanted(samples: Mapping[str, SeedSample], metrics: Sequence[str]) -> dict[str, SeedSample]:
    return {name: one for name, one in samples.items() if name in metrics and math.isfinite(one.value)}


def prompts_digest(rewards: pd.DataFrame) -> str:
    """Digest of which prompts a reward table is about, whatever their order."""
    return hashlib.sha256("\n".join(sorted(set(rewards["prompt_id"].astype(str)))).encode()).hexdigest()


def _over_prompts(table: RewardTable, prompts: str) -> dict[str, SeedSample]:
    """Every metric of `TEST_METRICS` with its replicates; undefined ones are left out."""
    means = [mean for mean in pair_means(table) if mean.name in TEST_METRICS.values()]
    binned = BinnedCalibration(table.log_odds, table.prompt, table.num_prompts, NUM_BINS)
    samples = _bootstrap(table, means, prompts, binned)
    return {metric: samples[name] for metric, name in TEST_METRICS.items() if name in samples}


def _of_answers(folder: Path, metrics: Sequence[str]) -> tuple[dict[str, SeedSample], str]:
    """Metrics of the judged answers, of fewer than `MIN_PROMPTS` prompts none; the digest of answers and judgements."""
    answers, rewards = stored_judged_answers(folder)
    digest = make_key(answers.table[["prompt_id", "response", "strength"]].to_dict("list"))
    pools, judged = answers.pools(rewards), in_deviations(answers.pools(answers.table["strength"].to_numpy()))
    samples = {}
    for name, n in ((name, ANSWER_METRICS[name]) for name in metrics if name in ANSWER_METRICS):
        # An opponent each, as for the win rate.
        large = [(rewarded, strengths) for rewarded, strengths in zip(pools, judged, strict=True) if len(rewarded) > n]
        if len(large) < MIN_PROMPTS:
            continue
        measure = win_rates if "win_rate" in name else gains
        values, _ = measure([pool for pool, _ in large], [strengths for _, strengths in large], n)

        def mean(weights: FloatArray, values: FloatArray = values) -> dict[str, FloatArray]:
            return {"mean": weights @ values / weights.sum(axis=-1)}

        # Prompts are drawn alike in every cell that has the same answers.
        drawn = cluster_bootstrap(mean, len(large), num_resamples=NUM_RESAMPLES, seed=int(digest[:15], 16))
        samples[name] = SeedSample(drawn.point["mean"], drawn.replicates.get("mean"), float(len(large)))
    return samples, digest


def _bootstrap(
    table: RewardTable,
    means: Sequence[PairMean],
    prompts: str,
    more: Callable[[FloatArray], dict[str, FloatArray]] | None = None,
) -> dict[str, SeedSample]:
    def compute(weights: FloatArray) -> dict[str, FloatArray]:
        values = {mean.name: mean_statistic(mean, table.prompt, weights) for mean in means}
        return values | (more(weights) if more else {})

    resampled = cluster_bootstrap(
        compute,
        table.num_prompts,
        num_resamples=NUM_RESAMPLES,
        seed=int(prompts[:15], 16),  # the same prompts are drawn alike in every cell, others independently
        row_size=table.num_pairs,
    )
    carrying = {mean.name: _carrying(table.prompt[mean.mask]) for mean in means if mean.mask.any()}
    of_all = _carrying(table.prompt)
    return {
        name: SeedSample(value, resampled.replicates.get(name), carrying.get(name, of_all))
        for name, value in resampled.point.items()
        if math.isfinite(value)
    }


def _carrying(prompt: IntArray) -> float:
    """How many prompts of equal size know a mean over (P,) pairs as well; 0 where its variance is not shown to exist.

    Differences between arms have no bounds that unseen prompts could be given, as those of a report's shares have.
    """
    sizes = prompt_sizes(prompt)
    return effective_prompts(sizes) if heaviest_tail(sizes) < 1 / 2 else 0.0


def _gap(test: SeedSample | None, train: pd.DataFrame) -> SeedSample | None:
    """Train accuracy minus test accuracy; the two have different prompts, so their errors are independent.

    None where either side has no accuracy.
    """
    table = RewardTable.from_frame(train)
    [accuracy] = [mean for mean in pair_means(table) if mean.name == "pairwise_accuracy"]
    trained = _bootstrap(table, [accuracy], prompts_digest(train)).get("pairwise_accuracy")
    if trained is None or test is None:
        return None
    if trained.replicates is None or test.replicates is None:
        return SeedSample(trained.value - test.value, None)
    fewest = min(one.num_prompts for one in (trained, test) if one.num_prompts is not None)
    return SeedSample(trained.value - test.value, trained.replicates - test.replicates, fewest)


def _summaries(folders: Mapping[str, Path], metrics: Sequence[str]) -> Mapping[str, SeedSample]:
    """Metrics stored in a stage's `summary.json` as they are."""
    samples = {}
    for name in metrics:
        stage = CELL_METRICS[name].stage
        if stage and stage != "evaluate" and stage in folders:
            value = json.loads((folders[stage] / "summary.json").read_text())["metrics"].get(name)
            if value is not None:
                samples[name] = SeedSample(float(value), None)
    return samples


def _training(
    folder: Path, history: Sequence[Mapping[str, Any]], target_accuracy: float | None
) -> Mapping[str, SeedSample]:
    record = json.loads((folder / "training.json").read_text())
    values = {
        "train/num_steps": record["num_steps"],
        "train/stop_share": record["num_steps"] / record["planned_steps"],
        "train/best_step": record["best_step"],
        "train/trained_share": record["num_trained_parameters"] / record["num_parameters"],
    }
    if record["peak_training_bytes"] is not None:
        weights = BYTES_PER_WEIGHT * record["num_parameters"] / record["num_processes"]
        values["cost/peak_total_mib"] = (record["peak_training_bytes"] + weights) / 2**20
    reached = None if target_accuracy is None else first_reaching(history, target_accuracy)
    if reached is not None:
        values["train/steps_to_target"], values["cost/seconds_to_target"] = reached
    return {name: SeedSample(float(value), None) for name, value in values.items()}


def first_reaching(history: Sequence[Mapping[str, Any]], target: float) -> tuple[int, float] | None:
    """Step and training seconds of the first evaluation whose accuracy is at least `target`; None if there is none."""
    for row in sorted(history, key=lambda row: row["step"]):
        accuracy = row["metrics"].get(VALIDATION_ACCURACY)
        if accuracy is not None and accuracy >= target:
            return row["step"], row["metrics"]["cost/train_seconds"]
    return None
