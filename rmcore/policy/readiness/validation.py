"""Which readiness score tells the gains of reward models apart? The study's analysis, by the claims that were frozen.

Rows are reward models of several gold worlds; the unit is the recipe of a backbone, whose heads, seeds and worlds are
drawn together wherever an interval is given. Probabilities are left-out fits: from models that share no kind of defect
with the one that is predicted, so that composed and single scores pay the same for being fitted.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from rmcore.core.arrays import FloatArray
from rmcore.core.errors import DataError
from rmcore.core.progress import Report, silent
from rmcore.ensembles.linear_probes import fit_head
from rmcore.evaluation.uncertainty import Resampled, interval_p, metric_value
from rmcore.evaluation.verdicts.judgement import holm
from rmcore.policy.overoptimization import METHODS
from rmcore.policy.readiness import claims
from rmcore.policy.readiness.claims import CLAIMS, PRIMARY_GAIN, ReadinessClaim
from rmcore.policy.readiness.operating import Clusters, operating_points
from rmcore.policy.readiness.readiness_v2 import Condition, probability

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
FITS = {"v2": COMPOSED, "win_rate_fit": ("win_rate_16",), "accuracy_fit": ("on_policy_accuracy",)}
"""Scores that are left-out probabilities, and what they are fitted to."""
SCORES = (
    "v1",
    "flatness",
    "pairwise_accuracy",
    "on_policy_accuracy",
    "accuracy_fit",
    "win_rate_16",
    "win_rate_fit",
    "measured_gain",
    "v2",
)
"""Scores that are compared."""
SHIPPED = {
    "on_policy_accuracy": ("on_policy_accuracy",),
    "win_rate_16": ("win_rate_16",),
    "measured_gain": ("planned_gain",),
    "v2": COMPOSED,
}
"""Features of the probability that is shipped with each score."""
L2 = 1.0
"""Prior of the logistic fit, on standardised parts: a deviation of a part moves the log-odds by about 1."""
BINS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


def analyse(
    rows: pd.DataFrame,
    *,
    optimizer: str,
    min_gain: float,
    conditions: Sequence[Condition],
    shipped: Mapping[str, Any],
    seed: int,
    report: Report = silent,
) -> dict[str, Any]:
    """Judge the claims, and measure calibration and operating points.

    Args:
        rows: one reward model a row, see `rmcore.policy.readiness.population`, with the `world` that it is of.
        optimizer: whose gain decides what is worth while, best_of_n or kl_optimum.
        min_gain: gain that counts as worth while, in standard deviations within prompts.
        conditions: the gates whose operating points are measured.
        shipped: the fit in use, whose probability is tested on models that it never saw.
        seed: of the bootstrap over recipes.
        report: of the fits that leave a backbone out, and of each bootstrap.

    Returns:
        {"num_models", "num_backbones", "num_recipes", "worlds", "claims": verdicts with intervals, "claims_digest",
        "correlations": {score: {method: pooled value with interval}}, "by_world", "differences": against on-policy
        accuracy, "calibration", "signal_share", "operating_points", "score", "verdict", "fit", "models": rows with
        the left-out probabilities}; JSON-ready.

    Raises:
        DataError: all models gain that much, or none does: nothing can be fitted.
    """
    table = _complete(rows, optimizer, min_gain)
    num_worthwhile = int(table["worthwhile"].sum())
    if not 0 < num_worthwhile < len(table):
        raise DataError(
            f"{num_worthwhile} of {len(table)} reward models gain {min_gain:g} sd, so there is nothing "
            "to tell apart; change readiness.min_gain, or study other defects."
        )
    for place, (name, features) in enumerate(FITS.items()):
        report(place, len(FITS), f"fits of {name}")
        table[name] = left_out(table, features)
    table["shipped"] = [probability(_as_components(row), shipped) for row in table.to_dict("records")]
    clusters = Clusters(table, seed, report)
    ranks = _correlations(table, clusters)
    judged = _judge(ranks, clusters, sorted(map(str, table["world"].unique())))
    score = _replaced(judged)
    return {
        "num_models": len(table),
        "num_backbones": int(table.groupby("world")["backbone"].nunique().sum()),
        "num_recipes": len(clusters.names),
        "worlds": _worlds(table, optimizer),
        "optimizer": optimizer,
        "min_gain": min_gain,
        "num_worthwhile": num_worthwhile,
        "num_turned": int(rows[f"{optimizer}_turned"].sum()),
        "claims": judged,
        "claims_digest": claims.claims_digest(),
        "correlations": {s: {m: _value(ranks, f"{s} {m}", clusters) for m in METHODS} for s in SCORES},
        "by_world": {
            world: {s: _value(ranks, f"{s} {PRIMARY_GAIN} {world}", clusters) for s in SCORES}
            for world in table["world"].unique()
        },
        "differences": {
            s: _value(ranks, f"{s} - on_policy_accuracy", clusters) for s in SCORES if s != "on_policy_accuracy"
        },
        "calibration": {name: calibration(table, name, clusters) for name in (*FITS, "shipped")},
        "signal_share": _signal_shares(table, clusters),
        "operating_points": operating_points(table, conditions, clusters),
        "score": score,
        "verdict": _verdict(judged, score),
        "fit": fit_probability(table, SHIPPED[score]) | {"score": score},
        "models": _records(
            table[["world", "recipe", "backbone", "head", "defect", *FITS, *(f"{m}_gain" for m in METHODS)]]
        ),
    }


def _complete(rows: pd.DataFrame, optimizer: str, min_gain: float) -> pd.DataFrame:
    """The rows with what is derived from them."""
    known = (*COMPOSED, *SCORES, "signal_share_seeds")
    table = rows.reset_index(drop=True)
    table = table.reindex(columns=[*table.columns, *(name for name in known if name not in table and name not in FITS)])
    by_plan = {
        f"{part}{end}": table[f"{optimizer}_{part}{end}"]
        for part in ("headroom", "measured_gain", "planned_fall", "planned_gain")
        for end in ("", "_low", "_high")
    }
    return table.assign(
        **by_plan,
        flatness=-table["lambda_max"],
        worthwhile=table[f"{optimizer}_gain"] >= min_gain,
        lost=table[f"{optimizer}_gain"] <= 0,
        defect=table["head_defect"].where(table["head_defect"] != "none", table["backbone_defect"]),
    )


def _worlds(table: pd.DataFrame, optimizer: str) -> list[dict[str, Any]]:
    return [
        {
            "name": str(name),
            "num_models": len(some),
            "num_worthwhile": int(some["worthwhile"].sum()),
            "num_turned": int(some[f"{optimizer}_turned"].sum()),
        }
        for name, some in table.groupby("world", sort=False)
    ]


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as JSON takes them, null for what is not known."""
    return table.astype(object).where(table.notna(), None).to_dict("records")


