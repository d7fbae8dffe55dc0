"""One row a reward model of the study of readiness: what readiness may see, and what optimising it really gains.

The prompts of the samples are parted: the scores see the judged samples of the first ones, the gain is taken on all
others. So no score is compared with a number that it was computed from.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from rmcore.config.data import Shortcut
from rmcore.core.arrays import FloatArray
from rmcore.core.errors import ModelError
from rmcore.core.progress import Report
from rmcore.data.gold.world import shortcut_amount
from rmcore.data.pair import PreferencePair
from rmcore.ensembles.features import features, head_of, pair_features
from rmcore.ensembles.score import readable_pairs
from rmcore.evaluation.report_card import evaluate_pairs
from rmcore.evaluation.uncertainty import MetricValue
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.policy.grpo.defects import BackboneRecipe, HeadData, HeadRecipe, heads
from rmcore.policy.overoptimization import METHODS, overoptimization
from rmcore.policy.readiness.components import JudgedPools, on_policy_parts
from rmcore.policy.readiness.original_score import RLReadinessScorer

NUM_MEMBERS = 4
NUM_RESAMPLES = 200
"""Bootstrap resamples of the intervals that the gates look at; those of the study are over models."""


@dataclass(frozen=True, slots=True)
class BackboneFeatures:
    """Features of one backbone, in float64: what all of its reward models are computed from.

    training: of the pairs that heads are fitted on.
    test: features of the chosen and the rejected sides of the test pairs, (2, P, D).
    test_pairs: those P pairs, all that the model can read.
    samples: (N, D) of the policy's samples.
    own_head: (D,) that the backbone was trained with.
    beta: scale of that head's margins; that of fitted heads is 1.
    """

    training: HeadData
    test: FloatArray
    test_pairs: Sequence[PreferencePair]
    samples: FloatArray
    own_head: FloatArray
    beta: float = 1.0


def backbone_features(
    rm: BradleyTerryRM,
    training: Sequence[PreferencePair],
    test: Sequence[PreferencePair],
    samples: pd.DataFrame,
    shortcut: Shortcut,
    report: Report,
) -> BackboneFeatures:
    """Run the backbone once over everything; `shortcut` is that of the world, which some heads prefer.

    Pairs that the model cannot read are left out, counted and said on stderr.

    Raises:
        DataError: a sample cannot be read: backbones are compared on the same ones.
    """
    head = head_of(rm)
    training, test = readable_pairs(rm, training), readable_pairs(rm, test)
    report(0, 3, "training pairs")
    fitted = pair_features(rm, training)
    more = [shortcut_amount(shortcut, pair.chosen) - shortcut_amount(shortcut, pair.rejected) for pair in training]
    report(1, 3, "test pairs")
    judged = pair_features(rm, test)
    report(2, 3, "samples")
    sides = rm.renderer.tokenize_sides(list(zip(samples["prompt"], samples["response"], strict=True)))
    return BackboneFeatures(
        HeadData(fitted[0] - fitted[1], np.sign(more).astype(np.int64)),
        judged,
        test,
        features(rm, sides).astype(np.float64),
        head.weight.detach().double().cpu().numpy()[0],
        rm.beta,
    )


def rows_of(
    backbone: BackboneRecipe,
    seen: BackboneFeatures,
    samples: pd.DataFrame,
    *,
    measured_prompts: int,
    planned_kl: float,
    seed: int,
) -> pd.DataFrame:
    """Every reward model on one backbone: its name, its defects, what the scores see, and the gains."""
    own = HeadRecipe("own", "none", lambda data, rng: seen.own_head)
    rows = []
    for index, recipe in enumerate([own, *heads()]):
        rng = np.random.default_rng([seed, index])
        head = recipe.fit(seen.training, rng)
        members = [_again(recipe, seen.training, rng) for _ in range(NUM_MEMBERS)]
        row: dict[str, Any] = {"recipe": backbone.recipe, "backbone": backbone.name, "head": recipe.name}
        row |= {"backbone_defect": backbone.defect, "head_defect": recipe.defect}
        row |= _on_pairs(seen, head, seed, beta=seen.beta if recipe is own else 1.0)
        row |= _on_samples(seen, head, members, samples, measured_prompts, planned_kl, seed)
        rows.append(row)
    return pd.DataFrame(rows)


def _again(recipe: HeadRecipe, data: HeadData, rng: np.random.Generator) -> FloatArray:
    """The same recipe on pairs drawn with replacement; the head that a backbone was trained with is fitted anew."""
    drawn = rng.integers(len(data.differences), size=len(data.differences))
    again = HeadData(data.differences[drawn], data.tempting[drawn])
    return (heads()[0] if recipe.name == "own" else recipe).fit(again, rng)


def _on_pairs(seen: BackboneFeatures, head: FloatArray, seed: int, *, beta: float) -> dict[str, Any]:
    """Measure on labelled pairs: accuracy, calibration, the original score with the curvature of the head."""
    chosen, rejected = seen.test @ head
    table = pd.DataFrame(
        {
            "pair_id": [pair.pair_id for pair in seen.test_pairs],
            "prompt_id": [pair.prompt_id for pair in seen.test_pairs],
            "subset": None,
            "reward_chosen": chosen,
            "reward_rejected": rejected,
            "chosen_chars": [len(pair.chosen) for pair in seen.test_pairs],
            "rejected_chars": [len(pair.rejected) for pair in seen.test_pairs],
        }
    )
    card = evaluate_pairs(table, num_resamples=NUM_RESAMPLES, seed=seed, beta=beta)
    wanted = (
        "pairwise_accuracy",
        "ece_debiased",
        "pooled_reward_variance",
        "ece_tempered_debiased",
        "length_matched_accuracy",
    )
    found = {name: card[name].value for name in wanted}
    lambda_max = _curvature(beta * (seen.test[0] - seen.test[1]), beta * (chosen - rejected))
    accuracy, ece, variance = found["pairwise_accuracy"], found["ece_debiased"], found["pooled_reward_variance"]
    if accuracy is None or ece is None or variance is None:
        raise ModelError("a reward model of the study gives both sides of every test pair the same reward.")
    v1 = RLReadinessScorer().compute_score(accuracy, ece, variance, lambda_max)
    tempered = _with_ends("ece_tempered_debiased", card["ece_tempered_debiased"])
    return found | tempered | {"lambda_max": lambda_max, "v1": v1.overall_score}


def _curvature(differences: FloatArray, log_odds: FloatArray) -> float:
    """Largest eigenvalue of the loss's Hessian with respect to the head, which is exact: the margin is linear in it.

    Both arguments are times the head's beta.
    """
    weight = 1 / (2 + 2 * np.cosh(np.clip(log_odds, -50, 50)))  # its sigmoid's derivative
    hessian = (differences * weight[:, None]).T @ differences / len(log_odds)
    return float(np.linalg.eigvalsh(hessian)[-1])


def _on_samples(
    seen: BackboneFeatures,
    head: FloatArray,
    members: Sequence[FloatArray],
    samples: pd.DataFrame,
    measured_prompts: int,
    planned_kl: float,
    seed: int,
) -> dict[str, Any]:
    """Measure the parts on judged samples of the first prompts, and the gain on the samples of all others."""
    groups = list(samples.groupby("prompt_id", sort=False).indices.values())
    rewards, gold = seen.samples @ head, samples["gold"].to_numpy(dtype=np.float64)
    lengths = samples["response"].str.len().to_numpy(dtype=np.float64)
    others = np.stack(members) @ seen.samples.T

    measured, unseen = groups[:measured_prompts], groups[measured_prompts:]
    pools = JudgedPools(
        [rewards[rows] for rows in measured],
        [gold[rows] for rows in measured],
        [lengths[rows] for rows in measured],
        [others[:, rows] for rows in measured],
    )
    row: dict[str, Any] = {}
    for name, part in on_policy_parts(pools, num_resamples=NUM_RESAMPLES, seed=seed).items():
        row |= _with_ends(name, part)
    for method in METHODS:
        settings: dict[str, Any] = {"method": method, "planned_kl": planned_kl, "num_resamples": NUM_RESAMPLES}
        seen_curve = overoptimization(pools.rewards, pools.judged, **settings)
        truth = overoptimization([rewards[rows] for rows in unseen], [gold[rows] for rows in unseen], **settings)
        plan = seen_curve.plan
        if plan is None:
            continue  # only where no KL is planned
        # At the end of the curve, best-of-64 and the optimum as far away: ties shorten the KL, and no gain is missing.
        row |= _with_ends(f"{method}_measured_gain", seen_curve.points[-1].gold)
        for name, part in (("planned_gain", plan.gain), ("planned_fall", plan.fall), ("headroom", plan.headroom)):
            row |= _with_ends(f"{method}_{name}", part)
        row |= {f"{method}_gain": truth.points[-1].gold.value, f"{method}_turned": truth.turned}
    return row


def _with_ends(name: str, found: MetricValue) -> dict[str, float | None]:
    """A value and the ends of its interval, which the gates look at."""
    return {name: found.value, f"{name}_low": found.ci_low, f"{name}_high": found.ci_high}


def seed_shares(rewards: dict[str, FloatArray], recipes: dict[str, str], samples: pd.DataFrame) -> dict[str, float]:
    """Signal share over seeds of one recipe, backbone and head trained anew, in place of heads on one backbone.

    Args:
        rewards: (N,) of the samples by each backbone with the head that it was trained with.
        recipes: of each backbone; those that share one differ by the seed alone.
        samples: N rows; their prompts are those that the scores may see.

    Returns:
        By backbone; those without a second seed are left out.
    """
    groups = list(samples.groupby("prompt_id", sort=False).indices.values())
    gold, length = samples["gold"].to_numpy(dtype=np.float64), samples["response"].str.len().to_numpy(dtype=np.float64)
    found: dict[str, float] = {}
    for recipe in dict.fromkeys(recipes.values()):
        names = [name for name in rewards if recipes[name] == recipe]
        if len(names) < 2:
            continue
        members = np.stack([rewards[name] for name in names])
        pools = JudgedPools(
            [members[0, rows] for rows in groups],
            [gold[rows] for rows in groups],
            [length[rows] for rows in groups],
            [members[:, rows] for rows in groups],
        )
        share = on_policy_parts(pools, num_resamples=1)["signal_share"].value
        if share is not None:
            found |= dict.fromkeys(names, share)
    return found
