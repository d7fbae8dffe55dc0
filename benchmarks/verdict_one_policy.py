"""Judge the claims on one real policy from the stored scores of `one_policy.py`, and draw measure against gain.

    python benchmarks/verdict_one_policy.py --out FOLDER [--figure FILE.png]

Writes `results.json` (numbers of each model and of all; no text, and no judgement of a single sample) next to the
scores, and prints the tables. Verdicts are those of the product, on level 3, and are kept as they are made.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from one_policy import (
    FEWEST_MODELS,
    LABELLED_ANSWERS,
    RECIPES,
    TRAINING_PROMPTS,
    Data,
    Scores,
    given_options,
    read_data,
)
from scipy.special import ndtr
from scipy.stats import rankdata

from rmcore.config.evaluate import ReadinessConfig
from rmcore.core.arrays import FloatArray, IntArray
from rmcore.core.files import write_json
from rmcore.evaluation.uncertainty import ends, interval_p, metric_value
from rmcore.evaluation.verdicts.judgement import holm
from rmcore.policy.overoptimization import overoptimization
from rmcore.policy.sampling.best_of_n import best_of_n_weights, nominal_kl
from rmcore.readiness.components import JudgedPools, accuracies_by_prompt, on_policy_parts
from rmcore.readiness.rank import ByPrompt, gains, in_deviations, stacked, win_rates, without_length
from rmcore.readiness.readiness_v2 import judge_v2
from rmcore.reporting.figures.style import BLUE, GREEN, INK, MUTED, ORANGE, PINK, dress, headline, new_figure, save
from rmcore.study.registration import register

PALETTE = (BLUE, ORANGE, GREEN, PINK, "#E69F00", "#56B4E9", MUTED, INK)
SAMPLES = 11
NUM_PROMPTS, NUM_SAMPLES, NUM_DRAWS = (50, 100, 200, 350), (4, 8, 11), 4
CLAIMS = (
    ("P1", "On-policy accuracy ranks reward models better than accuracy on labelled pairs.", "difference of rho > 0"),
    ("P2", "The best-of-8 win rate ranks them better than accuracy on labelled pairs.", "difference of rho > 0"),
    (
        "P3",
        "Accuracy on labelled pairs ranks them as well as the win rate, or less than 0.1 worse.",
        "0.1 - difference of P2 > 0",
    ),
    ("P4", "Of verdicts 'ready', at most 5 % gain nothing on other prompts.", "0.05 - share > 0"),
    ("P5", "The interval of the gain holds that of other prompts at its rate of 95 %.", "coverage - 0.93 > 0"),
    ("P6", "The share of verdicts that show a gain is what the formula predicts.", "0.1 - mean difference > 0"),
)
STATISTICS: dict[str, Any] = {
    "alpha": 0.05,
    "correction": "Holm over P1 to P6; supported or refuted where the whole interval is on one side",
    "truth": "gain of best-of-8 of 11 by the judge on the half of the prompts that the measure did not see, in the "
    "judge's standard deviations within prompts",
    "also shown": "best-of-11; a policy of KL-regularised optimum at the KL of best-of-8; best-of-8 by the judge with "
    "log length regressed out; on-policy accuracy on 5 samples, as many as there are labelled answers; none decides",
    "rho": "Spearman's, over models, averaged over 20 splits of the prompts and both directions",
    "resamples": 1000,
    "resampled": "P1 to P3: prompts, and kinds of model as a whole, together; P4 to P6: kinds of model",
    "interval": "expanded percentile interval for as many clusters as there are kinds",
    "verdicts": "of 50, 100, 200, 350 prompts and 4, 8, 11 samples k of each, 4 draws that all models share; plan "
    "best-of-k, thresholds as shipped; the gain of best-of-k on all prompts outside the verdict, among 11 samples",
    "coverage": "the difference of both gains by the interval of Zou and Donner from both gains' own",
    "formula": "a gain g is shown by n prompts with probability Phi((g - w / n) sqrt(n) / s - 1.96); s^2 = sum of the "
    "squared weights of best-of-n among k samples minus 1 / k; w: what the worst judged sample loses, in sd",
    "mean difference": "mean over the 12 sizes of |predicted - observed share of verdicts with a lower end above 0|; "
    "g is the gain on the other prompts",
    "first sentence of docs/readiness.md": "accuracy on labelled pairs ranks as well, if P3 is supported and neither "
    "P1 nor P2 is; the better measure and by how much, if P1 or P2 is; else that none is shown to rank better",
}


def register_claims(out: Path) -> Mapping[str, Any]:
    """Freeze what decides, or find it frozen."""
    recipes = [asdict(one) | {"name": one.name} for one in RECIPES]
    sizes = {"training_prompts": TRAINING_PROMPTS, "labelled_answers": LABELLED_ANSWERS, "fewest": FEWEST_MODELS}
    claims = [dict(zip(("name", "claim", "statistic"), one, strict=True)) for one in CLAIMS]
    return register(
        out / "registration", {"claims": claims, "statistics": STATISTICS, "recipes": recipes, "sizes": sizes}
    )


class Judged:
    """The judged samples as (P, 11) arrays, and the labelled pairs."""

    def __init__(self, data: Data) -> None:
        self.num = len(data.prompts)
        shape = (self.num, SAMPLES)
        self.judge = data.samples["judge"].to_numpy(float).reshape(shape)
        self.length = data.samples["response"].str.len().to_numpy(float).reshape(shape)
        self.scaled = np.stack(in_deviations(list(self.judge)))
        place = {prompt: number for number, prompt in enumerate(data.prompts)}
        row = {side: number for number, side in enumerate(data.scored)}
        self.prompt = data.pairs["prompt"].map(place).to_numpy()
        self.better, self.worse = (
            np.array([row[side] for side in zip(data.pairs["prompt"], data.pairs[one], strict=True)])
            for one in ("chosen", "rejected")
        )

    def rewards(self, scores: FloatArray) -> FloatArray:
        """(P, 11) of the samples."""
        return scores[: self.num * SAMPLES].reshape(self.num, SAMPLES)

    def measures(self, scores: FloatArray) -> dict[str, tuple[FloatArray, FloatArray]]:
        """Measures and gains of one model, by prompt: (P,) tops and bottoms."""
        rewards = list(self.rewards(scores))
        judged, lengths = list(self.scaled), list(self.length)
        right = (1 + np.sign(scores[self.better] - scores[self.worse])) / 2
        few = JudgedPools([pool[:LABELLED_ANSWERS] for pool in rewards], self.scaled[:, :5], self.length[:, :5])
        pools = JudgedPools(rewards, judged, lengths)
        curve = overoptimization(rewards, judged, method="kl_optimum", planned_kl=nominal_kl(8), num_resamples=2)
        assert curve.plan is not None
        tilted = np.array(curve.plan.by_prompt, float)
        return {
            "pair_accuracy": tuple(np.bincount(self.prompt, x, self.num) for x in (right, np.ones(len(right)))),
            "on_policy_accuracy": accuracies_by_prompt(pools, only_hard=False),
            "on_policy_accuracy_5": accuracies_by_prompt(few, only_hard=False),
            "win_rate_4": win_rates(rewards, judged, 4),
            "win_rate_8": win_rates(rewards, judged, 8),
            "gain_8": gains(rewards, judged, 8),
            "gain_4": gains(rewards, judged, 4),
            "gain_11": gains(rewards, judged, 11),
            "gain_kl": (np.nan_to_num(tilted), np.isfinite(tilted).astype(float)),
            "gain_8_without_length": gains(rewards, without_length(list(self.judge), lengths), 8),
        }


ESTIMATES = ("pair_accuracy", "on_policy_accuracy", "on_policy_accuracy_5", "win_rate_8", "win_rate_4", "gain_8")
TRUTHS = ("gain_8", "gain_11", "gain_kl", "gain_8_without_length")


def rhos(measures: Mapping[str, ByPrompt], halves: FloatArray, weights: FloatArray, models: IntArray) -> FloatArray:
    """(E, T) Spearman's correlations over models, averaged over splits and both directions.

    Args:
        measures: (M, P).
        halves: (2 S, P), 1 in the half of an estimate; the truth is of the other one.
        weights: (P,) how often a resample drew each prompt.
        models: drawn.
    """

    def ranks(name: str, own: FloatArray) -> FloatArray:  # (2 S, M)
        found = rankdata(measures[name].value(own * weights)[models].T, axis=1)
        found -= found.mean(axis=1, keepdims=True)
        return np.asarray(found / np.sqrt((found**2).sum(axis=1, keepdims=True)))

    seen, truth = (
        {name: ranks(name, own) for name in names} for names, own in ((ESTIMATES, halves), (TRUTHS, 1 - halves))
    )
    return np.array([[(seen[e] * truth[t]).sum(axis=1).mean() for t in TRUTHS] for e in ESTIMATES])


def ranking(measures: Mapping[str, ByPrompt], kinds: Sequence[str]) -> tuple[FloatArray, FloatArray]:
    """Correlations as measured (E, T), and with prompts and kinds of model resampled (B, E, T)."""
    size, rng = measures["gain_8"].top.shape[1], np.random.default_rng(0)
    first = np.stack([rng.permutation(size) < size // 2 for _ in range(20)]).astype(float)
    halves, (names, kind) = np.concatenate([first, 1 - first]), np.unique(kinds, return_inverse=True)
    drawn = []
    for _ in range(STATISTICS["resamples"]):
        weights = rng.multinomial(size, np.full(size, 1 / size)).astype(float)
        models = np.concatenate([np.flatnonzero(kind == one) for one in rng.integers(len(names), size=len(names))])
        drawn.append(rhos(measures, halves, weights, models))
    return rhos(measures, halves, np.ones(size), np.arange(len(kinds))), np.stack(drawn)


def blind_spread(n: int, size: int) -> float:
    """Standard deviation over prompts of the gain of best-of-n among `size` samples, of a choice that knows nothing."""
    return float(np.sqrt((best_of_n_weights(np.arange(size, dtype=float), n) ** 2).sum() - 1 / size))


def verdict(
    rewards: Sequence[FloatArray], judged: Sequence[FloatArray], lengths: Sequence[FloatArray]
) -> dict[str, Any]:
    """The product's verdict on level 3 for best of all samples: status, gain with its ends, and the worst loss."""
    kl, settings = nominal_kl(len(rewards[0])), {"num_resamples": 400}
    plan = overoptimization(rewards, judged, planned_kl=kl, **settings).plan
    assert plan is not None
    found = on_policy_parts(JudgedPools(rewards, judged, lengths), **settings)
    parts = {name: one.to_dict() for name, one in found.items()}
    parts |= {"planned_gain": plan.gain.to_dict(), "planned_fall": plan.fall.to_dict()}
    config = ReadinessConfig(planned_kl=kl)
    said = judge_v2(parts, config, "the judge", num_telling=plan.num_telling, reached=plan.reached)["verdict"]
    own = dict(zip(("low", "high"), plan.gain.ends, strict=True)) | {"gain": plan.gain.value, "worst": plan.worst}
    return own | {"status": said["status"], "headline": said["headline"]}


