"""Stage grpo: the policy, trained against the reward model, and what became of the true reward.

Starts a vLLM where it is to draw the samples, and the reward server where vLLM is to score; trains once a seed
(`seed_N/`, from which an interrupted run continues) and measures on held-out prompts on the way. Writes `model/` (the
policy of the first seed, or with a watch of the first that kept a trained one), `progress.parquet`, `rollouts.parquet`,
`samples.parquet`, `rlhf.json`, `figures/rlhf.png`, with a watch `figures/watch.png`, and `summary.json`.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from rmcore.core.errors import ConfigError, DataError
from rmcore.core.files import read_json_lines, write_json
from rmcore.core.progress import Report
from rmcore.core.tracking import Tracker
from rmcore.data.pair import PreferencePair, Prompt, prompt_key
from rmcore.data.table import read_pairs
from rmcore.judging.judge import Judge
from rmcore.models.device import pick_device
from rmcore.policy.grpo.group_reward import LocalReward, RolloutScorer
from rmcore.policy.grpo.grpo import trainable_ids
from rmcore.policy.grpo.hack_stop import HackStop
from rmcore.policy.grpo.policy_meter import QUANTITIES, PolicyMeter, StartPools
from rmcore.policy.grpo.rlhf_record import curve_of, final_of, parity_of, rewards_of, verdict_of, verdict_of_watch
from rmcore.policy.grpo.rlhf_requirements import NOBODY_WATCHES, further_rewards, require_rlhf
from rmcore.policy.grpo.servers import reward_server, rollout_server
from rmcore.policy.grpo.training_run import (
    FINISHED,
    MODEL_FOLDER,
    PROGRESS,
    ROLLOUTS,
    SAMPLES,
    TrainingPlan,
    train_policy,
)
from rmcore.policy.judge import GoldJudge, audited, judge_of, readable_rewards
from rmcore.policy.policy import Policy, load_weights
from rmcore.policy.sampling.served_policy import ServedPolicy
from rmcore.policy.stopping.pair_judges import CALIBRATED, PairJudge, PeopleJudge, pair_judge_of
from rmcore.reporting.figures.style import save
from rmcore.reporting.html.rlhf import rlhf_curves_figure, watch_figure
from rmcore.stages.measurement import load_trained
from rmcore.stages.prepared import held_out_prompts, new_prompts, policy_place
from rmcore.stages.samples import SAMPLES_FILE
from rmcore.stages.stages import GrpoStage
from rmcore.training.profiling import peak_memory_bytes

RECORD_FILE = "rlhf.json"
START_SAMPLES = 64
"""Stored samples of the start policy that a trained one is compared with, of each prompt, at most."""


def run(settings: GrpoStage, out: Path, tracker: Tracker, report: Report) -> None:
    """Train, measure, judge."""
    rlhf = settings.rlhf
    require_rlhf(rlhf, settings.judge, settings.judging, is_gold=settings.is_gold)
    policy = Policy.load(policy_place(settings.policy_name, settings.policy.folder))
    judge = judge_of(settings.judge, is_gold=settings.is_gold, device=settings.device, judging=settings.judging)
    pairs = read_pairs(settings.prepared.folder / "train.parquet")
    start = _start(settings, judge)
    reward = LocalReward(load_trained(settings))
    further: tuple[Judge, ...] = ()
    if rlhf.more_rewards is not None:
        prompts = _prompts(pairs)
        prompts = [prompts[place] for place in trainable_ids(policy, prompts, settings.max_new_tokens)]
        further = further_rewards(rlhf.more_rewards, prompts, pick_device(settings.device).type)
    watched = _watched(settings, policy, judge)
    asked = settings.temperature, settings.max_new_tokens
    with (
        rollout_server(rlhf, policy, _prompts(pairs), *asked, settings.device) as served,
        reward_server(rlhf, settings.trained.folder / "best", render_fn=settings.render_fn) as scorer,
    ):
        for number in range(rlhf.num_seeds):
            place = out / f"seed_{number}"
            if (place / FINISHED).is_file():
                continue
            plan = replace(_plan(settings, policy, judge, pairs, start, reward, scorer, served, further), **watched)
            train_policy(plan, place, seed=settings.seed + number, tracker=tracker, report=report)
    record = _collect(settings, out, "nobody" if judge is None else judge.name, "local" if scorer is None else "vllm")
    if record["judge"] != "people":
        record["verdict"] = audited(record["verdict"], record["judge"], settings.judge, settings.judging)
    _draw(record, settings.overoptimization.folder / "overoptimization.json", out / "figures")
    write_json(out / RECORD_FILE, record)
    for point in record["curve"]:
        shown = {f"policy/{name}": point[name]["value"] for name in ("kl", "proxy", "gold", "win_rate") if point[name]}
        tracker.metrics(point["step"], shown)
    write_json(out / "summary.json", {"metrics": _tracked(record)})
    for number in range(rlhf.num_seeds):
        shutil.rmtree(out / f"seed_{number}")


def _watched(settings: GrpoStage, policy: Policy, judge: Judge | None) -> dict[str, Any]:
    """The watch over each training and the prompts for what it gains in the end: fields of the plan."""
    rlhf, watch = settings.rlhf, settings.rlhf.watch
    if watch is None:
        return {}
    asked: PairJudge
    if watch.people is not None:
        asked = PeopleJudge(Path(watch.people))
    elif judge is not None:
        asked = pair_judge_of(judge, settings.judging)
    else:
        raise ConfigError(NOBODY_WATCHES)
    prepared, final = settings.prepared.folder, watch.final_labels // asked.labels_per_pair
    if settings.is_gold:
        used = watch.labels // asked.labels_per_pair + CALIBRATED
        drawn = new_prompts(prepared, used + final, f"watched prompts {settings.seed}")
        prompts, fresh = drawn[:used], drawn[used:]
    else:
        left = held_out_prompts(prepared, seen=rlhf.num_prompts, why="the measurements take", lower="rlhf.num_prompts")
        left = [left[place] for place in policy.readable_ids(left, settings.max_new_tokens)]
        final = min(final, len(left) // 3)
        fresh, prompts = left[:final], left[final:]

    def make(folder: Path, seed: int) -> HackStop:
        return HackStop(
            prompts,
            asked,
            folder,
            settings=watch,
            every=rlhf.measure_every,
            temperature=settings.temperature,
            max_new_tokens=settings.max_new_tokens,
            kl_target=rlhf.kl_target,
            seed=seed,
            policy=policy,
        )

    return {"watch": make, "final_prompts": fresh}


def _start(settings: GrpoStage, judge: Judge | None) -> StartPools:
    """The stored samples of the first prompts, judged as the trained policy's will be."""
    table = pd.read_parquet(settings.samples.folder / SAMPLES_FILE)
    known = {prompt_key(pair.prompt): pair.prompt for pair in read_pairs(settings.prepared.folder / "test.parquet")}
    prompts: list[Prompt] = []
    responses: list[list[str]] = []
    for key, rows in list(table.groupby("prompt_id", sort=False))[: settings.rlhf.num_prompts]:
        prompts.append(known.get(str(key), str(rows["prompt"].iloc[0])))
        responses.append(rows["response"].tolist()[:START_SAMPLES])
    if len(prompts) < 2:
        raise DataError(
            f"{len(prompts)} held-out prompt has samples, and a measurement is over several; raise policy.num_prompts, "
            "or hold out more pairs."
        )
    gold = None
    if judge is not None and (settings.rlhf.watch is None or isinstance(judge, GoldJudge)):
        gold = [judge.rewards([prompt] * len(pool), pool) for prompt, pool in zip(prompts, responses, strict=True)]
        gold = [readable_rewards(pool, judge.name) for pool in gold]
    return StartPools(prompts, responses, gold)


