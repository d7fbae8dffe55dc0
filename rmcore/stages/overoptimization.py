"""Stage overoptimization: what choosing among the policy's samples by this reward model would do to the true reward.

Scores the stored samples in one pass and measures best-of-n, the KL-regularised optimum and the parts of readiness
that need samples. Writes `rewards.parquet`, `overoptimization.json`, a figure and `summary.json`. Without a judge's
rewards only what needs none.
"""

import json
import sys
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rmcore.config.judging import JudgingConfig
from rmcore.core.errors import DataError
from rmcore.core.files import write_json
from rmcore.core.progress import Report
from rmcore.core.tracking import Tracker
from rmcore.data.pair import Prompt, prompt_key, prompt_text
from rmcore.data.readers.turns import asked_prompt
from rmcore.data.splits import compared_prompt
from rmcore.data.table import read_pairs
from rmcore.evaluation.uncertainty import MetricValue, t_interval
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.policy.judge import judge_noise
from rmcore.policy.overoptimization import METHODS, OptimizationPlan, overoptimization
from rmcore.policy.sampling.best_of_n import best_of_n_kl, best_of_n_weights, by_unit, nominal_kl
from rmcore.policy.sampling.samples import pools, score_samples
from rmcore.readiness.components import JudgedPools, gains_by_length, on_policy_parts
from rmcore.readiness.judged_answers import TRAINED_ON
from rmcore.reporting.figures.style import save
from rmcore.reporting.html.policy import overoptimization_figure
from rmcore.stages.measurement import load_trained
from rmcore.stages.prepared import NOT_KNOWN_OF, seen_by
from rmcore.stages.samples import FEWEST, LEFT_OUT_FILE, SAMPLES_FILE, UNJUDGED_FILE
from rmcore.stages.stages import OveroptimizationStage

UNJUDGED = {
    "unjudged": "{unjudged} of {samples} samples have no judgement; they are left out",
    "prompts_left_out": "{prompts_left_out} of {prompts} prompts have fewer than "
    f"{FEWEST} judged samples; they are left out",
}
"""Sentences on what was left out for want of a judgement, by what the stage samples counts."""
ALL_JUDGED = (
    "whether samples without a judgement were drawn is not known, as the file has none: the gain is that of a choice "
    "among samples like the judged ones"
)
WORST_SHOWN = 5
"""Prompts of the least gain that the report prints."""


def run(settings: OveroptimizationStage, out: Path, tracker: Tracker, report: Report) -> None:
    """Score the samples with the best checkpoint and measure."""
    prepared, drawn = settings.prepared.folder, settings.samples.folder
    samples = pd.read_parquet(drawn / SAMPLES_FILE)
    samples, left_out = not_trained_on(samples, seen_by(settings.trained.folder, prepared))
    given = json.loads((drawn / LEFT_OUT_FILE).read_text())
    left_out += [said.format(**given) for name, said in UNJUDGED.items() if given.get(name)]
    rm = load_trained(settings)
    scored = score_samples(rm, samples.assign(prompt=_prompts(prepared, samples)), report)
    asked = scored.samples.assign(reward=scored.rewards)
    table = asked.assign(prompt=asked["prompt"].map(prompt_text), length=asked["response"].str.len())
    table.drop(columns=["prompt", "response"]).to_parquet(out / "rewards.parquet")
    record: dict[str, Any] = {
        "num_cut": scored.num_cut,
        "num_unreadable": scored.num_unreadable,
        "left_out": left_out,
        "num_unjudged_prompts": given.get("prompts_left_out", 0),
        "num_chosen_unjudged": 0,
        "best_of_n": _choices(table),
        "judge": settings.judged_by,
    }
    if np.isfinite(table["gold"]).all():
        record |= _judged(settings, table, out / "figures")
        if given.get("unjudged"):
            unjudged = pd.read_parquet(drawn / UNJUDGED_FILE)
            score = partial(_scored, rm, prepared, report)
            said, record["num_chosen_unjudged"] = judged_part(table, unjudged, score)
            left_out.extend(said)
        elif given.get("is_file"):
            left_out.append(ALL_JUDGED)
    write_json(out / "overoptimization.json", record)
    write_json(out / "summary.json", {"metrics": _tracked(record)})


def not_trained_on(samples: pd.DataFrame, seen: Collection[str] | None) -> tuple[pd.DataFrame, list[str]]:
    """The samples of prompts that the reward model was not trained on, and what is to be said of the others.

    Args:
        samples: with the column prompt.
        seen: prompts as `compared_prompt` gives them; None: not known.

    Raises:
        DataError: it was trained on all of them.
    """
    if seen is None:
        return samples, [NOT_KNOWN_OF.format("this reward model")]
    texts = samples["prompt"].unique()
    known = [text for text in texts if compared_prompt(asked_prompt(text)) in seen]
    if not known:
        return samples, []
    left_out = f"{len(known)} of {len(texts)} {TRAINED_ON}; they are left out"
    if len(known) == len(texts):
        raise DataError(f"{left_out}. Draw and judge samples of prompts that it was not trained on.")
    print(f"warning: {left_out}.", file=sys.stderr)
    return samples[~samples["prompt"].isin(known)].reset_index(drop=True), [left_out]


