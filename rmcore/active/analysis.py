"""From the records of all seeds to curves, savings and verdicts."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rmcore.active.efficiency import (
    Curve,
    Saving,
    claims_of,
    judge_savings,
    saving,
    targets_between,
)
from rmcore.active.study import Records
from rmcore.config.active import ActiveConfig
from rmcore.evaluation.verdicts.estimate import SeedSample, estimate_over_seeds


def analyse(records: Records, config: ActiveConfig) -> dict[str, Any]:
    """Curves, savings and verdicts, JSON-ready.

    Args:
        records: of `rmcore.active.study.seed_record`, all seeds in order, by noise.
        config: of the study.

    Returns:
        {"noise": [{"noise", "num_labels", "curves": {name: [value with interval]}, "end", "savings": {name: [saving
        with target]}}], "claims": [claim with its verdict], "headline", "num_seeds", "num_pool", "num_test_prompts",
        "validation_pairs", "seed_pairs"}.
    """
    names: list[str] = [name for name in config.acquisitions if name != "random"]
    savings = {
        (noise, name, share): _saving(records[noise], name, share)
        for noise in config.noise
        for name in names
        for share in config.targets
    }
    claims = claims_of(config)
    verdicts = judge_savings(claims, {one.name: savings[one.noise, one.acquisition, one.share] for one in claims})
    judged = [
        {
            "name": claim.name,
            "text": claim.text,
            "acquisition": claim.acquisition,
            "threshold": claim.threshold,
            "saving": savings[claim.noise, claim.acquisition, claim.share].to_dict(),
            "verdict": verdicts[claim.name].verdict,
            "reason": verdicts[claim.name].reason,
        }
        for claim in claims
    ]
    first = records[config.noise[0]]
    return {
        "noise": [
            {
                "noise": noise,
                "num_labels": records[noise][0]["num_labels"],
                "curves": {
                    name: _over_seeds([record["accuracy"][name] for record in records[noise]])
                    for name in config.acquisitions
                },
                "end": float(np.mean([record["end"] for record in records[noise]])),
                "savings": {
                    name: [
                        {"share": share, "target": _target(records[noise], share)}
                        | savings[noise, name, share].to_dict()
                        for share in config.targets
                    ]
                    for name in names
                },
            }
            for noise in config.noise
        ],
        "claims": judged,
        "headline": headline_of(judged, config.claimed_saving),
        "num_seeds": len(first),
        "num_pool": first[0]["num_pool"],
        "num_test_prompts": first[0]["num_test_prompts"],
        "seed_pairs": config.seed_pairs,
        "validation_pairs": config.validation_pairs,
    }


def headline_of(claims: Sequence[Mapping[str, Any]], claimed: float) -> str:
    """Sum up the verdicts in a sentence."""
    large = [one for one in claims if one["threshold"] == claimed]
    by_verdict = {
        verdict: [one["acquisition"] for one in large if one["verdict"] == verdict]
        for verdict in ("supported", "refuted", "inconclusive")
    }
    said = [
        f"{verdict} for {'every acquisition function' if len(names) == len(large) > 1 else ', '.join(names)}"
        for verdict, names in by_verdict.items()
        if names
    ]
    saves = [one["acquisition"] for one in claims if one["threshold"] == 0 and one["verdict"] == "supported"]
    shown = f"{', '.join(saves)} needed fewer than random choice" if saves else "none was shown to need fewer at all"
    return f"{claimed:.0%} fewer labels: {', '.join(said)}; {shown}"


def _saving(records: Sequence[Mapping[str, Any]], name: str, share: float) -> Saving:
    needed: dict[str, list[float | None]] = {name: [], "random": []}
    for record in records:
        # All functions start from the same heads, so any of them gives the seed set's accuracy.
        [target] = targets_between(record["accuracy"]["random"][0], record["end"], [share])
        for one, labels in needed.items():
            labels.append(None if target is None else _curve(record, one).labels_to(target))
    return saving(needed[name], needed["random"])


def _curve(record: Mapping[str, Any], name: str) -> Curve:
    counts, values = record["num_labels"], record["accuracy"][name]
    return Curve(np.asarray(counts, dtype=np.float64), np.asarray(values, dtype=np.float64))


def _target(records: Sequence[Mapping[str, Any]], share: float) -> float | None:
    """The target accuracy, a mean over the seeds that have one."""
    found = [targets_between(one["accuracy"]["random"][0], one["end"], [share])[0] for one in records]
    known = [one for one in found if one is not None]
    return float(np.mean(known)) if known else None


def analyse_check(records: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Analyse the check by full fine-tuning: accuracy by label count, and by how much it differs from random choice.

    Args:
        records: of `rmcore.active.fine_tuning.check_record`, all seeds in order, by acquisition function.

    Returns:
        {"num_labels", "num_seeds", "num_test_pairs", "accuracy": {name: [value with interval]}, "difference": {name:
        [value with interval, within seeds]}}.
    """
    random = records["random"]
    return {
        "num_labels": random[0]["num_labels"],
        "num_seeds": len(random),
        "num_test_pairs": random[0]["num_test_pairs"],
        "accuracy": {name: _over_seeds([one["accuracy"] for one in each]) for name, each in records.items()},
        "difference": {
            name: _over_seeds(
                [
                    (np.array(one["accuracy"]) - np.array(base["accuracy"])).tolist()
                    for one, base in zip(each, random, strict=True)
                ]
            )
            for name, each in records.items()
            if name != "random"
        },
    }


def _over_seeds(values: Sequence[Sequence[float]]) -> list[dict[str, float | None]]:
    """Mean over seeds with its interval, one a label count."""
    rows = []
    for column in zip(*values, strict=True):
        found = estimate_over_seeds([SeedSample(one, None) for one in column], num_prompts=None, prompts_shared=False)
        rows.append({"value": found.value, "ci_low": found.ci_low, "ci_high": found.ci_high})
    return rows
