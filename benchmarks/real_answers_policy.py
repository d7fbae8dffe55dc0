"""Does the order of reward models at best-of-n hold for a policy that is optimised? On real answers, exactly.

    python benchmarks/real_answers_policy.py --out FOLDER [--minutes 30]     # trains what is missing, then judges

The policy chooses among the logged answers themselves: a softmax over a prompt's answers that starts uniform. Under a
penalty on the KL, policy gradients end at weights proportional to exp(reward / beta), the exact optimum that GRPO aims
at. Only scores are needed, and only those recipes of `real_answers.py` take part whose rewards are no frozen
features', as these were poor. Claims, statistics and recipes are frozen before they are scored.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from real_answers import GROUPS, RECIPES, Data, Study, given_options, read_data
from real_answers_ranks import APART, Answers, N, correlation, halves_apart, measured, random_halves
from real_answers_verdict import NUM_RESAMPLES, of_statistic, with_holm

from rmcore.core.arrays import FloatArray
from rmcore.core.files import write_json
from rmcore.evaluation.uncertainty import ends, percentile_interval
from rmcore.policy.overoptimization import overoptimization
from rmcore.policy.readiness.rank import ByPrompt, in_deviations, stacked
from rmcore.policy.sampling.best_of_n import best_of_n_weights, largest_kl, pool_kl, strength_for, tilted_weights
from rmcore.study.registration import register

CHOSEN = tuple(one for one in RECIPES if one.backbone in ("length", "style", "words") or one.training == "full")
FEWEST = 10
CLAIMS: tuple[dict[str, Any], ...] = (
    {
        "name": "T1",
        "claim": "Optimised against the model of the highest best-of-16 win rate, the policy gains more than against "
        "the middle one.",
        "statistic": "gain(first) - gain(middle)",
        "supported": "interval above 0",
    },
    {
        "name": "T2",
        "claim": "Optimised against the middle model, it gains more than against that of the lowest win rate.",
        "statistic": "gain(middle) - gain(last)",
        "supported": "interval above 0",
    },
    {
        "name": "T3",
        "claim": "The win rate ranks the models by the policy's gain as well as by that of best-of-16.",
        "statistic": "rho(win_rate_16, the policy's gain) - rho(win_rate_16, gain of best-of-16)",
        "supported": "interval within -0.1 and +0.1",
        "within": 0.1,
    },
    {
        "name": "T4",
        "claim": "At equal KL the policy gains what best-of-16 gains.",
        "statistic": "mean over models of the policy's gain minus that of best-of-16",
        "supported": "interval within -0.1 and +0.1 sd",
        "within": 0.1,
    },
)
STATISTICS: dict[str, Any] = {
    "alpha": 0.05,
    "correction": "Holm over T1 to T4",
    "policy": "weights proportional to exp(reward / beta) over the answers of a prompt, one beta for all prompts",
    "KL": "of the weights from the uniform ones, mean over prompts; beta is such that it equals that of the weights "
    "of best-of-16 by the same model; a function of the rewards alone, taken as given in the resamples",
    "gain": "by the judge, in its standard deviations within prompts of the group",
    "first, middle, last": "by the best-of-16 win rate on one half of the prompts; what is gained is on the other half",
    "averaged over": "weak, middle and best group, 20 splits and both directions",
    "prompts": "with more than 16 answers in the group",
    "interval": "expanded percentile interval over prompts, 1000 resamples; the models are taken as given",
    "also shown": "gain against KL; the policy on rewards divided by their deviation in each prompt, as GRPO does",
    "fewest models": FEWEST,
}


def optimised(rewards: Sequence[FloatArray], judged: Sequence[FloatArray], kl: float) -> FloatArray:
    """(P,) gains of the policy of highest reward at a KL, averaged over prompts, of `kl` nats or as far as it goes."""
    strength = strength_for(rewards, min(kl, 0.999 * largest_kl(rewards)))
    weights = [tilted_weights(pool, strength) for pool in rewards]
    return np.array([own @ pool - pool.mean() for own, pool in zip(weights, judged, strict=True)])


def in_own_deviations(rewards: Sequence[FloatArray]) -> list[FloatArray]:
    """Rewards in their standard deviation in each prompt, as GRPO's advantages are; of equal ones 0."""
    return [(pool - pool.mean()) / (pool.std() or 1.0) for pool in rewards]