def verdicts(judged: Judged, rewards: FloatArray) -> list[dict[str, Any]]:
    """Verdicts of one model at every size, each with what other prompts say."""
    rng, rows = np.random.default_rng(1), []
    for n in NUM_PROMPTS:
        for k in NUM_SAMPLES:
            for draw in range(NUM_DRAWS):
                order = rng.permutation(judged.num)
                inside, others = np.sort(order[:n]), order[n:]
                columns = rng.permuted(np.tile(np.arange(SAMPLES), (n, 1)), axis=1)[:, :k]
                pools = [list(one[inside[:, None], columns]) for one in (rewards, judged.scaled, judged.length)]
                row = verdict(*pools)
                unit = np.sqrt(np.mean([pool.var(ddof=1) for pool in pools[1]]))  # its own, in that of all prompts
                row |= {name: float(row[name] * unit) for name in ("gain", "low", "high", "worst")}
                other = gains(list(rewards[others]), list(judged.scaled[others]), k)[0]
                half = 1.96 * other.std(ddof=1) / np.sqrt(len(other))
                apart = row["gain"] - other.mean()
                covered = (
                    -np.hypot(row["high"] - row["gain"], half) <= apart <= np.hypot(row["gain"] - row["low"], half)
                )
                chance = ndtr((other.mean() - row["worst"] / n) * np.sqrt(n) / blind_spread(k, k) - 1.96)
                row |= {"other": float(other.mean()), "covered": bool(covered), "predicted": float(chance)}
                rows.append({"n": n, "k": k, "draw": draw} | row)
    return rows


