"""Held-out judgements of any kind under a trained model and its likelihood: stage evaluate besides pairs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from rmcore.config.evaluate import EvaluateConfig
from rmcore.core.progress import Report, prefixed
from rmcore.data.observation import Kind, kind_of
from rmcore.data.pair import PreferencePair
from rmcore.data.survey import Scale
from rmcore.data.tokenized_observations import (
    Observations,
    TokenizedObservation,
    open_observations_tokenized,
    write_observations_tokenized,
)
from rmcore.evaluation.judgements import (
    Choices,
    GradesOf,
    discounted_gain,
    mean_over_prompts,
    measure_choices,
    measure_grades,
    top_is_best,
)
from rmcore.evaluation.uncertainty import MetricValue
from rmcore.models.attributes import load_attributes
from rmcore.models.observation_batching import label
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.training.likelihood import (
    Likelihood,
    grade_log_likelihood,
    marginal_log_likelihood,
    ranking_log_likelihood,
    thresholds,
)

SCORED_TOGETHER = 512
"""Observations whose answers are scored, and held in memory, at a time."""


@dataclass(frozen=True)
class Measured:
    """Measurements of held-out judgements.

    Attributes:
        metrics: by name; those of an attribute are `NAME[ATTRIBUTE]`.
        kinds: how many there are of each kind.
        num_left_out: observations that the model or its likelihood cannot read.
        num_off_scale: grades that training does not have, which are left out alone.
        correlations: between the attributes' outputs over all answers, attribute -> attribute -> Pearson's r.
        parts: attribute -> its `weight` in the reward, pairwise accuracy on the test pairs by it `alone`, and how much
            the reward's accuracy changes where it is left out (`left_out`, of that reward minus of the whole).
    """

    metrics: dict[str, MetricValue]
    kinds: dict[str, int]
    num_left_out: int
    num_off_scale: int
    correlations: dict[str, dict[str, float]]
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
) -> Measured | None:
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
    metrics = measure_choices(rows.choices(), **common) if rows.kinds else {}
    for scale in design.scales:
        grades = rows.grades(scale)
        if len(grades.nats):
            found = measure_grades(grades, **common)
            metrics |= {f"{name}[{scale.attribute}]": value for name, value in found.items()}
    counts = {kind: rows.kinds.count(kind) for kind in sorted(set(rows.kinds))}
    if rows.num_graded:
        counts[str(Kind.GRADES)] = rows.num_graded
    parts = _parts(rm, pairs, weights, config, seed) if weights and pairs else {}
    num_left_out = len(observations) - num_kept
    return Measured(metrics, counts, num_left_out, num_off_scale, rows.correlations(), parts)


def _parts(
    rm: BradleyTerryRM, pairs: Sequence[PreferencePair], weights: Mapping[str, float], config: EvaluateConfig, seed: int
) -> dict[str, dict[str, Any]]:
    """See `Measured.parts`; `weights` are of the attributes in the order of the model's outputs."""
    readable = rm.renderer.tokenize_readable(pairs)
    sides = [side for pair in readable.tokenized for side in (pair.chosen, pair.rejected)]
    outputs = rm.score_outputs(sides).astype(np.float64).reshape(len(readable.pairs), 2, -1)
    margins = outputs[:, 0] - outputs[:, 1]  # (P, 1 + A)
    numbers: dict[str, int] = {}
    prompts = np.array([numbers.setdefault(pair.prompt_id, len(numbers)) for pair in readable.pairs])
    found = {}
    for number, (name, weight) in enumerate(weights.items(), 1):
        without = margins[:, 0] - weight * margins[:, number]
        changes = {"alone": _wins(margins[:, number]), "left_out": _wins(without) - _wins(margins[:, 0])}
        measured = mean_over_prompts(
            changes, prompts, num_prompts=len(numbers), num_resamples=config.num_resamples, seed=seed
        )
        found[name] = {"weight": weight} | {what: value.to_dict() for what, value in measured.items()}
    return found


def _wins(margins: np.ndarray) -> np.ndarray:
    """1 where the margin is above 0, one half where it is 0."""
    return (margins > 0) + 0.5 * (margins == 0)


def _is_known(one: TokenizedObservation, likelihood: Likelihood) -> bool:
    """Whether training had ties as large as this one's: the likelihood of others is not known."""
    if one.ranks is None or one.top_only:
        return True
    return max(map(one.ranks.count, one.ranks)) <= 1 + len(likelihood.log_tie)


def _outputs(rm: BradleyTerryRM, observations: Sequence[TokenizedObservation]) -> torch.Tensor:
    """(S, 1) or (S, 1 + A) of all sides, observation after observation."""
    return torch.from_numpy(rm.score_outputs([side for one in observations for side in one.sides])).double()