def of_policy(answers: Answers, group: str, rewards: FloatArray) -> dict[str, tuple[FloatArray, FloatArray]]:
    """Measures of the study and the policy's gains of one model in one group, (P,) tops and bottoms."""
    found = measured(answers, group, rewards)
    pools, judged = answers.pools(group, rewards), in_deviations(answers.pools(group, answers.judge))
    known = [place for place, pool in enumerate(pools) if len(pool) > N]
    own, scores = ([one[place] for place in known] for one in (pools, judged))
    has, kl = np.zeros(len(pools)), float(np.mean([pool_kl(best_of_n_weights(pool, N)) for pool in own]))
    has[known] = 1.0
    for name, proxy in (("policy", own), ("policy_normalised", in_own_deviations(own))):
        gain = np.zeros(len(pools))
        gain[known] = optimised(proxy, scores, kl)
        found[name] = (gain, has)
    found["gain_16"] = (found["gain_16"][0] * has, has)
    return found


@dataclass(frozen=True)
class Compared:
    """Measures of M models in the groups that share no model, (G, M, P), and halves of the prompts."""

    by_name: Mapping[str, ByPrompt]
    halves: Any

    def statistics(self, weights: FloatArray) -> dict[str, float]:
        """The statistic of each claim, and the correlations, under weights (P,) of the prompts."""
        win, policy, best = (self.by_name[name] for name in ("win_rate_16", "policy", "gain_16"))
        seen = np.swapaxes(win.value(self.halves * weights), -1, -2)  # (G, H, M)
        unseen = np.swapaxes(policy.value(~self.halves * weights), -1, -2)
        ordered = np.take_along_axis(unseen, np.argsort(-seen, axis=-1, kind="stable"), axis=-1).mean(axis=(0, 1))
        rhos = {
            name: float(correlation(*halves_apart(win, self.by_name[name], self.halves, weights)).mean())
            for name in ("policy", "gain_16", "policy_normalised")
        }
        every = weights[None]
        return {
            "T1": float(ordered[0] - ordered[len(ordered) // 2]),
            "T2": float(ordered[len(ordered) // 2] - ordered[-1]),
            "T3": rhos["policy"] - rhos["gain_16"],
            "T4": float((policy.value(every) - best.value(every)).mean()),
            **{f"rho(win_rate_16, {name})": rho for name, rho in rhos.items()},
            **{f"gain of {name}": float(self.by_name[name].value(every).mean()) for name in rhos},
        }


def curves(answers: Answers, scores: Mapping[str, FloatArray], group: str) -> list[dict[str, Any]]:
    """Gain against KL of the policy for each model in one group, with intervals over prompts."""
    judged = answers.pools(group, answers.judge)
    kept = [place for place, pool in enumerate(judged) if len(pool) > N and np.ptp(pool) > 0]
    rows = []
    for name, rewards in scores.items():
        pools = answers.pools(group, rewards)
        curve = overoptimization([pools[p] for p in kept], [judged[p] for p in kept], method="kl_optimum")
        points = [(point.kl, point.gold.value, *ends(point.gold.to_dict())) for point in curve.points]
        rows.append({"model": name, "group": group, "points": points, "fall": curve.fall.to_dict()})
    return rows


def analyse(data: Data, out: Path, *, num: int = NUM_RESAMPLES, num_splits: int = 20) -> dict[str, Any]:
    """Judge the claims from the stored scores; written to `policy.json`."""
    study, answers = Study(data, out), Answers(data)
    scores = {recipe.name: found for recipe in CHOSEN if (found := study.scores(recipe)) is not None}
    groups = [stacked([of_policy(answers, group, one) for one in scores.values()]) for group in GROUPS[:APART]]
    by_name = {
        name: ByPrompt(*(np.stack([getattr(group[name], side) for group in groups]) for side in ("top", "bottom")))
        for name in ("win_rate_16", "gain_16", "policy", "policy_normalised")
    }
    size = len(answers.prompts)
    compared = Compared(by_name, random_halves(size, num_splits, seed=0))
    rng = np.random.default_rng(0)
    drawn = pd.DataFrame(
        [compared.statistics(rng.multinomial(size, np.full(size, 1 / size)).astype(np.float64)) for _ in range(num)]
    )
    point = compared.statistics(np.ones(size))
    claims = with_holm(
        [
            of_statistic(one["name"], point[one["name"]], drawn[one["name"]].to_numpy(), size, one.get("within"))
            for one in CLAIMS
        ]
    )
    win = by_name["win_rate_16"].value(np.ones((1, size)))[..., 0].mean(axis=0)
    order = [list(scores)[place] for place in np.argsort(-win, kind="stable")]
    shown = {name: scores[name] for name in (order[0], order[len(order) // 2], order[-1])}
    result = {
        "num_models": len(scores),
        "enough": len(scores) >= FEWEST,
        "claims": claims,
        "also": {
            name: (value, percentile_interval(drawn[name].to_numpy(), size))
            for name, value in point.items()
            if name not in {one["name"] for one in CLAIMS}
        },
        "models": [
            {"name": name, "mean_win_rate": float(win[list(scores).index(name)])}
            | {key: by_name[key].value(np.ones((1, size)))[:, list(scores).index(name), 0].tolist() for key in by_name}
            for name in order
        ],
        "curves": [row for group in GROUPS for row in curves(answers, shown, group)],
    }
    write_json(out / "policy.json", result)
    return result


def markdown(result: Mapping[str, Any]) -> str:
    """The tables."""
    lines = [
        f"{result['num_models']} reward models.\n",
        "| claim | value (95 %) | p (Holm) | verdict |",
        "|" + " --- |" * 4,
    ]
    words = {one["name"]: one["claim"] for one in CLAIMS}
    for row in result["claims"]:
        value = f"{row['value']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
        lines.append(f"| {row['name']}: {words[row['name']]} | {value} | {row['p_holm']:.4f} | {row['verdict']} |")
    lines += [f"{name}: {value:.3f} {interval}" for name, (value, interval) in result["also"].items()]
    for row in result["models"]:
        each = "; ".join(f"{key} " + ", ".join(f"{one:.2f}" for one in row[key]) for key in ("gain_16", "policy"))
        lines.append(f"| {row['name']} | {row['mean_win_rate']:.3f} | {each} |")
    for row in result["curves"]:
        points = "; ".join(
            f"{kl:.2f} nats {gain:.2f} ({low:.2f} to {high:.2f})" for kl, gain, low, high in row["points"]
        )
        lines.append(f"| {row['group']} | {row['model']} | {points} |")
    return "\n".join(lines)


def main() -> None:
    given = given_options(__doc__, minutes=30)
    end, data = time.monotonic() + 60 * given.minutes, read_data(given.data)
    frozen = {"claims": list(CLAIMS), "statistics": STATISTICS, "recipes": [one.name for one in CHOSEN]}
    registration = register(given.out / "policy_registration", frozen)
    print(
        f"registration {registration['number']}, {registration['hash'][:12]}, {registration['frozen_at']}", flush=True
    )
    study = Study(data, given.out)
    for recipe in CHOSEN:
        if time.monotonic() < end:
            study.run(recipe)
    result = analyse(data, given.out)
    print(markdown(result))
    if not result["enough"]:
        print(f"\nFewer than {FEWEST} models: no verdict. The same call continues.")


if __name__ == "__main__":
    main()
