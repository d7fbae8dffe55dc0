"""Stage confirmation: best-of-n by the reward model, served on prompts that nothing was chosen or judged on.

The synthetic benchmark draws new prompts; of other data they are the held-out ones after the first
`policy.num_prompts`, which readiness sees, in an order of chance. They are served in rounds, and judged in turns of as
many pairs as the judge takes together; the turn after which nothing can change what is said is the last one. Writes
`served.parquet` (one row a judged pair: prompt_id, prompt, chosen, other, the rewards of both, and by how much the
chosen one is better as judged), `confirmation.json` and `summary.json`. An interrupted call
continues from `unit.json`, `drawn_*.jsonl`, `served_*.json` and `judged_*.jsonl`.
"""

import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from rmcore.config.policy import WORLD
from rmcore.core.errors import ConfigError, DataError, ModelError
from rmcore.core.files import write_json
from rmcore.core.progress import Report, report_left_out
from rmcore.core.tracking import Tracker
from rmcore.data.pair import Prompt, prompt_key, prompt_text
from rmcore.policy.confirmation import NOBODY_JUDGES, ServedGain, smallest_n, verdict_of_confirmation, wins_of_gain
from rmcore.policy.judge import audited, judge_of
from rmcore.policy.policy import Policy
from rmcore.policy.sampling.best_of_n import nominal_kl
from rmcore.policy.stopping.pair_judges import (
    CALIBRATED,
    OrderedPairJudge,
    PairJudge,
    PeopleJudge,
    ScoreJudge,
    WinJudge,
    differ,
    judge_in_turns,
    pair_judge_of,
)
from rmcore.stages.measurement import load_trained
from rmcore.stages.prepared import FEWEST_PROMPTS, held_out_prompts, new_prompts, policy_place, seen_prompts
from rmcore.stages.samples import answers
from rmcore.stages.stages import ConfirmationStage

RECORD_FILE = "confirmation.json"
FIRST_ROUND, LARGEST_ROUND = 24, 96
"""Prompts that are answered before the first pair is judged, and in a later round at most; until then each has as many
as all before it. A round costs a start of the policy, and people get all of it to judge."""
ROUND_SEED = 10_007
"""Between the seeds of the samples of two rounds, times the prompts between them."""
TIES_AT_MOST = 100
"""Judged pairs, all ties, after which a judge is refused: one that passes 97 % does this once in 400 times."""
SHOWN = 3
"""Prompts whose two responses the report prints: the first ones, whatever they look like, and those of largest loss."""
EXAMPLE = ["prompt", "chosen", "other", "difference"]


def run(settings: ConfirmationStage, out: Path, tracker: Tracker, report: Report) -> None:
    """Serve and judge until it is decided, or there is no prompt left."""
    n, asked_of = smallest_n(settings.planned_kl), _judge(settings)
    prompts, num_fresh = _fresh_prompts(settings)
    judge, unit = _with_unit(asked_of, settings, out, report)
    useful = settings.min_gain if judge.calibrates else wins_of_gain(settings.min_gain)
    gain = ServedGain(judge.limit, useful, is_clipped=judge.calibrates)
    served: list[dict[str, Any]] = []
    unreadable: list[str] = []

    def turns() -> Iterator[list[float]]:
        for first, last in _rounds(len(prompts)):
            rows, bad = _served(settings, n, prompts[first:last], first, out, report)
            served.extend(rows)
            unreadable.extend(bad)
            asked = [prompts[row["place"]] for row in rows]
            chosen, others = ([row[side] for row in rows] for side in ("chosen", "other"))
            name = f"best-of-{n}-seed{settings.seed}-prompts{first + 1}to{last}"
            yield from judge_in_turns(judge, name, asked, chosen, others, out / f"judged_{first}.jsonl")

    judged: list[dict[str, Any]] = []
    num_turned, is_decided = 0, False
    for turn in turns():
        for difference in turn:
            if not math.isnan(difference):  # else the judge's reply could not be read
                gain.see(difference)
                judged.append(served[num_turned])
                is_decided = is_decided or gain.is_decided  # it looks after certain numbers of pairs alone
            num_turned += 1
        low, high = gain.interval
        done = len(gain.differences)
        report(done, len(prompts), f"pairs judged: gain {low:+.2f} to {high:+.2f} {judge.unit}")
        _refuse_constant(judge, gain.differences)
        if is_decided:
            break
    num_unread, served = num_turned - len(judged), judged  # the last round was not needed to its end
    if unreadable:
        why = f"the first is {unreadable[0]}"
        if not num_turned:
            raise DataError(f"the reward model can read all responses to none of {len(prompts)} prompts; {why}")
        report_left_out(len(unreadable), "prompts and their responses", why)
    if not served:
        raise DataError(f"{judge.name} gave no readable judgement of any of {num_turned} pairs; see above.")
    is_asked = [settings.people is None or differ(row["chosen"], row["other"]) for row in served]
    labels = unit["num_labels"] + judge.labels_per_pair * sum(is_asked)
    counts = {
        **{"num_allowed": len(prompts), "num_fresh": num_fresh},
        **{"num_labels": labels + judge.labels_per_pair * num_unread, "num_unread": num_unread},
    }
    record = _record(n, prompts, judge, gain, served, counts | {"unit_error": unit["error"]}, out)
    record["verdict"] = audited(record["verdict"], judge.name, settings.judge, settings.judging)
    write_json(out / RECORD_FILE, record)
    write_json(out / "summary.json", {"metrics": {f"policy/served_{k}": v for k, v in record["gold"].items()}})


