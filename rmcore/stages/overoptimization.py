"""Stage overoptimization: what choosing among the policy's samples by this reward model would do to the gold reward.

Scores the stored samples in one pass and measures best-of-n, the KL-regularised optimum, the parts of readiness that
need samples, conservative rewards of an ensemble of heads, and the noise of the policy gradient. Writes
`rewards.parquet`, `overoptimization.json`, `tables/`, figures and `summary.json`. Without a judge's rewards
only what needs none.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from transformers import AutoModelForCausalLM

from rmcore.core.files import write_json
from rmcore.core.progress import Report, labelled
from rmcore.core.tracking import Tracker
from rmcore.data.pair import Prompt, prompt_key, prompt_text
from rmcore.data.readers.fields import asked_prompt
from rmcore.data.table import read_pairs
from rmcore.models.device import pick_device
from rmcore.models.loading import guard
from rmcore.policy.conservative import conservative_gains, disagreement_along_n
from rmcore.policy.grpo.gradient_variance import gradient_variance
from rmcore.policy.overoptimization import METHODS, overoptimization
from rmcore.policy.policy import Policy
from rmcore.policy.readiness.components import JudgedPools, on_policy_parts
from rmcore.policy.sampling.best_of_n import best_of_n_kl, best_of_n_weights, nominal_kl
from rmcore.policy.sampling.samples import pools
from rmcore.policy.sampling.scored_samples import ScoredSamples, score_samples
from rmcore.policy.sft import Example
from rmcore.reporting.figures.overoptimization import overoptimization_figure
from rmcore.reporting.figures.policy import disagreement_by_gain_figure
from rmcore.reporting.figures.style import save
from rmcore.stages.interface import Upstream, policy_place
from rmcore.stages.samples import SAMPLES_FILE
from rmcore.stages.settings import OveroptimizationSettings
from rmcore.stages.trained import load_trained

GRADIENT_SAMPLES = 16
"""Samples of each prompt that the policy gradient is estimated from."""
FEWEST_GRADIENTS = 3
"""Fewest gradients of a prompt that tell a variance; a prompt with fewer is left out."""
MEMBER_PAIRS = 2000
"""Training pairs that the member heads are fitted on, at most."""


def run(settings: OveroptimizationSettings, upstream: Upstream, out: Path, tracker: Tracker, report: Report) -> None:
    """Score the samples with the best checkpoint and measure."""
    samples = pd.read_parquet(upstream["samples"] / SAMPLES_FILE)
    rm = load_trained(settings, upstream["train"] / "best")
    training = read_pairs(upstream["prepare"] / "train.parquet", MEMBER_PAIRS)
    asked = samples.assign(prompt=_prompts(upstream["prepare"], samples))
    scored = score_samples(rm, asked, training, num_members=settings.num_members, seed=settings.seed, report=report)
    asked = scored.samples.assign(reward=scored.rewards)
    table = asked.assign(prompt=asked["prompt"].map(prompt_text), length=asked["response"].str.len())
    table.drop(columns=["prompt", "response"]).to_parquet(out / "rewards.parquet")
    record: dict[str, Any] = {
        "num_cut": scored.num_cut,
        "num_unreadable": scored.num_unreadable,
        "best_of_n": _choices(table),
        "judge": settings.judge,
    }
    _write_chosen(table, out / "tables")
    if settings.gradient_prompts:
        record |= _gradient(settings, policy_place(settings.name, upstream["policy"]), asked, report)
    if np.isfinite(table["gold"]).all():
        record |= _judged(settings, table, scored, out / "figures")
    write_json(out / "overoptimization.json", record)
    write_json(out / "summary.json", {"metrics": _tracked(record)})


def _prompts(prepared: Path, samples: pd.DataFrame) -> list[Prompt]:
    """Give the prompt that each sample answers, dialogues as their turns: samples are stored with the text alone."""
    prompts = {prompt_key(pair.prompt): pair.prompt for pair in read_pairs(prepared / "test.parquet")}
    found = zip(samples["prompt_id"], samples["prompt"], strict=True)
    return [prompts.get(key) or asked_prompt(text) for key, text in found]


def _choices(table: pd.DataFrame) -> list[dict[str, float]]:
    """Best-of-n without a judge: its KL, and how far the reward rises, in logits."""
    rewards = pools(table, "prompt_id", "reward")
    smallest = min(map(len, rewards))
    return [
        {
            "n": n,
            "kl": float(np.mean([best_of_n_kl(pool, n) for pool in rewards])),
            "nominal_kl": nominal_kl(n),
            "reward": float(np.mean([best_of_n_weights(pool, n) @ pool for pool in rewards])),
        }
        for n in (2**power for power in range(smallest.bit_length()))
        if n <= smallest
    ]


def _write_chosen(table: pd.DataFrame, folder: Path) -> None:
    """The sample of each prompt that the reward model likes best, for people to read."""
    folder.mkdir(exist_ok=True)
    chosen = table.loc[table.groupby("prompt_id", sort=False)["reward"].idxmax()]
    chosen[["prompt", "response", "reward", "gold"]].to_csv(folder / "chosen_samples.csv", index=False)


def _judged(
    settings: OveroptimizationSettings, table: pd.DataFrame, scored: ScoredSamples, folder: Path
) -> dict[str, Any]:
    """Everything that needs the gold reward."""
    rewards, gold = pools(table, "prompt_id", "reward"), pools(table, "prompt_id", "gold")
    numbers = {"num_resamples": settings.num_resamples, "seed": settings.seed}
    curves = [
        overoptimization(
            rewards,
            gold,
            method=method,
            max_n=max(map(len, rewards)),
            planned_kl=settings.planned_kl,
            **numbers,
        ).to_dict()
        for method in METHODS
    ]
    members = [scored.members[:, rows] for rows in table.groupby("prompt_id", sort=False).indices.values()]
    judged = JudgedPools(rewards, gold, pools(table, "prompt_id", "length"), members)
    parts = on_policy_parts(judged, judge_ceiling=settings.judge_ceiling, **numbers)
    conservative = conservative_gains(rewards, members, gold, **numbers)
    along = disagreement_along_n(rewards, members, **numbers)
    folder.mkdir(exist_ok=True)
    save(overoptimization_figure("reward model", curves), folder / "overoptimization.png")
    save(disagreement_by_gain_figure(along, conservative), folder / "ensemble_disagreement.png")
    return {
        "curves": curves,
        "num_telling_prompts": judged.num_telling_prompts,
        "parts": {name: value.to_dict() for name, value in parts.items()},
        "conservative": conservative,
        "disagreement": along,
    }


def _gradient(settings: OveroptimizationSettings, place: str, table: pd.DataFrame, report: Report) -> dict[str, Any]:
    """The noise of the policy gradient on the first prompts, with rewards in standard deviations within prompts.

    Empty where no prompt has samples enough.
    """
    policy = Policy.load(place)
    folder = policy.weights()
    model = guard(str(folder), lambda: AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True))
    model.to(pick_device(settings.device)).eval()
    ends = policy.stop_ids[:1]
    examples, rewards = [], []
    for _, rows in list(table.groupby("prompt_id", sort=False))[: settings.gradient_prompts]:
        taken = rows[:GRADIENT_SAMPLES]
        prompt = tuple(policy.prompt_ids(taken["prompt"].iloc[0]))
        texts = zip(taken["response"], taken["finished"], strict=True)
        ids = [(*policy.reader.response_ids(text), *(ends if finished else ())) for text, finished in texts]
        kept = [index for index, one in enumerate(ids) if one]  # no token, nothing that a gradient could be of
        if len(kept) >= FEWEST_GRADIENTS:
            examples.append([Example(prompt, ids[index]) for index in kept])
            rewards.append(taken["reward"].to_numpy()[kept])
    if not examples:
        return {}
    scale = float(np.sqrt(np.mean([pool.var(ddof=1) for pool in rewards]))) or 1.0
    found = gradient_variance(
        model,
        examples,
        [pool / scale for pool in rewards],
        labelled(report, "policy gradients"),
    )
    return {"gradient": found.to_dict()}


def _tracked(record: dict[str, Any]) -> dict[str, Any]:
    """Names for trackers: policy/kl_64, ready/on_policy_accuracy, ..."""
    last = record["best_of_n"][-1]
    shown: dict[str, Any] = {f"policy/best_of_{last['n']}_kl": last["kl"]}
    shown |= {f"ready/{name}": value for name, value in record.get("parts", {}).items()}
    for curve in record.get("curves", []):
        shown[f"ready/{curve['method']}_planned_gain"] = curve["plan"]["gain"]
        shown[f"ready/{curve['method']}_planned_fall"] = curve["plan"]["fall"]
        shown[f"ready/{curve['method']}_headroom"] = curve["plan"]["headroom"]
    if "gradient" in record:
        gradient = record["gradient"]
        if gradient["bound"]:  # else all samples of those prompts have one reward
            shown["policy/gradient_variance_to_bound"] = gradient["variance"] / gradient["bound"]
        shown["policy/gradient_product_violations"] = gradient["num_violations"] / gradient["num_prompts"]
    return shown
