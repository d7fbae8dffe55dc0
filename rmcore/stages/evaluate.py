"""Stage evaluate: how good the rewards are on pairs the model never saw.

Scores the test split (reported), the validation split (fits the temperature), the synthetic benchmark's
out-of-distribution split, and some training pairs (for the gap); and the judged answers of `evaluate.answers`. Writes
`rewards.parquet`, `metrics.json`, `tables/`, figures and `summary.json`; `answers.parquet` and `answers.json` where
there are answers.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import torch

from rmcore.config.evaluate import EvaluateConfig
from rmcore.core.files import write_json
from rmcore.core.printing import for_spreadsheets
from rmcore.core.progress import Report, prefixed, silent
from rmcore.core.tracking import Tracker
from rmcore.data.observation import Kind, kind_of
from rmcore.data.pair import PreferencePair
from rmcore.data.survey import Scale
from rmcore.data.table import read_pairs
from rmcore.data.tokenized_observations import (
    Observations,
    TokenizedObservation,
    open_observations_tokenized,
    write_observations_tokenized,
)
from rmcore.ensembles.score import score_pairs_table, with_texts
from rmcore.evaluation.calibration import reliability_bins
from rmcore.evaluation.ranking import PairMean, correctness, means_over_prompts
from rmcore.evaluation.report_card import evaluate_pairs, most_confident_mistakes
from rmcore.evaluation.uncertainty import MetricValue, effective_prompts
from rmcore.models.attributes import load_attributes
from rmcore.models.device import scoring_dtype
from rmcore.models.observation_batching import label
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.readiness.judged_answers import (
    read_judged_answers,
    report_left_out_answers,
    require_readable,
    rewards_of,
    write_judged_answers,
)
from rmcore.reporting.figures.pairs import (
    accuracy_in_context_figure,
    reliability_diagram_figure,
    reward_by_length_figure,
)
from rmcore.reporting.figures.style import save
from rmcore.stages.measurement import load_trained
from rmcore.stages.prepared import CEILING_FILE, observations_of, prompts_of_training
from rmcore.stages.stages import EvaluateStage
from rmcore.training.likelihood import Likelihood, marginal_log_likelihood, ranking_log_likelihood
from rmcore.training.material import read_likelihood

TRAIN_METRICS = ("pairwise_accuracy", "loss", "mean_margin")
CALIBRATION_METRICS = ("ece", "brier", "temperature")
NUM_MISTAKES = 50
"""Most confident mistakes that are kept, with their texts."""


def run(settings: EvaluateStage, out: Path, tracker: Tracker, report: Report) -> None:
    """Score the splits with the best checkpoint and measure."""
    prepared = settings.prepared.folder
    dtype = settings.evaluate.dtype or scoring_dtype(settings.device)
    rm = load_trained(settings, dtype)
    splits = {
        name: read_pairs(prepared / f"{name}.parquet", settings.evaluate.train_pairs if name == "train" else None)
        for name in ("test", "validation", "ood", "train")
        if (prepared / f"{name}.parquet").is_file()
    }
    tables, cut = {}, {}
    for name, pairs in splits.items():
        if pairs:
            tables[name], cut[name] = score_pairs_table(rm, pairs, report=prefixed(report, name))
    pd.concat([table.assign(split=name) for name, table in tables.items()]).to_parquet(out / "rewards.parquet")
    metrics = {
        name: measure(
            table,
            settings.evaluate,
            seed=settings.seed,
            beta=rm.beta,
            calibration=tables.get("validation"),
            report=prefixed(report, name),
        )
        for name, table in tables.items()
        if name in ("test", "ood")
    }
    if "train" in tables:
        of_train = prefixed(report, "train")
        train_card = measure(tables["train"], settings.evaluate, seed=settings.seed, beta=rm.beta, report=of_train)
        metrics["train"] = {name: train_card[name] for name in TRAIN_METRICS}
    else:  # of graded answers, one a prompt, no pair can be made
        metrics["train"] = {name: MetricValue(None, None, None, 0, "no pairs to train on") for name in TRAIN_METRICS}
    ceilings = json.loads((prepared / CEILING_FILE).read_text()) if (prepared / CEILING_FILE).is_file() else {}
    record: dict[str, Any] = {
        "beta": rm.beta,
        "metrics": {name: {key: value.to_dict() for key, value in card.items()} for name, card in metrics.items()},
        "context": _context(metrics, ceilings),
        "truncation": cut,
    }
    if settings.evaluate.answers is not None:
        answers = read_judged_answers(Path(settings.evaluate.answers), trained_on=prompts_of_training(prepared))
        report_left_out_answers(answers)
        require_readable(rm.renderer, answers, settings.evaluate.answers)
        rewards = rewards_of(rm, answers, report=prefixed(report, "judged answers"))
        write_judged_answers(out, answers, rewards)
    judged = _judgements(rm, settings, splits["test"], report)
    record["observations"] = None if judged is None else asdict(judged)
    write_json(out / "metrics.json", record)
    tracked = tracked_metrics(record["metrics"])
    if judged is not None:
        of_judgements = record["observations"]["metrics"]
        tracked |= tracked_metrics({"test": {name.replace(" ", "_"): one for name, one in of_judgements.items()}})
    write_json(out / "summary.json", {"metrics": tracked})
    bins = reliability_bins(tables["test"], beta=rm.beta)
    mistakes = with_texts(most_confident_mistakes(tables["test"], beta=rm.beta).head(NUM_MISTAKES), splits["test"])
    _write_tables(out / "tables", metrics["test"], bins, mistakes)
    draw(out / "figures", tables["test"], metrics["test"], bins, record["context"])


def _judgements(
    rm: BradleyTerryRM, settings: EvaluateStage, pairs: Sequence[PreferencePair], report: Report
) -> "MeasuredJudgements | None":
    """Measure the held-out judgements of any kind, where the model was trained on such."""
    checkpoint = settings.trained.folder / "best"
    likelihood, said = read_likelihood(checkpoint), observations_of(settings.prepared.folder, "test")
    if likelihood is None or said is None:
        return None
    return measure_observations(
        rm, checkpoint, likelihood, said, pairs, settings.evaluate, seed=settings.seed, report=report
    )


def measure(
    table: pd.DataFrame,
    config: EvaluateConfig,
    *,
    seed: int,
    beta: float,
    calibration: pd.DataFrame | None = None,
    report: Report = silent,
) -> dict[str, MetricValue]:
    """Every metric of the reward table of a model with this `beta`, under the settings of `config`."""
    warn_of_unequal(table["prompt_id"])
    return evaluate_pairs(
        table,
        calibration=calibration,
        num_resamples=config.num_resamples,
        thresholds=config.thresholds,
        seed=seed,
        beta=beta,
        report=report,
    )


def warn_of_unequal(prompts: pd.Series) -> None:
    """Say on stderr where a few prompts have so many of the pairs that fewer than half of the prompts count."""
    sizes = prompts.value_counts().to_numpy(dtype=np.float64)
    effective = effective_prompts(sizes)
    if len(sizes) > 1 and effective < len(sizes) / 2:
        print(
            f"warning: the pairs of {len(sizes)} prompts say as much as those of {effective:.1f} prompts of equal size "
            f"(the largest has {int(sizes.max())} of {int(sizes.sum())}), so intervals are wide or not given. Read the "
            "accuracy in which each prompt counts alike, or limit the pairs of a prompt.",
            file=sys.stderr,
        )


def tracked_metrics(metrics: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Name the metrics as trackers show them, for example `eval/test_pairwise_accuracy` and `calib/test_brier`.

    The split is part of the name because `eval/pairwise_accuracy` is the curve of the validation pairs in training.
    """
    named = {}
    for split, card in metrics.items():
        for name, value in card.items():
            group = "calib" if name.startswith(CALIBRATION_METRICS) else "eval"
            label = name.replace("@", "_at_").replace("[", ".").replace("]", "")
            named[f"{group}/{split}_{label}"] = value
    return named