def judged_part(
    judged: pd.DataFrame, unjudged: pd.DataFrame, score: Callable[[pd.DataFrame], pd.DataFrame]
) -> tuple[list[str], int]:
    """Compare the judged samples with all; on how many prompts another one is chosen if they differ in length.

    Where they do not, choices of unjudged samples are like those of judged ones as far as is known, and the other
    samples are not scored.

    Args:
        judged: columns prompt_id, response, unit and reward.
        unjudged: columns prompt_id, prompt and response.
        score: adds the column reward, in logits, to such rows.

    Returns:
        What is to be said, and the number of prompts.
    """
    unjudged = unjudged[unjudged["prompt_id"].isin(judged["prompt_id"])].reset_index(drop=True)
    apart = length_of_judged(judged, unjudged)
    if apart.value is None:
        return [], 0
    everything = pd.concat([judged["response"], unjudged["response"]]).str.len().mean()
    mean = f"{judged['response'].str.len().mean():,.0f} characters against {everything:,.0f} of all samples"
    low, high = apart.ci_low, apart.ci_high
    ends = "" if low is None or high is None else f" ({apart.value:+,.0f} a prompt, {low:+,.0f} to {high:+,.0f})"
    if low is None or high is None or low <= 0 <= high:
        return [f"the judged samples are not shown to differ from all in length: {mean}{ends}"], 0
    best, other = (table.groupby("prompt_id")["reward"].max() for table in (judged, score(unjudged)))
    number = int((other > best.reindex(other.index)).sum())
    kind, others = ("shorter", "longer") if apart.value < 0 else ("longer", "shorter")
    return [
        f"the judged samples are {kind} than all: {mean}{ends}; the gain among them says nothing of the {others} ones, "
        f"and on {number} of {judged['prompt_id'].nunique()} prompts the reward model prefers a sample without a "
        "judgement"
    ], number


def length_of_judged(judged: pd.DataFrame, unjudged: pd.DataFrame) -> MetricValue:
    """By how many characters the judged samples of a prompt are longer than all of its samples, on average.

    Args:
        judged: columns prompt_id, response and unit.
        unjudged: columns prompt_id and response.

    Returns:
        The mean over independent units of prompts that have both kinds, with its t interval; without a value where
        there is none.
    """
    judged_length, unjudged_length = (
        table["response"].str.len().groupby(table["prompt_id"]).agg(["sum", "size"]) for table in (judged, unjudged)
    )
    judged_length = judged_length.loc[judged_length.index.intersection(unjudged_length.index)]
    if judged_length.empty:
        return MetricValue(None, None, None, 0)
    total = judged_length + unjudged_length.loc[judged_length.index]
    apart = judged_length["sum"] / judged_length["size"] - total["sum"] / total["size"]
    units = judged.drop_duplicates("prompt_id").set_index("prompt_id")["unit"]
    return t_interval(by_unit(apart.to_numpy(), units[apart.index].to_numpy()))


def _scored(rm: BradleyTerryRM, prepared: Path, report: Report, samples: pd.DataFrame) -> pd.DataFrame:
    found = score_samples(rm, samples.assign(prompt=_prompts(prepared, samples)), report)
    return found.samples.assign(reward=found.rewards)


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


def _judged(settings: OveroptimizationStage, table: pd.DataFrame, folder: Path) -> dict[str, Any]:
    """Everything that needs the true reward."""
    rewards, gold = pools(table, "prompt_id", "reward"), pools(table, "prompt_id", "gold")
    units = table.drop_duplicates("prompt_id")["unit"].tolist()
    curves = [
        overoptimization(
            rewards,
            gold,
            method=method,
            planned_kl=settings.planned_kl,
            units=units,
            num_resamples=settings.num_resamples,
            seed=settings.seed,
        )
        for method in METHODS
    ]
    given, asked = settings.judge_ceiling, settings.judging or JudgingConfig()
    ceiling, error = judge_noise(settings.judge, asked) if given is None else (given, 0.0)
    judged = JudgedPools(rewards, gold, pools(table, "prompt_id", "length"))
    parts = on_policy_parts(
        judged,
        judge_ceiling=ceiling,
        judge_ceiling_error=error,
        units=units,
        num_resamples=settings.num_resamples,
        seed=settings.seed,
    )
    by_length = {
        method: gains_by_length(
            judged,
            method=method,
            planned_kl=settings.planned_kl,
            units=units,
            num_resamples=settings.num_resamples,
            seed=settings.seed,
        )
        for method in METHODS
    }
    worst = {curve.method: _worst(table, curve.plan) for curve in curves}
    folder.mkdir(exist_ok=True)
    records = [curve.to_dict() for curve in curves]
    save(overoptimization_figure("reward model", records), folder / "overoptimization.png")
    return {
        "curves": records,
        "worst_prompts": worst,
        "parts": {name: value.to_dict() for name, value in parts.items()},
        "by_length": {
            method: {name: value.to_dict() for name, value in found.items()} for method, found in by_length.items()
        },
    }


def _worst(table: pd.DataFrame, plan: OptimizationPlan) -> list[dict[str, Any]]:
    """The prompts where the plan gains least, with the sample that the reward model likes best, for people to read."""
    best = table.loc[table.groupby("prompt_id", sort=False)["reward"].idxmax(), ["prompt", "response"]]
    known = best.assign(gain=np.array(plan.by_prompt, dtype=np.float64)).dropna(subset="gain")
    return known.nsmallest(WORST_SHOWN, "gain").to_dict("records")


def _tracked(record: dict[str, Any]) -> dict[str, Any]:
    """Names for trackers: policy/kl_64, ready/on_policy_accuracy, ..."""
    last = record["best_of_n"][-1]
    shown: dict[str, Any] = {f"policy/best_of_{last['n']}_kl": last["kl"]}
    shown |= {f"ready/{name}": value for name, value in record.get("parts", {}).items()}
    for curve in record.get("curves", []):
        shown[f"ready/{curve['method']}_planned_gain"] = curve["plan"]["gain"]
        shown[f"ready/{curve['method']}_planned_fall"] = curve["plan"]["fall"]
    return shown
