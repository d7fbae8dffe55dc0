"""Does a readiness score tell which reward models gain when they are optimised? The study's analysis.

The rule was fixed before the study was run: the composed score is shipped only if, leaving out whole defect types, its
rank correlation with the gain exceeds that of plain on-policy accuracy by an interval that excludes zero; otherwise
on-policy accuracy alone is the score.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from rmcore.core.arrays import FloatArray
from rmcore.core.errors import DataError
from rmcore.ensembles.linear_probes import fit_head
from rmcore.evaluation.uncertainty import MetricValue, percentile_interval
from rmcore.policy.overoptimization import METHODS

COMPOSED = (
    "on_policy_accuracy",
    "skill_16",
    "headroom",
    "signal_share",
    "hard_accuracy",
    "length_correlation",
    "ece_tempered_debiased",
)
"""Parts of v2. Curvature is not among them: it has to prove itself first, and is one of the scores below."""
PLAIN = ("on_policy_accuracy",)
SCORES = (
    "v1",
    "pairwise_accuracy",
    "on_policy_accuracy",
    "win_rate_16",
    "measured_gain",
    "flatness",
    "v2",
)
"""What is compared: v2 is its probability, each model's from a fit without any model of its defect type."""
L2 = 1.0
"""Of the logistic fit, on standardised parts: a prior that says a deviation of a part moves the log-odds by about 1."""
NUM_RESAMPLES = 1000


def analyse(rows: pd.DataFrame, *, optimizer: str, min_gain: float, seed: int) -> dict[str, Any]:
    """Rank correlations with the realised gains, their differences, and the fit that is to be shipped.

    Args:
        rows: one reward model a row, see `rmcore.policy.readiness.population`.
        optimizer: whose headroom and gain are the primary ones, best_of_n or kl_optimum.
        min_gain: gain that counts as worth while, in standard deviations within prompts.
        seed: of the bootstrap over backbones.

    Returns:
        {"num_models" whose gain is known, which all else is over, "num_unknown", "num_backbones", "num_worthwhile",
        "num_turned", "correlations": {score: {method: value with interval}}, "differences": {score: value with
        interval} against on-policy accuracy and the primary gain, "brier": {...}, "verdict", "score", "fit", "models":
        rows with the predicted probability}; JSON-ready.

    Raises:
        DataError: no gain is known; or all models gain that much, or none does: nothing can be fitted.
    """
    primary = f"{optimizer}_gain"
    known = pd.to_numeric(rows[primary]).notna()
    if not known.any():
        raise DataError(
            f"no reward model has a gain by {optimizer}, so there is nothing to predict: the samples end before the "
            "planned KL. Lower readiness.planned_kl, or raise policy.samples_per_prompt."
        )
    num_unknown, rows = int((~known).sum()), rows[known].reset_index(drop=True)
    table = rows.reindex(columns=[*rows.columns, *(name for name in (*COMPOSED, *SCORES) if name not in rows)]).assign(
        headroom=rows[f"{optimizer}_headroom"],
        measured_gain=rows[f"{optimizer}_measured_gain"],
        flatness=-rows["lambda_max"],
        worthwhile=rows[f"{optimizer}_gain"] >= min_gain,
    )
    num_worthwhile = int(table["worthwhile"].sum())
    if not 0 < num_worthwhile < len(table):
        raise DataError(
            f"{num_worthwhile} of {len(table)} reward models gain {min_gain:g} sd, so there is nothing "
            "to tell apart; change readiness.min_gain, or study other defects."
        )
    table["v2"] = _left_out(table, COMPOSED)
    table["plain"] = _left_out(table, PLAIN)
    drawn = _resampled_rows(table["backbone"], seed)
    correlations = {
        score: {method: _with_interval(table, drawn, score, f"{method}_gain") for method in METHODS} for score in SCORES
    }
    differences = {
        score: _with_interval(table, drawn, score, primary, against="on_policy_accuracy")
        for score in SCORES
        if score != "on_policy_accuracy"
    }
    better = differences["v2"]["ci_low"] is not None and differences["v2"]["ci_low"] > 0
    used = COMPOSED if better else PLAIN
    return {
        "num_models": len(table),
        "num_unknown": num_unknown,
        "num_backbones": int(table["backbone"].nunique()),
        "num_worthwhile": num_worthwhile,
        "num_turned": int(rows[f"{optimizer}_turned"].sum()),
        "optimizer": optimizer,
        "min_gain": min_gain,
        "correlations": correlations,
        "differences": differences,
        "brier": {
            "v2": float(((table["v2"] - table["worthwhile"]) ** 2).mean()),
            "on_policy_accuracy": float(((table["plain"] - table["worthwhile"]) ** 2).mean()),
            "always the share": float(table["worthwhile"].mean() * (1 - table["worthwhile"].mean())),
        },
        "score": "v2" if better else "on_policy_accuracy",
        "verdict": _verdict(correlations, differences, better, primary),
        "fit": fit_probability(table, used) | {"score": "v2" if better else "on_policy_accuracy"},
        "models": _records(table[["backbone", "head", "defect", "v2", "plain", *(f"{m}_gain" for m in METHODS)]]),
    }


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as JSON takes them, null for what is not known."""
    return table.astype(object).where(table.notna(), None).to_dict("records")


def fit_probability(table: pd.DataFrame, features: Sequence[str]) -> dict[str, Any]:
    """Logistic regression of `worthwhile` on parts, with a Gaussian prior: means, coefficients, intercept.

    As Bradley-Terry on signed rows, whose last column is the constant 1: the prior holds for the intercept, too.
    """
    parts = _parts(table, features)
    means = parts.mean(axis=0)
    rows = np.column_stack([parts - means, np.ones(len(parts))])
    signs = np.where(table["worthwhile"], 1.0, -1.0)
    found = fit_head(rows * signs[:, None], l2=L2)
    return {
        "features": list(features),
        "means": means.tolist(),
        "coefficients": found[:-1].tolist(),
        "intercept": float(found[-1]),
    }


def _parts(table: pd.DataFrame, features: Sequence[str]) -> FloatArray:
    """(N, F); a part that a model does not have takes the others' mean, which says nothing about it."""
    values = table[list(features)].astype(np.float64)
    return values.fillna(values.mean()).fillna(0.0).to_numpy()