def draw(
    folder: Path,
    table: pd.DataFrame,
    card: Mapping[str, MetricValue],
    bins: pd.DataFrame,
    context: list[dict[str, Any]],
) -> None:
    """Draw the evaluation figures into `folder`; `bins` are the table's `reliability_bins`."""
    drawn = {
        "reliability_diagram": reliability_diagram_figure(bins, card["ece_debiased"].to_dict()),
        "reward_by_length": reward_by_length_figure(table),
        "accuracy_in_context": accuracy_in_context_figure(context),
    }
    for name, figure in drawn.items():
        save(figure, folder / f"{name}.png")


def _context(metrics: Mapping[str, Mapping[str, MetricValue]], ceilings: Mapping[str, float]) -> list[dict[str, Any]]:
    """Rows of the accuracy figure: this model between what needs no model and what no model can beat."""

    def row(name: str, kind: str, value: MetricValue) -> dict[str, Any]:
        return {"name": name, "kind": kind, "value": value.value, "ci_low": value.ci_low, "ci_high": value.ci_high}

    def yardstick(name: str, value: float) -> dict[str, Any]:
        return {"name": name, "kind": "reference", "value": value, "ci_low": None, "ci_high": None}

    test = metrics["test"]
    rows = [
        row("this model", "model", test["pairwise_accuracy"]),
        yardstick("guessing", 0.5),
        row("the longer one wins", "reference", test["longer_wins_accuracy"]),
    ]
    if "test" in ceilings:
        rows.append(yardstick("label ceiling", ceilings["test"]))
    rows.append(row("length-matched", "subset", test["length_matched_accuracy"]))
    for name, value in test.items():
        if name.startswith("pairwise_accuracy["):
            rows.append(row(name.removeprefix("pairwise_accuracy[").removesuffix("]"), "subset", value))
    if "ood" in metrics:
        rows.append(row("out of distribution", "ood", metrics["ood"]["pairwise_accuracy"]))
    return rows


