"""Judge the claims on real answers from the stored scores of `real_answers.py`, and draw estimate against truth.

    python benchmarks/real_answers_verdict.py --out FOLDER [--figure FILE.png]

Prints the claims with intervals and Holm's correction, every measure's rank correlation with every truth, the error
rates of the verdicts, and what the registration leaves to be looked at. What is computed is stored next to the scores.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from real_answers import (
    CLAIMS,
    FEWEST_MODELS,
    GROUPS,
    RECIPES,
    STATISTICS,
    Data,
    Recipe,
    Study,
    given_options,
    read_data,
)
from real_answers_ranks import (
    APART,
    Answers,
    N,
    Ranking,
    claimed,
    figure,
    measured,
    on_labelled_pairs,
    random_halves,
    rank_table,
)

from rmcore.config.readiness import ReadinessConfig
from rmcore.core.arrays import FloatArray
from rmcore.core.files import append_json_lines, read_json_lines, write_json
from rmcore.evaluation.uncertainty import cluster_bootstrap, ends, interval_p, metric_value, percentile_interval
from rmcore.evaluation.verdicts.judgement import holm
from rmcore.policy.logged_answers import LoggedPool, best_of_logged
from rmcore.policy.overoptimization import overoptimization
from rmcore.policy.readiness.components import JudgedPools, on_policy_parts
from rmcore.policy.readiness.rank import ByPrompt, stacked
from rmcore.policy.readiness.readiness_v2 import judge_v2
from rmcore.policy.sampling.best_of_n import nominal_kl
from rmcore.reporting.figures.style import save

PLAN = ReadinessConfig(planned_kl=nominal_kl(N))
NUM_RESAMPLES = int(STATISTICS["resamples"])
RESAMPLES_OF_VERDICTS = 400


def verdicts(answers: Answers, recipe: Recipe, scores: FloatArray, num_splits: int) -> list[dict[str, Any]]:
    """Both verdicts of a model by readiness' own rules on every half, by group: a row each."""
    rows = []
    halves = random_halves(len(answers.prompts), num_splits, seed=1)
    for group in GROUPS:
        pools = [answers.pools(group, values) for values in (scores, answers.judge, answers.length)]
        for number, half in enumerate(halves):
            inside = [
                place for place in np.flatnonzero(half) if len(pools[0][place]) >= 4 and np.ptp(pools[1][place]) > 0
            ]
            rewards, judged, lengths = ([one[place] for place in inside] for one in pools)
            rows.append(
                {"model": recipe.name, "kind": recipe.kind, "group": group, "half": number}
                | third_rung(rewards, judged, lengths)
                | second_rung(inside, rewards, judged, lengths)
            )
    return rows


def third_rung(rewards: list[FloatArray], judged: list[FloatArray], lengths: list[FloatArray]) -> dict[str, Any]:
    """Readiness v2 on one half: status, the gain at the plan in the judge's unit with its ends, and the unit."""
    curve = overoptimization(rewards, judged, planned_kl=PLAN.planned_kl, num_resamples=RESAMPLES_OF_VERDICTS)
    parts = on_policy_parts(JudgedPools(rewards, judged, lengths), num_resamples=RESAMPLES_OF_VERDICTS)
    assert curve.plan is not None
    plan, gain = curve.plan, curve.plan.gain.to_dict()
    named = {name: part.to_dict() for name, part in parts.items()}
    named |= {"planned_gain": gain, "planned_fall": plan.fall.to_dict()}
    found = judge_v2(named, PLAN, "the judge", num_telling=plan.num_telling, reached=plan.reached)
    low, high = ends(gain)
    sizes = np.array([len(pool) - 1 for pool in judged])
    unit = float(np.sqrt(sum(np.sum((pool - pool.mean()) ** 2) for pool in judged) / sizes.sum()))
    win = named["win_rate_16"]
    return {
        "status": found["verdict"]["status"],
        "gain": gain["value"],
        "low": low,
        "high": high,
        "unit": unit,
        "win_rate": win["value"],
        "failed": [check["name"] for check in found["gate"] if not check["passed"]],
    }


