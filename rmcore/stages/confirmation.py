"""Stage confirmation: best-of-n by the reward model, served on prompts that nothing was chosen or judged on.

The gold world draws new prompts; of other data they are the held-out ones after the first `policy.num_prompts`, which
readiness sees, in an order of chance. They are served in rounds, each as large as all before it, and the first pair
after which nothing can change what is said is the last that is judged. Writes `served.parquet` (one row a judged pair:
prompt_id, prompt, chosen, other, the rewards of both, and by how much the chosen one is better as judged),
`confirmation.json`, `figures/served.png` and `summary.json`; `unit.json`, `drawn_*.jsonl` and `judged_*.jsonl` are
where an interrupted call continues.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rmcore.config.data import GoldConfig
from rmcore.config.policy import WORLD
from rmcore.core.arrays import FloatArray
from rmcore.core.errors import ConfigError, DataError, ModelError
from rmcore.core.files import write_json
from rmcore.core.progress import Report, tell_left_out
from rmcore.core.tracking import Tracker
from rmcore.data.pair import Prompt, prompt_key, prompt_text
from rmcore.evaluation.uncertainty import MetricValue
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.policy.confirmation import NOBODY_JUDGES, ServedGain, smallest_n, verdict_of_confirmation, wins_of_gain
from rmcore.policy.judge import judge_of
from rmcore.policy.policy import Policy
from rmcore.policy.sampling.best_of_n import nominal_kl, pooled_deviation
from rmcore.policy.stopping.pair_judges import CALIBRATED, PairJudge, PeopleJudge, ScoreJudge, judge_in_turns
from rmcore.reporting.figures.served import served_figure
from rmcore.reporting.figures.style import save
from rmcore.stages.fresh_prompts import held_out_prompts, new_prompts, seen_prompts
from rmcore.stages.interface import Upstream, policy_place
from rmcore.stages.samples import answers
from rmcore.stages.settings import ConfirmationSettings
from rmcore.stages.trained import load_trained

RECORD_FILE = "confirmation.json"
FIRST_ROUND = 24
"""Prompts that are answered before the first pair is judged; each later round has as many as all before it."""
SHOWN = 3
"""Prompts whose two responses the report prints: the first ones, whatever they look like."""
ROUND_SEED = 10_007
"""Between the seeds of two rounds' samples, times the prompts between them."""


@dataclass
class Served:
    """Prompts that were served, in their order: of each the chosen response, another one, and all rewards.

    unreadable: why the reward model cannot read a response to a prompt, which then has no best one and is left out.
    """

    prompts: list[Prompt] = field(default_factory=list)
    chosen: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    rewards: list[FloatArray] = field(default_factory=list)
    """(n + 1,) each: of the pool, then of the other one."""
    unreadable: list[str] = field(default_factory=list)


def run(settings: ConfirmationSettings, upstream: Upstream, out: Path, tracker: Tracker, report: Report) -> None:
    """Serve and judge until it is decided, or there is no prompt left."""
    n = smallest_n(settings.planned_kl)
    judge = _judge(settings)
    prompts, for_unit = _prompts(settings, upstream)
    useful = wins_of_gain(settings.min_gain) if settings.people is not None else settings.min_gain
    gain = ServedGain(judge.limit, useful)
    rm = load_trained(settings, upstream["train"] / "best")
    if judge.calibrates:
        judge.scale = _unit(settings, judge, for_unit, upstream["policy"], out, report)
    served = Served()
    for first, last in _rounds(len(prompts)):
        begun = len(served.prompts)
        _serve(settings, rm, n, prompts[first:last], served, upstream["policy"], out / f"drawn_{first}.jsonl", report)
        name = f"best-of-{n}-seed{settings.seed}-from{first}"
        asked = (served.prompts[begun:], served.chosen[begun:], served.others[begun:])
        for turn in judge_in_turns(judge, name, *asked, out / f"judged_{first}.jsonl"):
            for difference in turn:
                gain.see(difference)
            low, high = gain.interval
            shown = f"pairs judged: gold {low:+.2f} to {high:+.2f} {judge.unit}"
            report(len(gain.differences), len(prompts), shown)
            if gain.is_decided:
                break
        if gain.is_decided:
            break
    if served.unreadable:
        why = f"the first is {served.unreadable[0]}"
        if not gain.differences:
            raise DataError(f"the reward model can read all responses to none of {last} prompts; {why}")
        tell_left_out(len(served.unreadable), "prompts and their responses", why)
    _write(settings, n, len(prompts), judge, gain, served, out)