def _write_tables(folder: Path, card: Mapping[str, MetricValue], bins: pd.DataFrame, mistakes: pd.DataFrame) -> None:
    folder.mkdir()
    pd.DataFrame([{"metric": name} | value.to_dict() for name, value in card.items()]).to_csv(
        folder / "metrics.csv", index=False
    )
    mistakes.map(for_spreadsheets).to_csv(folder / "most_confident_mistakes.csv", index=False)
    bins.to_csv(folder / "reliability_bins.csv", index=False)


SCORED_TOGETHER = 512
"""Observations whose answers are scored, and held in memory, at a time."""


@dataclass(frozen=True)
class MeasuredJudgements:
    """Measurements of held-out judgements.

    Attributes:
        metrics: `nats[NAME]`, minus the log-likelihood, and `nats_gained[NAME]`, how much less that is than of one to
            whom all answers are alike, who knows how often answers tie and each grade is given. NAME is a kind of
            choice or an attribute; real grades are in units of their standard deviation in training.
        kinds: how many there are of each kind.
        num_left_out: observations that the model or its likelihood cannot read.
        num_off_scale: grades that training does not have, which are left out alone.
        parts: attribute -> its `weight` in the reward, pairwise accuracy on the test pairs by it `alone`, and how much
            the reward's accuracy changes where it is left out (`left_out`, of that reward minus of the whole).
    """

    metrics: dict[str, MetricValue]
    kinds: dict[str, int]
    num_left_out: int
    num_off_scale: int
    parts: dict[str, dict[str, Any]]


def measure_observations(
    rm: BradleyTerryRM,
    checkpoint: Path,
    likelihood: Likelihood,
    observations: Observations,
    pairs: Sequence[PreferencePair],
    config: EvaluateConfig,
    *,
    seed: int,
    report: Report,
) -> "MeasuredJudgements | None":
    """Score the answers and measure the judgements; None where none of them can be read.

    Args:
        rm: the model; where it has attributes they are put on it, so it is of no other use afterwards.
        checkpoint: its folder.
        likelihood: what it was trained with, in evaluation mode.
        observations: held out.
        pairs: the held-out pairs, on which attributes are compared.
        config: number of resamples.
        seed: of the bootstrap over prompts.
        report: told of the observations scored.
    """
    design = likelihood.design
    weights: dict[str, float] = {}
    if design.combination:
        weights = load_attributes(rm.model, checkpoint)
    prompts: dict[str, int] = {}
    numbers: dict[str, int] = {}
    num_off_scale = num_kept = 0
    for one in observations:
        numbers[one.observation_id] = prompts.setdefault(one.prompt_id, len(prompts))
        num_off_scale += design.coding.num_off_scale(one)
    rows = _Rows(design.scales)
    likelihood = likelihood.double()
    with TemporaryDirectory() as folder:
        told = prefixed(report, "observations")
        write_observations_tokenized(
            rm.renderer, observations, Path(folder), design.coding, over_length="cut", report=told
        )
        read = open_observations_tokenized(Path(folder), 0).observations
        for start in range(0, len(read), SCORED_TOGETHER):
            some = [one for one in read[start : start + SCORED_TOGETHER] if _is_known(one, likelihood)]
            if some:
                rows.add(some, _outputs(rm, some), likelihood, [numbers[one.observation_id] for one in some])
            num_kept += len(some)
            told(min(start + SCORED_TOGETHER, len(read)), len(read), "observations scored")
    if not num_kept:
        return None
    common: dict[str, int] = {"num_prompts": len(prompts), "num_resamples": config.num_resamples, "seed": seed}
    metrics = rows.measured(**common)
    counts = {kind: rows.kinds.count(kind) for kind in sorted(set(rows.kinds))}
    if rows.num_graded:
        counts[str(Kind.GRADES)] = rows.num_graded
    parts = _parts(rm, pairs, weights, config, seed) if weights and pairs else {}
    num_left_out = len(observations) - num_kept
    return MeasuredJudgements(metrics, counts, num_left_out, num_off_scale, parts)