def resampled(top: FloatArray, bottom: FloatArray, kinds: Sequence[str]) -> tuple[float, FloatArray, int]:
    """A share of sums over rows: its value, replicates with kinds of model resampled, and the kinds that carry it."""
    kind = np.unique(kinds, return_inverse=True)[1]
    tops, bottoms = (np.bincount(kind, values.astype(float)) for values in (top, bottom))
    tops, bottoms = (values[bottoms > 0] for values in (tops, bottoms))
    size = len(tops)
    weights = np.random.default_rng(0).multinomial(size, np.full(size, 1 / size), size=STATISTICS["resamples"])
    return float(tops.sum() / bottoms.sum()), (weights @ tops) / (weights @ bottoms), size


def claims(rho: tuple[FloatArray, FloatArray], frame: pd.DataFrame, num_kinds: int) -> list[dict[str, Any]]:
    """Every claim with its value, interval, p after Holm and verdict."""
    at = {name: place for place, name in enumerate(ESTIMATES)}
    point, drawn = (values[..., 0] for values in rho)
    better = {
        name: (float(point[at[one]] - point[0]), drawn[:, at[one]] - drawn[:, 0])
        for name, one in (("P1", "on_policy_accuracy"), ("P2", "win_rate_8"))
    }
    ready = frame["status"] == "ready"
    false = resampled(ready & (frame["other"] <= 0), ready, frame["kind"])
    covered = resampled(frame["covered"], np.ones(len(frame)), frame["kind"])
    apart = []
    for _, one_size in frame.groupby(["n", "k"]):  # the same resamples of kinds in each
        both = (one_size["predicted"], one_size["low"] > 0)
        one, other = (resampled(values, np.ones(len(one_size)), one_size["kind"]) for values in both)
        apart.append((abs(one[0] - other[0]), np.abs(one[1] - other[1])))
    found = {
        "P1": (*better["P1"], num_kinds, 0.0, 1),
        "P2": (*better["P2"], num_kinds, 0.0, 1),
        "P3": (*better["P2"], num_kinds, 0.1, -1),
        "P4": (*false, 0.05, -1),
        "P5": (*covered, 0.93, 1),
        "P6": (np.mean([one[0] for one in apart]), np.mean([one[1] for one in apart], axis=0), num_kinds, 0.1, -1),
    }
    rows = []
    for name, (value, replicates, clusters, threshold, side) in found.items():
        # A share that no kind differs in has no spread: its interval is that of Clopper and Pearson over kinds.
        seen = metric_value(
            value, replicates, num_prompts=clusters, num_pairs=len(frame), is_share=name in ("P4", "P5")
        )
        low, high = ends(seen.to_dict())
        is_alike = np.ptp(replicates) == 0
        p = 2 * (1 - threshold) ** clusters if is_alike else interval_p(replicates - threshold, clusters)
        beyond = 0 if low is None or high is None else side * (int(low > threshold) - int(high < threshold))
        rows.append({"name": name, "value": value, "low": low, "high": high, "p": min(1.0, p or 1.0), "beyond": beyond})
    for row, corrected in zip(rows, holm([row["p"] for row in rows]), strict=True):
        decided = corrected <= STATISTICS["alpha"] and row["beyond"] != 0
        row |= {
            "p_holm": corrected,
            "verdict": ("refuted", "supported")[row["beyond"] > 0] if decided else "inconclusive",
        }
    return rows