def _record(
    n: int,
    prompts: Sequence[Prompt],
    judge: PairJudge,
    gain: ServedGain,
    served: Sequence[dict[str, Any]],
    counts: dict[str, Any],
    out: Path,
) -> dict[str, Any]:
    """Write the table of judged pairs, and give the record of all of them."""
    rewards = np.array([row["rewards"] for row in served])  # (P, n + 1): of the pool, then of the other one
    best, other = rewards[:, :n].max(axis=1), rewards[:, n]
    table = pd.DataFrame(
        {
            "prompt_id": [prompt_key(prompts[row["place"]]) for row in served],
            "prompt": [prompt_text(prompts[row["place"]]) for row in served],
            "chosen": [row["chosen"] for row in served],
            "other": [row["other"] for row in served],
            "reward_chosen": best,
            "reward_other": other,
            "difference": gain.differences,
        }
    )
    table.to_parquet(out / "served.parquet")
    record: dict[str, Any] = {
        "n": n,
        "kl": nominal_kl(n),
        "num_prompts": len(served),
        **counts,
        "judge": judge.name,
        "unit": judge.unit,
        "useful_gain": gain.useful_gain,
        "is_decided": gain.is_decided,
        "gold": {
            "gain": gain.gain().to_dict(),
            "unclipped_gain": gain.unclipped().to_dict(),
            "win_rate": gain.win_rate().to_dict(),
        },
        "clipped_share": gain.clipped_share,
        "doubt": gain.doubt,
        "differences": gain.differences,
        "path": gain.path,
        "examples": table[EXAMPLE].head(SHOWN).to_dict("records"),
        "worst": table[EXAMPLE].nsmallest(SHOWN, "difference").to_dict("records"),
        "characters": {name: float(table[name].str.len().mean()) for name in ("chosen", "other")},
    }
    record["verdict"] = verdict_of_confirmation(record)
    return record


def _judge(settings: ConfirmationStage) -> PeopleJudge | ScoreJudge | OrderedPairJudge:
    if settings.people is not None:
        return PeopleJudge(Path(settings.people))
    judge = judge_of(settings.judge, is_gold=settings.is_gold, device=settings.device, judging=settings.judging)
    if judge is None:
        raise ConfigError(NOBODY_JUDGES)
    return pair_judge_of(judge, settings.judging)