class _Rows:
    """Collects one row a judgement."""

    def __init__(self, scales: Sequence[Scale]) -> None:
        self._scales = scales
        self.kinds: list[str] = []
        self.num_graded = 0
        self._choices: list[tuple[float, ...]] = []
        self._grades: dict[str, list[tuple[float, ...]]] = {scale.attribute: [] for scale in scales}
        self._outputs: list[np.ndarray] = []

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
        if outputs.shape[1] > 1:
            self._outputs.append(outputs[:, 1:].numpy())
        alike = torch.zeros(labels.ranks.shape, dtype=torch.float64)
        odds = torch.tensor(likelihood.design.tie_odds[1:], dtype=torch.float64).log()
        chance = -ranking_log_likelihood(alike, labels.ranks, odds, first_only=labels.first_only)
        tie = self._tie_probabilities(observations, outputs, likelihood)
        rewards = outputs[:, 0].split([len(one.sides) for one in observations])
        at = 0  # among the ranked ones
        for one, prompt, own in zip(observations, prompts, rewards, strict=True):
            if one.ranks is None:
                self.num_graded += 1
                continue
            ranks, given = one.ranks, own.tolist()
            kind = kind_of(ranks, top_only=one.top_only)
            gain = discounted_gain(ranks, given) if kind is Kind.RANKING else math.nan
            self.kinds.append(str(kind))
            lost = -float(terms.choices[at])
            self._choices.append(
                (prompt, lost, float(chance[at]), top_is_best(ranks, given), gain, tie[at], ranks[0] == ranks[-1])
            )
            at += 1
        for number, scale in enumerate(self._scales):
            own = labels.attributes == number
            eta = likelihood.eta(outputs, labels.graded[own], number)
            codes = labels.codes[own].double()
            levels = _levels(eta, likelihood, number, scale)
            known = [prompts[at] for at in labels.prompts[own].tolist()]
            nats = (-terms.grades[own]).tolist()
            chance_nats = (-marginal_log_likelihood(codes, scale)).tolist()
            rows = zip(known, nats, chance_nats, eta.tolist(), codes.tolist(), levels, strict=True)
            self._grades[scale.attribute] += list(rows)

    def _tie_probabilities(
        self, observations: Sequence[TokenizedObservation], outputs: torch.Tensor, likelihood: Likelihood
    ) -> list[float]:
        """For each ranked observation that its two answers are called equal; NaN where they are not two."""
        two = [one.ranks is not None and len(one.ranks) == 2 for one in observations]
        if not len(likelihood.log_tie) or not any(two):
            return [math.nan for one in observations if one.ranks is not None]
        asked = [replace(one, ranks=(1, 1)) if is_two else one for one, is_two in zip(observations, two, strict=True)]
        chances = iter(likelihood.terms(outputs, label(asked)).choices.exp().tolist())
        said = [(next(chances), is_two) for one, is_two in zip(asked, two, strict=True) if one.ranks is not None]
        return [chance if is_two else math.nan for chance, is_two in said]

    def choices(self) -> Choices:
        prompts, nats, chance, top, gain, tie, is_tie = np.array(self._choices, dtype=np.float64).reshape(-1, 7).T
        return Choices(prompts.astype(np.int64), self.kinds, nats, chance, top, gain, tie, is_tie.astype(bool))

    def grades(self, scale: Scale) -> GradesOf:
        rows = np.array(self._grades[scale.attribute], dtype=np.float64).reshape(-1, 6)
        prompts, nats, chance, said, codes, predicted = rows.T
        return GradesOf(prompts.astype(np.int64), nats, chance, said, codes, predicted, len(scale.levels))

    def correlations(self) -> dict[str, dict[str, float]]:
        if not self._outputs:
            return {}
        names = [scale.attribute for scale in self._scales]
        matrix = np.corrcoef(np.concatenate(self._outputs).T)
        return {name: dict(zip(names, row, strict=True)) for name, row in zip(names, matrix.tolist(), strict=True)}


def _levels(eta: torch.Tensor, likelihood: Likelihood, number: int, scale: Scale) -> list[float]:
    """The most probable level of each grade; NaN of real grades."""
    if scale.link == "real":
        return [math.nan] * len(eta)
    rising, log_sigma = thresholds(likelihood.cuts[number]), likelihood.log_sigma[number, None]
    by_level = [
        grade_log_likelihood(eta, torch.full_like(eta, level), rising, log_sigma, scale.link)
        for level in range(len(scale.levels))
    ]
    return [float(level) for level in torch.stack(by_level).argmax(0).tolist()]