def second_rung(
    inside: Sequence[int], rewards: list[FloatArray], judged: list[FloatArray], lengths: list[FloatArray]
) -> dict[str, Any]:
    """What is claimed of logged answers on one half, and the win rates that the other half checks."""
    pools = [
        LoggedPool(str(place), *three, True) for place, *three in zip(inside, rewards, judged, lengths, strict=True)
    ]
    found = best_of_logged(pools, num_resamples=RESAMPLES_OF_VERDICTS, seed=0)
    wins = {str(choice["k"]): choice["win_rate"]["value"] for choice in found["choices"]}
    over = {str(choice["k"]): choice["over_longest"] for choice in found["choices"]}
    best = found["best_k"]
    shown = best is not None and (ends(over[str(best)])[0] or 0) > 0
    return {"outcome": found["outcome"], "best_k": best, "wins": wins, "over_longest": shown}


def with_other_half(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Verdicts with what the other half of the prompts says of them, in this half's unit."""
    frame = pd.DataFrame(rows)
    num_splits = (frame["half"].max() + 1) // 2
    other = {(row["model"], row["group"], row["half"]): row for row in rows}
    partners = [other[row["model"], row["group"], (row["half"] + num_splits) % (2 * num_splits)] for row in rows]
    scale = np.array([one["unit"] for one in partners]) / frame["unit"]
    for name in ("gain", "low", "high"):
        frame[f"other_{name}"] = np.array([one[name] for one in partners]) * scale
    difference = frame["gain"] - frame["other_gain"]
    # Zou and Donner's interval of a difference of two independent estimates, from their own intervals (MOVER).
    down = np.hypot(frame["gain"] - frame["low"], frame["other_high"] - frame["other_gain"])
    up = np.hypot(frame["high"] - frame["gain"], frame["other_gain"] - frame["other_low"])
    frame["covered"] = (difference - down <= 0) & (difference + up >= 0)
    frame["other_win"] = [
        None if row["best_k"] is None else one["wins"].get(str(row["best_k"]))
        for row, one in zip(rows, partners, strict=True)
    ]
    return frame


def shares(frame: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Shares over verdicts with intervals over cells of a kind and a group, whose halves and models go together."""
    cells = frame.groupby(["kind", "group"]).ngroup().to_numpy()
    size, ready, refused = cells.max() + 1, frame["status"] == "ready", frame["status"] == "not_ready"
    worth, nothing = frame["other_gain"] >= PLAN.min_gain, frame["other_gain"] <= 0
    claims = frame["best_k"].notna() & frame["other_win"].notna()
    lost = frame["other_win"].fillna(1.0) <= 0.5
    every = pd.Series(True, frame.index)
    asked = {
        "R5: covered": (frame["covered"], every),
        "R6: ready, gained nothing": (nothing, ready),
        "R7: not ready, worth while": (worth, refused),
        "R8: claimed up to k, lost": (lost, claims),
        "ready": (ready, every),
        "not ready": (refused, every),
        "unclear": (frame["status"] == "unclear", every),
        "ready, worth while": (worth, ready),
        "worth while, called ready": (ready, worth),
        "worth while, refused": (refused, worth),
        "worth while, unclear": (frame["status"] == "unclear", worth),
        "gained nothing, called ready": (ready, nothing),
        "second rung: claimed": (claims, every),
        "second rung: claimed over the longest": (frame["over_longest"].astype(bool), every),
    }
    found = {}
    for name, (hit, among) in asked.items():
        top = np.bincount(cells, (hit & among).astype(float), size)
        bottom = np.bincount(cells, among.astype(float), size)
        own = bottom > 0
        if not own.any():
            continue

        def share(
            weights: FloatArray, top: FloatArray = top[own], bottom: FloatArray = bottom[own]
        ) -> dict[str, FloatArray]:
            return {"share": (weights @ top) / (weights @ bottom)}

        drawn = cluster_bootstrap(share, int(own.sum()), num_resamples=NUM_RESAMPLES, seed=0)
        value = metric_value(
            drawn.point["share"],
            drawn.replicates.get("share"),
            num_prompts=int(own.sum()),
            num_pairs=int(bottom.sum()),
            is_share=True,
        )
        found[name] = value.to_dict() | {"replicates": drawn.replicates.get("share"), "cells": int(own.sum())}
    return found


RATES = {
    "R5": ("R5: covered", 0.93, 1),
    "R6": ("R6: ready, gained nothing", 0.10, -1),
    "R7": ("R7: not ready, worth while", 0.10, -1),
    "R8": ("R8: claimed up to k, lost", 0.10, -1),
}
"""Claims on shares: which one, its threshold, and whether it has to be above (1) or below (-1)."""


def judged_claims(
    correlations: Sequence[FloatArray], num_kinds: int, found: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Every claim: value, interval, p by itself, verdict after Holm, and the range with one kind left out.

    Args:
        correlations: as measured (R, G), resampled (B, R, G) and with one kind left out (K, R, G).
        num_kinds: of models.
        found: of `shares`.
    """
    rows: list[dict[str, Any]] = []
    for claim in CLAIMS:
        name = claim["name"]
        if name in RATES:
            share, threshold, direction = RATES[name]
            if share not in found or found[share]["ci_low"] is None:
                rows.append({"name": name, "value": None, "low": None, "high": None, "p": 1.0, "beyond": 0})
                continue
            one = found[share]
            drawn = one["replicates"]
            if np.ptp(drawn) == 0:  # never seen: the exact chance of that at the threshold
                p = min(1.0, 2 * (1 - threshold if direction < 0 else threshold) ** one["cells"])
            else:
                p = interval_p(drawn - threshold, one["cells"]) or 1.0
            low, high = (one["ci_low"] - threshold, one["ci_high"] - threshold)
            rows.append(
                {
                    "name": name,
                    "value": one["value"],
                    "low": one["ci_low"],
                    "high": one["ci_high"],
                    "p": p,
                    "beyond": _side(low, high) * direction,
                }
            )
            continue
        value, drawn, left_out = (claimed(name, one) for one in correlations)
        row = of_statistic(name, float(value), drawn, num_kinds, within=0.2 if name == "R3" else None)
        rows.append(row | {"left_out": [float(left_out.min()), float(left_out.max())]})
    return with_holm(rows)


def of_statistic(
    name: str, value: float, drawn: FloatArray, num_clusters: int, within: float | None = None
) -> dict[str, Any]:
    """A claim that a statistic is above 0, or within +- `within`: its interval, p, and the side that it is on.

    Args:
        name: of the claim.
        value: as measured.
        drawn: (B,) replicates.
        num_clusters: that were resampled.
        within: for a claim that it is about 0.
    """
    low, high = percentile_interval(drawn, num_clusters) or (-np.inf, np.inf)
    if within is None:
        beyond, p = _side(low, high), interval_p(drawn, num_clusters) or 1.0
    else:
        beyond = 1 if low > -within and high < within else -1 if low > within or high < -within else 0
        p = max(interval_p(drawn + edge, num_clusters) or 1.0 for edge in (within, -within))
    return {"name": name, "value": value, "low": low, "high": high, "p": p, "beyond": beyond}


def with_holm(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add what Holm's correction over all claims makes of each p, and the verdict."""
    for row, corrected in zip(rows, holm([row["p"] for row in rows]), strict=True):
        decided = corrected <= STATISTICS["alpha"] and row["beyond"] != 0
        row |= {
            "p_holm": corrected,
            "verdict": "inconclusive" if not decided else "supported" if row["beyond"] > 0 else "refuted",
        }
    return rows


def _side(low: float, high: float) -> int:
    return 1 if low > 0 else -1 if high < 0 else 0


def analyse(
    data: Data,
    pairs: pd.DataFrame,
    out: Path,
    recipes: Sequence[Recipe],
    *,
    num: int = NUM_RESAMPLES,
    num_splits: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Everything that is computed of stored scores; written to `analysis.json`."""
    study, answers = Study(data, out), Answers(data)
    done = {recipe: found for recipe in recipes if (found := study.scores(recipe)) is not None}
    scores = np.stack(list(done.values()))
    for_ranks, for_verdicts = num_splits or (
        STATISTICS["splits of the prompts for ranks"],
        STATISTICS["splits of the prompts for verdicts"],
    )
    groups = [stacked([measured(answers, group, one) for one in scores]) for group in GROUPS]
    by_name = {
        name: ByPrompt(
            *(np.stack([getattr(group[name], side) for group in groups[:APART]]) for side in ("top", "bottom"))
        )
        for name in groups[0]
    }
    labelled = on_labelled_pairs(answers, pairs, scores)
    by_name |= {name: ByPrompt(one.top[None], one.bottom[None]) for name, one in labelled.items()}
    kinds = [recipe.kind for recipe in done]
    ranking = Ranking(by_name, kinds, random_halves(len(answers.prompts), for_ranks, seed=0))
    file = out / "verdicts.jsonl"
    known = {row["model"] for row in read_json_lines(file)} if file.is_file() else set()
    for recipe, found in done.items():
        if recipe.name not in known:
            append_json_lines(file, verdicts(answers, recipe, found, for_verdicts))
    frame = with_other_half([row for row in read_json_lines(file) if row["model"] in {one.name for one in done}])
    found = shares(frame)
    point = ranking.rhos(np.ones(len(answers.prompts)), np.arange(len(done)))
    correlations = (point, ranking.resampled(num), ranking.without_each_kind())
    every = np.ones((1, len(answers.prompts)))
    result = {
        "num_models": len(done),
        "num_kinds": len(set(kinds)),
        "enough": len(done) >= FEWEST_MODELS,
        "claims": judged_claims(correlations, len(set(kinds)), found),
        "ranks": rank_table(correlations, len(set(kinds))),
        "shares": {
            name: {key: one[key] for key in ("value", "ci_low", "ci_high", "num")} for name, one in found.items()
        },
        "models": [
            {"name": recipe.name, "kind": recipe.kind}
            | {name: one.value(every)[..., place, 0].ravel().tolist() for name, one in by_name.items()}
            for place, recipe in enumerate(done)
        ],
    }
    write_json(out / "analysis.json", result)
    save(figure(ranking, point, [recipe.name for recipe in done]), out / "real_answers.png")
    return result


def markdown(result: Mapping[str, Any]) -> str:
    """The tables."""
    lines = [
        f"{result['num_models']} reward models of {result['num_kinds']} kinds.\n",
        "| claim | value (95 %) | one kind left out | p (Holm) | verdict |",
        "| --- | --- | --- | ---: | --- |",
    ]
    words = {claim["name"]: claim["claim"] for claim in CLAIMS}
    for row in result["claims"]:
        value = "–" if row["value"] is None else f"{row['value']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
        left = "–" if "left_out" not in row else "{:.3f} to {:.3f}".format(*row["left_out"])
        lines.append(
            f"| {row['name']}: {words[row['name']]} | {value} | {left} | {row['p_holm']:.4f} | {row['verdict']} |"
        )
    lines += ["\n| truth | estimate | ρ (95 %) | weak | middle | best |", "| --- | --- | --- | ---: | ---: | ---: |"]
    for row in result["ranks"]:
        low, high = row["interval"] or (np.nan, np.nan)
        each = " | ".join(f"{one:.2f}" for one in row["by_group"])
        lines.append(f"| {row['truth']} | {row['estimate']} | {row['rho']:.3f} ({low:.3f} to {high:.3f}) | {each} |")
    lines += ["\n| share | value (95 %) | verdicts |", "| --- | --- | ---: |"]
    for name, one in result["shares"].items():
        ci = "no interval" if one["ci_low"] is None else f"{100 * one['ci_low']:.1f} to {100 * one['ci_high']:.1f} %"
        lines.append(f"| {name} | {100 * one['value']:.1f} % ({ci}) | {one['num']} |")
    return "\n".join(lines)


def main() -> None:
    given = given_options(__doc__)
    result = analyse(read_data(given.data), pd.read_parquet(given.data / "alpacaeval_test.parquet"), given.out, RECIPES)
    print(markdown(result))
    if not result["enough"]:
        print(f"\nFewer than {FEWEST_MODELS} models: no verdict. Run benchmarks/real_answers.py again to go on.")


if __name__ == "__main__":
    main()