def _write(
    settings: ConfirmationSettings, n: int, allowed: int, judge: PairJudge, gain: ServedGain, served: Served, out: Path
) -> None:
    num = len(gain.differences)
    rewards = np.array(served.rewards[:num])  # (num, n + 1)
    best = rewards[:, :n].max(axis=1)
    table = pd.DataFrame(
        {
            "prompt_id": [prompt_key(prompt) for prompt in served.prompts[:num]],
            "prompt": [prompt_text(prompt) for prompt in served.prompts[:num]],
            "chosen": served.chosen[:num],
            "other": served.others[:num],
            "reward_chosen": best,
            "reward_other": rewards[:, n],
            "difference": gain.differences,
        }
    )
    table.to_parquet(out / "served.parquet")
    proxy = float(np.mean(best - rewards[:, n]) / pooled_deviation(list(rewards)))
    unjudged = "it is what the response was chosen by, and says nothing of gold"
    record: dict[str, Any] = {
        "n": n,
        "kl": nominal_kl(n),
        "num_prompts": num,
        "num_allowed": allowed,
        "num_labels": num * judge.labels_per_pair + (2 * CALIBRATED if judge.calibrates else 0),
        "judge": judge.name,
        "unit": judge.unit,
        "useful_gain": gain.useful_gain,
        "is_decided": gain.is_decided,
        "gold": {"gain": gain.gain().to_dict(), "win_rate": gain.win_rate().to_dict()},
        "proxy": {"gain": MetricValue(proxy, None, None, num, unjudged).to_dict()},
        "differences": gain.differences,
        "path": gain.path,
        "examples": table[["prompt", "chosen", "other", "difference"]].head(SHOWN).to_dict("records"),
        "characters": {name: float(table[name].str.len().mean()) for name in ("chosen", "other")},
    }
    record["verdict"] = verdict_of_confirmation(record)
    (out / "figures").mkdir(exist_ok=True)
    save(served_figure(record), out / "figures" / "served.png")
    write_json(out / RECORD_FILE, record)
    write_json(out / "summary.json", {"metrics": {f"policy/served_{k}": v for k, v in record["gold"].items()}})


def _judge(settings: ConfirmationSettings) -> PairJudge:
    if settings.people is not None:
        return PeopleJudge(Path(settings.people))
    judge = judge_of(settings.judge, GoldConfig() if settings.is_gold else None, settings.device)
    if judge is None:
        raise ConfigError(NOBODY_JUDGES)
    return ScoreJudge(judge)


def _rounds(number: int) -> Iterator[tuple[int, int]]:
    first, last = 0, FIRST_ROUND
    while first < number:
        yield first, min(last, number)
        first, last = last, 2 * last


def _unit(
    settings: ConfirmationSettings,
    judge: PairJudge,
    prompts: Sequence[Prompt],
    policy: Path,
    out: Path,
    report: Report,
) -> float:
    """The judge's scale, from two samples of prompts that are not judged again: no pair has a say in its own unit."""
    file = out / "unit.json"
    if not file.is_file():
        _, rows = answers(settings, prompts, 2, policy, out / "drawn_unit.jsonl", report)
        pairs = [(prompts[int(place)], *texts) for place, texts in rows.groupby("prompt_index")["response"]]
        judge.calibrate(*(list(column) for column in zip(*pairs, strict=True)))
        write_json(file, {"scale": judge.scale})
    return float(json.loads(file.read_text(encoding="utf-8"))["scale"])


def _serve(
    settings: ConfirmationSettings,
    rm: BradleyTerryRM,
    n: int,
    prompts: Sequence[Prompt],
    served: Served,
    policy: Path,
    drawn: Path,
    report: Report,
) -> None:
    """Answer each prompt n + 1 times and choose the best of the first n.

    Raises:
        ModelError: a reward is not finite.
    """
    own = settings.model_copy(update={"seed": settings.seed + ROUND_SEED * (1 + len(served.prompts))})
    _, found = answers(own, prompts, n + 1, policy, drawn, report)
    for number, (place, rows) in enumerate(found.groupby("prompt_index", sort=True)["response"]):
        prompt, texts = prompts[int(place)], rows.tolist()
        bad = [
            side for side in rm.renderer.try_sides([(prompt, text) for text in texts]) if isinstance(side, DataError)
        ]
        if bad:
            served.unreadable.append(f"{prompt_text(prompt)[:60]!r}: {bad[0]}")
            continue
        rewards = np.asarray(rm.score([prompt] * len(texts), texts), dtype=np.float64)  # (n + 1,)
        if not np.isfinite(rewards).all():
            raise ModelError(
                f"the reward model gave a reward that is not finite to a response to {prompt_text(prompt)[:60]!r}, so "
                "no best one can be named; its weights are broken or overflow. Evaluate it first."
            )
        served.prompts.append(prompt)
        served.chosen.append(texts[int(np.argmax(rewards[:n]))])  # the first of equals
        served.others.append(texts[n])
        served.rewards.append(rewards)
        report(number + 1, len(prompts), f"best of {n} chosen")


def _prompts(settings: ConfirmationSettings, upstream: Upstream) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts that neither the reward model was trained on nor readiness has seen, and some others for the unit.

    The order is one of chance: what is seen when the test ends stands for all.

    Raises:
        DataError: too few are left.
    """
    prepared = upstream["prepare"]
    if settings.is_gold:
        drawn = new_prompts(prepared, settings.fresh_prompts + CALIBRATED, f"fresh prompts {settings.seed}")
        return drawn[CALIBRATED:], drawn[:CALIBRATED]
    lower = "policy.num_prompts (readiness is then judged on fewer)"
    left = held_out_prompts(prepared, seen=settings.num_prompts, why="readiness has seen", lower=lower)
    seen = seen_prompts(prepared, settings.num_prompts)
    if settings.name != WORLD:
        policy = Policy.load(policy_place(settings.name, upstream["policy"]))
        left, seen = (
            [every[place] for place in policy.readable_ids(every, settings.max_new_tokens)] for every in (left, seen)
        )
    rng = random.Random(f"order of fresh prompts {settings.seed}")  # noqa: S311 - data, not cryptography
    rng.shuffle(left)
    rng.shuffle(seen)
    return left[: settings.fresh_prompts], seen[:CALIBRATED]