def _with_unit(
    judge: PeopleJudge | ScoreJudge | OrderedPairJudge, settings: ConfirmationStage, out: Path, report: Report
) -> tuple[PairJudge, dict[str, Any]]:
    """The judge whose differences have a unit; the unit's scale and relative error, None without one, and its labels.

    The unit comes from samples of prompts that are not judged again: no pair has a say in its own unit. A judge who
    finds most of them equal has none, and its wins are counted.
    """
    if not isinstance(judge, ScoreJudge):
        return judge, {"scale": None, "error": None, "num_labels": 0}
    file = out / "unit.json"
    if not file.is_file():
        prompts = _unit_prompts(settings)
        pairs_each = -(-CALIBRATED // len(prompts))
        _, rows = answers(settings, prompts, 2 * pairs_each, out / "drawn_unit.jsonl", report)
        asked, first, second = [], [], []
        for place, texts in rows.groupby("prompt_index", sort=True)["response"]:
            for start in range(0, 2 * pairs_each, 2):
                asked.append(prompts[int(place)])
                first.append(texts.iloc[start])
                second.append(texts.iloc[start + 1])
        scale, error = judge.unit_of(asked, first, second) or (None, None)
        write_json(file, {"scale": scale, "error": error, "num_labels": 2 * len(asked)})
    unit: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if unit["scale"] is None:
        return WinJudge(judge.judge), unit
    judge.scale = unit["scale"]
    return judge, unit


def _refuse_constant(judge: PairJudge, differences: Sequence[float]) -> None:
    if len(differences) >= TIES_AT_MOST and not any(differences):
        raise DataError(
            f"{judge.name} finds the best of n and another response equally good on all of {len(differences)} prompts. "
            "A judge that gives constants, or a policy that always answers alike, cannot be judged."
        )


def _rounds(number: int) -> Iterator[tuple[int, int]]:
    first, last = 0, FIRST_ROUND
    while first < number:
        yield first, min(last, number)
        first, last = last, last + min(last, LARGEST_ROUND)


def _served(
    settings: ConfirmationStage, n: int, prompts: Sequence[Prompt], first: int, out: Path, report: Report
) -> tuple[list[dict[str, Any]], list[str]]:
    """Answer each prompt n + 1 times and choose the best of the first n; read where that was done before.

    Returns:
        A row a prompt: its place among all, the chosen response, the other one, all n + 1 rewards; and of those left
        out why the reward model cannot read a response, without which there is no best one.
    """
    file = out / f"served_{first}.json"
    if not file.is_file():
        own = settings.changed(seed=settings.seed + ROUND_SEED * (1 + first))
        _, found = answers(own, prompts, n + 1, out / f"drawn_{first}.jsonl", report)
        rm = load_trained(settings)  # after vLLM, if that drew, has given the memory back
        rows, unreadable = [], []
        for number, (place, texts) in enumerate(found.groupby("prompt_index", sort=True)["response"]):
            prompt, pool = prompts[int(place)], texts.tolist()
            bad = [
                one for one in rm.renderer.try_sides([(prompt, text) for text in pool]) if isinstance(one, DataError)
            ]
            if bad:
                unreadable.append(f"{prompt_text(prompt)[:60]!r}: {bad[0]}")
                continue
            rewards = np.asarray(rm.score([prompt] * len(pool), pool), dtype=np.float64)  # (n + 1,)
            if not np.isfinite(rewards).all():
                raise ModelError(
                    f"the reward model gave a reward that is not finite to a response to {prompt_text(prompt)[:60]!r}, "
                    "so no best one can be named; its weights are broken or overflow. Evaluate it first."
                )
            chosen = pool[int(np.argmax(rewards[:n]))]  # the first of equals
            rows.append({"place": first + int(place), "chosen": chosen, "other": pool[n], "rewards": rewards.tolist()})
            report(number + 1, len(prompts), f"best of {n} chosen")
        del rm
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        write_json(file, {"rows": rows, "unreadable": unreadable})
    kept = json.loads(file.read_text(encoding="utf-8"))
    return kept["rows"], kept["unreadable"]


def _fresh_prompts(settings: ConfirmationStage) -> tuple[list[Prompt], int | None]:
    """Prompts that neither the reward model was trained on nor readiness has seen, and how many there are.

    None: as many as one likes. Their order is one of chance: those that are judged when it ends stand for all.
    """
    prepared = settings.prepared.folder
    if settings.is_gold:
        return new_prompts(prepared, settings.fresh_prompts, f"fresh prompts {settings.seed}"), None
    lower = "policy.num_prompts (readiness is then judged on fewer)"
    left = held_out_prompts(prepared, seen=settings.num_prompts, why="readiness has seen", lower=lower)
    left = _in_chance_order(settings, left, "fresh")
    if len(left) < FEWEST_PROMPTS:
        raise DataError(
            f"the policy can answer {len(left)} of the fresh prompts, and a gain over fewer than {FEWEST_PROMPTS} says "
            "little. Hold out more, or shorter ones."
        )
    return left[: settings.fresh_prompts], len(left)


def _unit_prompts(settings: ConfirmationStage) -> list[Prompt]:
    """Prompts that are not served: new ones of the synthetic benchmark, else of those that readiness sees."""
    if settings.is_gold:
        return new_prompts(settings.prepared.folder, CALIBRATED, f"prompts of the unit {settings.seed}")
    seen = seen_prompts(settings.prepared.folder, settings.num_prompts)
    return _in_chance_order(settings, seen, "seen")[:CALIBRATED]


def _in_chance_order(settings: ConfirmationStage, prompts: Sequence[Prompt], name: str) -> list[Prompt]:
    """Those that the policy can answer, shuffled."""
    left = list(prompts)
    if settings.policy_name != WORLD:
        policy = Policy.load(policy_place(settings.policy_name, settings.policy.folder))
        left = [left[place] for place in policy.readable_ids(left, settings.max_new_tokens)]
    random.Random(f"order of {name} prompts {settings.seed}").shuffle(left)  # noqa: S311 - data, not cryptography
    return left