def _parts(
    rm: BradleyTerryRM, pairs: Sequence[PreferencePair], weights: Mapping[str, float], config: EvaluateConfig, seed: int
) -> dict[str, dict[str, Any]]:
    """See `MeasuredJudgements.parts`; `weights` are of the attributes in the order of the model's outputs."""
    readable = rm.renderer.tokenize_readable(pairs)
    sides = [side for pair in readable.tokenized for side in (pair.chosen, pair.rejected)]
    outputs = rm.score_outputs(sides).astype(np.float64).reshape(len(readable.pairs), 2, -1)
    margins = outputs[:, 0] - outputs[:, 1]  # (P, 1 + A)
    numbers: dict[str, int] = {}
    prompts = np.array([numbers.setdefault(pair.prompt_id, len(numbers)) for pair in readable.pairs])
    found = {}
    for number, (name, weight) in enumerate(weights.items(), 1):
        without = margins[:, 0] - weight * margins[:, number]
        changes = {
            "alone": correctness(margins[:, number]),
            "left_out": correctness(without) - correctness(margins[:, 0]),
        }
        every = np.ones(len(prompts), dtype=bool)
        means = [PairMean(what, values, every, False, "") for what, values in changes.items()]
        measured = means_over_prompts(
            means, prompts, num_prompts=len(numbers), num_resamples=config.num_resamples, seed=seed
        )
        found[name] = {"weight": weight} | {what: value.to_dict() for what, value in measured.items()}
    return found


def _is_known(one: TokenizedObservation, likelihood: Likelihood) -> bool:
    """Whether training had ties as large as this one's: the likelihood of others is not known."""
    if one.ranks is None or one.top_only:
        return True
    return max(map(one.ranks.count, one.ranks)) <= 1 + len(likelihood.log_tie)


def _outputs(rm: BradleyTerryRM, observations: Sequence[TokenizedObservation]) -> torch.Tensor:
    """(S, 1) or (S, 1 + A) of all sides, observation after observation."""
    return torch.from_numpy(rm.score_outputs([side for one in observations for side in one.sides])).double()


class _Rows:
    """Nats of each judgement, one row each."""

    def __init__(self, scales: Sequence[Scale]) -> None:
        self._scales = scales
        self.kinds: list[str] = []
        self.num_graded = 0
        self._rows: list[tuple[str, int, float, float]] = []
        """Kind or attribute, number of the prompt, nats, and nats of one to whom all answers are alike."""

    @torch.no_grad()
    def add(
        self,
        observations: Sequence[TokenizedObservation],
        outputs: torch.Tensor,
        likelihood: Likelihood,
        prompts: Sequence[int],
    ) -> None:
        labels = label(observations)
        terms = likelihood.terms(outputs, labels)
        alike = torch.zeros(labels.ranks.shape, dtype=torch.float64)
        odds = torch.tensor(likelihood.design.tie_odds[1:], dtype=torch.float64).log()
        chance = -ranking_log_likelihood(alike, labels.ranks, odds, first_only=labels.first_only)
        ranked = [
            (str(kind_of(one.ranks, top_only=one.top_only)), prompt)
            for one, prompt in zip(observations, prompts, strict=True)
            if one.ranks is not None
        ]
        self.kinds += [kind for kind, _ in ranked]
        self.num_graded += len(observations) - len(ranked)
        nats = zip(ranked, (-terms.choices).tolist(), chance.tolist(), strict=True)
        self._rows += [(*one, lost, of_chance) for one, lost, of_chance in nats]
        for number, scale in enumerate(self._scales):
            own = labels.attributes == number
            known = [(scale.attribute, prompts[at]) for at in labels.prompts[own].tolist()]
            of_chance = -marginal_log_likelihood(labels.codes[own].double(), scale)
            both = zip(known, (-terms.grades[own]).tolist(), of_chance.tolist(), strict=True)
            self._rows += [(*one, lost, given) for one, lost, given in both]

    def measured(self, *, num_prompts: int, num_resamples: int, seed: int) -> dict[str, MetricValue]:
        """See `MeasuredJudgements.metrics`."""
        named, prompts, nats, chance = (np.array(column) for column in zip(*self._rows, strict=True))
        means = []
        for name in (*sorted(set(self.kinds)), *(scale.attribute for scale in self._scales)):
            means.append(PairMean(f"nats[{name}]", nats, named == name, False, ""))
            means.append(PairMean(f"nats_gained[{name}]", chance - nats, named == name, False, ""))
        return means_over_prompts(means, prompts, num_prompts=num_prompts, num_resamples=num_resamples, seed=seed)