def _as_components(row: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A row's numbers as readiness has them; what is missing has no value."""
    return {
        str(name): {"value": float(value) if math.isfinite(value) else None}
        for name, value in row.items()
        if isinstance(value, int | float)
    }


# --- fits ---------------------------------------------------------------------------------------------------------


def fit_probability(table: pd.DataFrame, features: Sequence[str]) -> dict[str, Any]:
    """Logistic regression of `worthwhile` on parts, with a Gaussian prior: means, coefficients, intercept.

    As Bradley-Terry on signed rows, whose last column is the constant 1: the prior holds for the intercept, too.
    """
    parts = _feature_matrix(table, features)
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


def _feature_matrix(table: pd.DataFrame, features: Sequence[str]) -> FloatArray:
    """(N, F); a part that a model does not have takes the others' mean, which says nothing about it."""
    values = table[list(features)].astype(np.float64)
    return values.fillna(values.mean()).fillna(0.0).to_numpy()


def left_out(table: pd.DataFrame, features: Sequence[str]) -> FloatArray:
    """Probability of each model (N,) from a fit to the models that share no kind of defect with it.

    The kinds of a model are that of its backbone, where `none` is one, and that of its head, where it is none.
    """
    found = np.full(len(table), np.nan)
    parts, narrow = _feature_matrix(table, features), table[[*features, "worthwhile"]]
    backbone, head = table["backbone_defect"].to_numpy(), table["head_defect"].to_numpy()
    for kinds in {(one, other) for one, other in zip(backbone, head, strict=True)}:
        inside = (backbone == kinds[0]) & (head == kinds[1])
        shared = np.isin(backbone, [kind for kind in kinds if kind != "none" or kinds[0] == "none"])
        shared |= np.isin(head, [kind for kind in kinds if kind != "none"])
        rest = narrow[~shared]
        if rest["worthwhile"].nunique() < 2:  # nothing to tell apart without these kinds: the share is all
            found[inside] = rest["worthwhile"].mean() if len(rest) else narrow["worthwhile"].mean()
            continue
        fit = fit_probability(rest, features)
        logit = fit["intercept"] + (parts[inside] - np.array(fit["means"])) @ np.array(fit["coefficients"])
        found[inside] = 1 / (1 + np.exp(-np.clip(logit, -500, 500)))
    return found


# --- rank correlations --------------------------------------------------------------------------------------------


def spearman(first: FloatArray, second: FloatArray, weights: FloatArray) -> FloatArray:
    """Spearman's rho of N pairs that count as often as `weights` (B, N) says: (B,), with tied ranks averaged.

    0 where one of them never varies: it ranks nothing. Pairs with a value that is not known count for nothing.
    """
    known = np.isfinite(first) & np.isfinite(second)
    weights = weights[:, known]
    a, b = (_weighted_ranks(values[known], weights) for values in (first, second))
    total = np.maximum(weights.sum(axis=1, keepdims=True), 1e-12)
    a, b = (ranks - (weights * ranks).sum(axis=1, keepdims=True) / total for ranks in (a, b))
    both = (weights * a * b).sum(axis=1)
    size = np.sqrt((weights * a * a).sum(axis=1) * (weights * b * b).sum(axis=1))
    return np.where(size > 1e-9, both / np.maximum(size, 1e-9), 0.0)


def _weighted_ranks(values: FloatArray, weights: FloatArray) -> FloatArray:
    """(B, N): how much weight lies below each value, with half of its ties."""
    levels, place = np.unique(values, return_inverse=True)
    if not len(levels):
        return weights
    order = np.argsort(place, kind="stable")
    starts = np.searchsorted(place[order], np.arange(len(levels)))
    at_level = np.add.reduceat(weights[:, order], starts, axis=1)
    ranks: FloatArray = (np.cumsum(at_level, axis=1) - at_level / 2)[:, place]
    return ranks


def _correlations(table: pd.DataFrame, clusters: Clusters) -> Resampled:
    """Every rho: `SCORE METHOD WORLD`, averaged over worlds `SCORE METHOD`; differences `BETTER - THAN`.

    Differences are of the primary gain; with ` WORLD`, or ` own` for heads that backbones were trained with, behind.
    """
    worlds = {str(name): (table["world"] == name).to_numpy() for name in table["world"].unique()}
    own = (table["head"] == "own").to_numpy()
    values = {name: table[name].to_numpy(dtype=np.float64) for name in SCORES}
    gains = {method: table[f"{method}_gain"].to_numpy(dtype=np.float64) for method in METHODS}
    compared = {(claim.better, claim.than) for claim in CLAIMS}
    compared |= {(score, "on_policy_accuracy") for score in SCORES if score != "on_policy_accuracy"}

    def compute(weights: FloatArray) -> dict[str, FloatArray]:
        found: dict[str, FloatArray] = {}
        for score in SCORES:
            for method, gain in gains.items():
                for world, inside in worlds.items():
                    found[f"{score} {method} {world}"] = spearman(
                        values[score][inside], gain[inside], weights[:, inside]
                    )
                found[f"{score} {method}"] = np.mean([found[f"{score} {method} {w}"] for w in worlds], axis=0)
            mine = [spearman(values[score][i & own], gains[PRIMARY_GAIN][i & own], weights[:, i & own])
                    for i in worlds.values()]  # fmt: skip
            found[f"{score} {PRIMARY_GAIN} own"] = np.mean(mine, axis=0)
        for better, than in compared:
            for end in ("", " own", *(f" {world}" for world in worlds)):
                gap = found[f"{better} {PRIMARY_GAIN}{end}"] - found[f"{than} {PRIMARY_GAIN}{end}"]
                found[f"{better} - {than}{end}"] = gap
        return found

    return clusters.bootstrap(compute)


def _value(drawn: Resampled, name: str, clusters: Clusters) -> dict[str, Any]:
    num_models = len(clusters.of_row)
    return metric_value(
        drawn.point[name], drawn.replicates.get(name), num_prompts=len(clusters.names), num_pairs=num_models
    ).to_dict()


def _judge(ranks: Resampled, clusters: Clusters, worlds: Sequence[str]) -> list[dict[str, Any]]:
    """Each claim with its difference, pooled, by world and of own heads, and what follows."""
    secondary = [claim for claim in CLAIMS if claim.role == "secondary"]
    p_values = {
        claim.name: interval_p(ranks.replicates.get(f"{claim.better} - {claim.than}"), len(clusters.names))
        for claim in CLAIMS
    }
    adjusted = holm([1.0 if (p := p_values[claim.name]) is None else p for claim in secondary])
    holms = dict(zip((claim.name for claim in secondary), adjusted, strict=True))
    judged = []
    for claim in CLAIMS:
        name = f"{claim.better} - {claim.than}"
        pooled = _value(ranks, name, clusters)
        by_world = {world: _value(ranks, f"{name} {world}", clusters) for world in worlds}
        p_holm = holms.get(claim.name)
        verdict = _verdict_of(claim, pooled, p_holm)
        in_each = all(one["ci_low"] is not None and one["ci_low"] > 0 for one in by_world.values())
        judged.append(
            {"name": claim.name, "role": claim.role, "text": claim.text, "better": claim.better, "than": claim.than}
            | pooled
            | {"p": p_values[claim.name], "p_holm": p_holm, "verdict": verdict, "worlds": by_world}
            | {"own_heads": _value(ranks, f"{name} own", clusters), "replaces": verdict == "supported" and in_each}
        )
    return judged


def _verdict_of(claim: ReadinessClaim, pooled: Mapping[str, Any], p_holm: float | None) -> str:
    low, high = pooled["ci_low"], pooled["ci_high"]
    if low is None or high is None or (claim.role == "secondary" and (p_holm is None or p_holm >= 1 - claims.LEVEL)):
        return "inconclusive"
    return "supported" if low > 0 else "refuted" if high < 0 else "inconclusive"


def _replaced(judged: Sequence[Mapping[str, Any]]) -> str:
    """The score that is to be shipped, by `claims.REPLACING`."""
    replaces = {one["name"]: one["replaces"] for one in judged}
    if not replaces["H1"]:
        return "on_policy_accuracy"
    return "v2" if replaces["S1"] else "measured_gain" if replaces["S2"] else "win_rate_16"


def _verdict(judged: Sequence[Mapping[str, Any]], score: str) -> str:
    first = judged[0]
    gap = f"difference of rho {first['value']:+.3f}"
    if first["ci_low"] is not None:
        gap += f", 95 % {first['ci_low']:+.3f} to {first['ci_high']:+.3f}"
    shipped = score.replace("on_policy", "on-policy").replace("_", " ")
    return f"H1 is {first['verdict']}: {first['text']} ({gap}). The shipped score is {shipped}"


# --- calibration and signal ---------------------------------------------------------------------------------------


def calibration(table: pd.DataFrame, name: str, clusters: Clusters) -> dict[str, Any]:
    """How true a probability is: Brier score, its difference from saying the plain share, and the reliability curve.

    Returns:
        {"brier", "minus_share": below 0 it beats the share, "bins": [{"low", "high", "predicted", "gained"}]}; values
        with intervals over recipes. Models without the probability are left out.
    """
    p = pd.to_numeric(table[name]).to_numpy(dtype=np.float64)
    known, good = np.isfinite(p), table["worthwhile"].to_numpy(dtype=np.float64)
    p = np.where(known, p, 0.0)
    places = np.clip(np.digitize(p, BINS[1:-1]), 0, len(BINS) - 2)
    inside = [known & (places == index) for index in range(len(BINS) - 1)]

    def compute(weights: FloatArray) -> dict[str, FloatArray]:
        with np.errstate(invalid="ignore", divide="ignore"):
            total = weights @ known
            brier, share = weights @ (known * (p - good) ** 2) / total, weights @ (known * good) / total
            found = {"brier": brier, "minus_share": brier - share * (1 - share)}
            for index, rows in enumerate(inside):
                found[f"bin {index}"] = weights @ (rows * good) / (weights @ rows)
        return found

    drawn = clusters.bootstrap(compute)

    def value(of: str, rows: npt.NDArray[np.bool_], is_share: bool) -> dict[str, Any]:
        return metric_value(
            drawn.point[of],
            drawn.replicates.get(of),
            num_prompts=clusters.carrying(rows),
            num_pairs=int(rows.sum()),
            is_share=is_share,
        ).to_dict()

    return {
        "brier": value("brier", known, False) if known.any() else None,
        "minus_share": value("minus_share", known, False) if known.any() else None,
        "bins": [
            {
                "low": BINS[index],
                "high": BINS[index + 1],
                "predicted": float(p[rows].mean()),
                "gained": value(f"bin {index}", rows, True),
            }
            for index, rows in enumerate(inside)
            if rows.any()
        ],
    }


def _signal_shares(table: pd.DataFrame, clusters: Clusters) -> dict[str, Any] | None:
    """Rank correlation with the gain of the signal share over heads and over seeds, on the models that have both."""
    seeds = pd.to_numeric(table["signal_share_seeds"])
    some = (seeds.notna() & table["signal_share"].notna()).to_numpy()
    if some.sum() < 3:
        return None
    gain = table[f"{PRIMARY_GAIN}_gain"].to_numpy(dtype=np.float64)
    worlds = [(table["world"] == name).to_numpy() & some for name in table["world"].unique()]

    def compute(weights: FloatArray) -> dict[str, FloatArray]:
        found = {
            name: np.mean([spearman(values[rows], gain[rows], weights[:, rows]) for rows in worlds], axis=0)
            for name, values in (
                ("heads", table["signal_share"].to_numpy(dtype=np.float64)),
                ("seeds", seeds.to_numpy(dtype=np.float64)),
            )
        }
        return found | {"seeds_minus_heads": found["seeds"] - found["heads"]}

    drawn = clusters.bootstrap(compute)
    num_recipes, num_models = clusters.carrying(some), int(some.sum())
    return {
        "num_models": num_models,
        "num_recipes": num_recipes,
        "mean_heads": float(table["signal_share"][some].mean()),
        "mean_seeds": float(seeds[some].mean()),
    } | {
        name: metric_value(
            drawn.point[name], drawn.replicates.get(name), num_prompts=num_recipes, num_pairs=num_models
        ).to_dict()
        for name in drawn.point
    }