def _left_out(table: pd.DataFrame, features: Sequence[str]) -> FloatArray:
    """Probability of each model from a fit to the models of all other defect types."""
    found = np.full(len(table), np.nan)
    parts = _parts(table, features)
    for defect in table["defect"].unique():
        inside = (table["defect"] == defect).to_numpy()
        rest = table[~inside]
        if rest["worthwhile"].nunique() < 2:  # nothing to tell apart without this type: the share is all that is known
            found[inside] = rest["worthwhile"].mean()
            continue
        fit = fit_probability(rest, features)
        logit = fit["intercept"] + (parts[inside] - np.array(fit["means"])) @ np.array(fit["coefficients"])
        found[inside] = 1 / (1 + np.exp(-np.clip(logit, -500, 500)))
    return found


def _resampled_rows(backbone: "pd.Series[str]", seed: int) -> list[npt.NDArray[np.intp]]:
    """Rows of each resample: backbones drawn with replacement, all their reward models together."""
    rng = np.random.default_rng(seed)
    groups = [np.flatnonzero(backbone == name) for name in backbone.unique()]
    return [
        np.concatenate([groups[index] for index in rng.integers(len(groups), size=len(groups))])
        for _ in range(NUM_RESAMPLES)
    ]


def _with_interval(
    table: pd.DataFrame, drawn: Sequence[npt.NDArray[np.intp]], score: str, gain: str, against: str | None = None
) -> dict[str, Any]:
    """Spearman's correlation of a score with a gain, or how much it exceeds that of another score."""
    target, values = table[gain].to_numpy(dtype=np.float64), table[score].to_numpy(dtype=np.float64)
    other = None if against is None else table[against].to_numpy(dtype=np.float64)

    def of(rows: npt.NDArray[np.intp]) -> float:
        found = _spearman(values[rows], target[rows])
        return found if other is None else found - _spearman(other[rows], target[rows])

    num_backbones = int(table["backbone"].nunique())
    interval = percentile_interval(np.array([of(rows) for rows in drawn]), num_backbones)
    point = of(np.arange(len(table)))
    low, high = (None, None) if interval is None else interval
    return MetricValue(point, low, high, len(table)).to_dict()


def _spearman(a: FloatArray, b: FloatArray) -> float:
    """0 where one of them never varies: it ranks nothing."""
    known = np.isfinite(a) & np.isfinite(b)
    if known.sum() < 3 or np.ptp(a[known]) == 0 or np.ptp(b[known]) == 0:
        return 0.0
    from scipy.stats import spearmanr  # here: scipy.stats takes a second to import, and few commands need it

    return float(spearmanr(a[known], b[known]).statistic)


def _verdict(correlations: dict[str, Any], differences: dict[str, Any], better: bool, primary: str) -> str:
    method = primary.removesuffix("_gain")
    v2, plain = correlations["v2"][method]["value"], correlations["on_policy_accuracy"][method]["value"]
    gap = differences["v2"]
    numbers = f"rho {v2:.3f} against {plain:.3f}, difference {gap['value']:+.3f}"
    if gap["ci_low"] is not None:
        numbers += f", 95 % {gap['ci_low']:+.3f} to {gap['ci_high']:+.3f}"
    if better:
        return f"v2 ranks the models better than on-policy accuracy ({numbers}): it is the score"
    return f"v2 does not rank the models better than on-policy accuracy ({numbers}): on-policy accuracy is the score"