def by_size(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """What verdicts of each size say, and what other prompts say of them."""
    rows = []
    for (n, k), one in frame.groupby(["n", "k"]):
        ready = one[one["status"] == "ready"]
        row = {"n": n, "k": k, "judgements": n * k} | {
            s: (one["status"] == s).mean() for s in ("ready", "unclear", "not_ready")
        }
        row |= {"false_ready": (ready["other"] <= 0).mean(), "worthwhile_when_ready": (ready["other"] >= 0.3).mean()}
        row |= {"gain_when_ready": ready["other"].mean(), "covered": one["covered"].mean()}
        row |= {
            "shown": (one["low"] > 0).mean(),
            "predicted": one["predicted"].mean(),
            "width": (one["high"] - one["low"]).mean(),
        }
        rows.append({name: None if np.isnan(value) else float(value) for name, value in row.items()})
    return rows


def public_models(folder: Path) -> list[dict[str, Any]]:
    """What the product says of the six public models from which of the sixteen samples each chose.

    Its reward is 1 for the choice and 0 for the others, on the prompts whose choice is among the judged samples.
    """
    samples = pd.read_parquet(folder / "policy_samples.parquet").dropna(subset="judge")
    train = pd.read_parquet(folder / "alpacaeval_answers_train.parquet", columns=["prompt"])["prompt"]
    pools = dict(list(samples[samples["prompt"].isin(set(train))].groupby("prompt")))
    rows = []
    for name, chosen in pd.read_parquet(folder / "policy_choices.parquet").groupby("reward_model"):
        both = zip(chosen["prompt"], chosen["sample"], strict=True)
        known = [(pools[prompt], pools[prompt]["sample"] == sample) for prompt, sample in both if prompt in pools]
        told = [(pool, is_chosen.to_numpy(float)) for pool, is_chosen in known if is_chosen.any()]
        judged = [pool["judge"].to_numpy() for pool, _ in told]
        lengths = [pool["response"].str.len().to_numpy(float) for pool, _ in told]
        row = verdict([reward for _, reward in told], judged, lengths)
        rows.append({"model": str(name), "prompts": len(told), "of": len(known)} | row)
    return rows


def figure(
    measures: Mapping[str, ByPrompt], kinds: Sequence[str], rho: FloatArray, sizes: Sequence[Mapping[str, float]]
) -> Any:
    """Three measures on one half against the gain on the other, and how many verdicts show a gain."""
    half = np.random.default_rng(0).permutation(measures["gain_8"].top.shape[1]) < measures["gain_8"].top.shape[1] // 2
    drawn = new_figure(13, 4.2)
    axes = drawn.subplots(1, 4)
    family = [kind.split(",")[0] for kind in kinds]
    gain = measures["gain_8"].value((~half)[None].astype(float))[:, 0]
    labels = {
        "pair_accuracy": "accuracy on labelled pairs",
        "on_policy_accuracy": "on-policy accuracy",
        "win_rate_8": "best-of-8 win rate",
    }
    for ax, (name, label) in zip(axes, labels.items(), strict=False):
        value = measures[name].value(half[None].astype(float))[:, 0]
        for colour, one in zip(PALETTE, dict.fromkeys(family), strict=False):
            own = [place for place, other in enumerate(family) if other == one]
            ax.plot(value[own], gain[own], "o", markersize=5, color=colour, label=one, alpha=0.85)
        ax.axhline(0, color=MUTED, linewidth=0.7)
        dress(
            ax,
            title=f"ρ = {rho[ESTIMATES.index(name), 0]:.2f} (20 splits)",
            x=f"{label}, half A",
            y="gain of best-of-8, half B (sd)",
        )
    axes[0].legend(fontsize=7)
    for colour, k in zip(PALETTE, NUM_SAMPLES, strict=False):
        own = [row for row in sizes if row["k"] == k]
        for name, style in (("shown", "o"), ("predicted", "--")):
            label = f"{k} samples, {'measured' if name == 'shown' else 'formula'}"
            axes[3].plot([row["n"] for row in own], [100 * row[name] for row in own], style, color=colour, label=label)
    axes[3].legend(fontsize=7)
    dress(axes[3], title="verdicts that show a gain", x="judged prompts", y="% of the reward models")
    headline(
        drawn, f"{len(kinds)} reward models, one real policy: what a measure says of the judge's gain on other prompts"
    )
    return drawn


def main() -> None:
    given = given_options(__doc__, figure=Path("one_policy.png"))
    data, registration = read_data(given.data), register_claims(given.out)
    judged, stored = Judged(data), Scores(data, given.out)
    scores = {one: found for one in RECIPES if (found := stored.of(one)) is not None}
    if len(scores) < FEWEST_MODELS:
        raise SystemExit(
            f"{len(scores)} models are scored, and the study needs {FEWEST_MODELS}; run one_policy.py again."
        )
    kinds = [recipe.kind for recipe in scores]
    measures = stacked([judged.measures(found) for found in scores.values()])
    rho = ranking(measures, kinds)
    rows = [
        row | {"kind": recipe.kind}
        for recipe, found in scores.items()
        for row in verdicts(judged, judged.rewards(found))
    ]
    frame, every = pd.DataFrame(rows), np.ones((1, judged.num))
    points = {name: one.value(every)[:, 0].round(4).tolist() for name, one in measures.items()}
    longest = judged.measures(np.array([len(text) for _, text in data.scored], float))
    found = {
        "registration": {name: registration[name] for name in ("number", "hash", "frozen_at")},
        "claims": claims(rho, frame, len(set(kinds))),
        "rho": {
            e: {t: [rho[0][i, j], *np.nanquantile(rho[1][:, i, j], (0.025, 0.975))] for j, t in enumerate(TRUTHS)}
            for i, e in enumerate(ESTIMATES)
        },
        "sizes": by_size(frame),
        "public_models": public_models(given.data),
        "longest": {name: float(top.sum() / bottom.sum()) for name, (top, bottom) in longest.items()},
        "models": [
            {"name": one.name, "kind": one.kind} | {name: value[place] for name, value in points.items()}
            for place, one in enumerate(scores)
        ],
    }
    write_json(given.out / "results.json", found)
    save(figure(measures, kinds, rho[0], found["sizes"]), given.figure)
    print(json.dumps({name: found[name] for name in ("claims", "rho", "public_models")}, indent=1))
    print(pd.DataFrame(found["sizes"]).round(3).to_string())


if __name__ == "__main__":
    main()