def _prompts(pairs: list[PreferencePair]) -> list[Prompt]:
    """Those that the policy is trained on, each once."""
    return list(dict.fromkeys(pair.prompt for pair in pairs))


def _plan(
    settings: GrpoStage,
    policy: Policy,
    judge: Judge | None,
    pairs: list[PreferencePair],
    start: StartPools,
    reward: LocalReward,
    scorer: RolloutScorer | None,
    served: ServedPolicy | None,
    further: Sequence[Judge],
) -> TrainingPlan:
    prompts, rlhf = _prompts(pairs), settings.rlhf
    reference = load_weights(policy, torch.float32).to(pick_device(settings.device)).eval()
    # Where labels are counted, only a judge that costs nothing is asked in addition to the watch.
    meter = PolicyMeter(
        policy,
        reference,
        start,
        reward,
        judge if start.gold is not None else None,
        num_samples=rlhf.samples_per_prompt,
        temperature=settings.temperature,
        max_new_tokens=settings.max_new_tokens,
    )
    return TrainingPlan(policy, prompts, scorer or reward, meter, rlhf, settings.device, served, further)


def _collect(settings: GrpoStage, out: Path, judge: str, rewards: str) -> dict[str, Any]:
    """One record of all seeds, and their rows as tables."""
    trained = settings.rlhf
    seeds = [out / f"seed_{number}" for number in range(trained.num_seeds)]
    rows = {
        name: [
            row | {"seed": settings.seed + number}
            for number, place in enumerate(seeds)
            for row in read_json_lines(place / name)
        ]
        for name in (PROGRESS, SAMPLES, ROLLOUTS)
    }
    for name, of_all in rows.items():
        pd.DataFrame(of_all).to_parquet(out / Path(name).with_suffix(".parquet"))
    ends = [json.loads((place / FINISHED).read_text(encoding="utf-8")) for place in seeds]
    # The first seed's, or where that went back to its start the first one's that did not.
    saved = next((number for number, end in enumerate(ends) if end["watch"] and end["watch"]["kept_step"]), 0)
    if not (out / MODEL_FOLDER).is_dir():
        (seeds[saved] / MODEL_FOLDER).rename(out / MODEL_FOLDER)
    progress = pd.read_parquet(out / "progress.parquet").astype({"gold": float, "win_rate": float})
    numbers = {"num_resamples": settings.num_resamples, "seed": settings.seed}
    shared = progress.groupby("step")["seed"].nunique()
    common = shared.index[shared == trained.num_seeds]  # where a seed stopped early, the others stand alone
    curve = curve_of(progress[progress["step"].isin(common)], **numbers)
    seconds, measuring = (sum(end[name] for end in ends) for name in ("seconds", "measuring_seconds"))
    watches = [end["watch"] for end in ends]
    parity = parity_of([row for end in ends for row in end["parity"]])
    final = None if trained.watch is None else final_of(watches, **numbers)
    return {
        "rewards": rewards,
        "several": rewards_of(rows[ROLLOUTS], trained.more_rewards),
        "rollouts": "generate" if parity is None else "vllm",
        "parity": parity,
        "judge": "people" if trained.watch is not None and trained.watch.people is not None else judge,
        **trained.model_dump(
            include={"num_seeds", "prompts_per_step", "group_size", "learning_rate", "loss", "kl_beta"}
            | {"length_penalty", "samples_per_prompt"}
        ),
        "num_steps": trained.steps,
        "num_prompts": int(progress["prompt"].nunique()),
        "curve": curve,
        "seeds": [
            {
                "seed": settings.seed + number,
                "points": curve_of(progress[progress["seed"] == settings.seed + number], **numbers),
                "stopped": ends[number]["stopped"],
                "watch": ends[number]["watch"],
            }
            for number, place in enumerate(seeds)
        ],
        "final": final,
        "saved_seed": settings.seed + saved,
        "verdict": verdict_of(curve) if trained.watch is None else verdict_of_watch(watches, final),
        "cost": {
            "train_seconds": seconds,
            "measuring_seconds": measuring,
            "tokens_per_second": sum(end["num_tokens"] for end in ends) / (seconds - measuring),
            "peak_mib": peak_memory_bytes(pick_device(settings.device)) / 2**20,
        },
    }


def _draw(record: dict[str, Any], optimized: Path, folder: Path) -> None:
    curves = json.loads(optimized.read_text(encoding="utf-8")).get("curves", [])
    best_of_n = next((curve for curve in curves if curve["method"] == "best_of_n"), None)
    folder.mkdir(exist_ok=True)
    save(rlhf_curves_figure(record, best_of_n), folder / "rlhf.png")
    if record["seeds"][0]["watch"] is not None:
        save(watch_figure(record), folder / "watch.png")


def _tracked(record: dict[str, Any]) -> dict[str, Any]:
    """Names for trackers: policy/trained_kl, policy/trained_gold, ... at the last step, and what it cost."""
    last = record["curve"][-1]
    shown: dict[str, Any] = {f"policy/trained_{name}": last[name] for name in QUANTITIES if last[name] is not None}
    if record["final"] is not None:
        shown["policy/kept_gold"] = record["final"]
    return shown | {f"cost/rlhf_{name}": value for name, value in record["cost"].items()}
