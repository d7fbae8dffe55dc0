"""Stage confirmation: best-of-n by the reward model, served on prompts that nothing was chosen or judged on.

The gold world draws new prompts; of other data they are the held-out ones after the first `policy.num_prompts`, which
readiness sees. Writes `served.parquet` (one row a judged response: prompt_id, prompt, response, chosen, reward, gold),
`drawn.jsonl` and `judged.jsonl`, where an interrupted call continues, `confirmation.json` and `summary.json`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rmcore.config.data import GoldConfig
from rmcore.core.errors import ConfigError, DataError, ModelError
from rmcore.core.files import append_json_lines, read_json_lines, write_json
from rmcore.core.progress import Report, tell_left_out
from rmcore.core.tracking import Tracker
from rmcore.data.pair import Prompt, prompt_key, prompt_text
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.policy.confirmation import OPPONENTS, confirm, smallest_n, verdict_of_confirmation
from rmcore.policy.judge import Judge, judge_of
from rmcore.policy.sampling.best_of_n import nominal_kl
from rmcore.stages.fresh_prompts import FEWEST_PROMPTS, held_out_prompts, new_prompts
from rmcore.stages.interface import Upstream
from rmcore.stages.samples import answers
from rmcore.stages.settings import ConfirmationSettings
from rmcore.stages.trained import load_trained

RECORD_FILE = "confirmation.json"


def run(settings: ConfirmationSettings, upstream: Upstream, out: Path, tracker: Tracker, report: Report) -> None:
    """Draw, choose, judge."""
    judge = judge_of(settings.judge, GoldConfig() if settings.is_gold else None, settings.device)
    if judge is None:
        raise ConfigError(
            "who judges what best-of-n gives is unknown: only the gold world judges itself. Name a function of "
            "(prompt, response) in policy.judge."
        )
    n = smallest_n(settings.planned_kl)
    prompts = _fresh_prompts(settings, upstream["prepare"])
    _, found = answers(settings, prompts, n + OPPONENTS, upstream["policy"], out / "drawn.jsonl", report)
    answered = {int(place): rows.tolist() for place, rows in found.groupby("prompt_index", sort=True)["response"]}
    rm = load_trained(settings, upstream["train"] / "best")
    prompts, responses = _readable(rm, [(prompts[place], pool) for place, pool in answered.items()])
    table = _judged(rm, judge, n, prompts, responses, out / "judged.jsonl", report)
    table.to_parquet(out / "served.parquet")
    record: dict[str, Any] = {
        "n": n,
        "kl": nominal_kl(n),
        "num_prompts": len(prompts),
        "num_judged": len(table),
        "judge": judge.name,
        "min_gain": settings.min_gain,
    }
    for name in ("gold", "reward"):
        values = table[name].to_numpy(dtype=np.float64).reshape(len(prompts), 1 + OPPONENTS)
        gains = confirm(values[:, 0], values[:, 1:], num_resamples=settings.num_resamples, seed=settings.seed)
        record["proxy" if name == "reward" else name] = {key: value.to_dict() for key, value in gains.items()}
    lengths = table["response"].str.len().to_numpy(dtype=np.float64).reshape(len(prompts), 1 + OPPONENTS)
    record["characters"] = {"chosen": float(lengths[:, 0].mean()), "others": float(lengths[:, 1:].mean())}
    record["verdict"] = verdict_of_confirmation(record)
    write_json(out / RECORD_FILE, record)
    write_json(out / "summary.json", {"metrics": {f"policy/served_{k}": v for k, v in record["gold"].items()}})


def _readable(rm: BradleyTerryRM, answered: Sequence[tuple[Prompt, list[str]]]) -> tuple[list[Prompt], list[list[str]]]:
    """The prompts whose responses the reward model can all read: of no others can the best one be named.

    Raises:
        DataError: too few are left.
    """
    kept, errors = [], []
    for prompt, pool in answered:
        bad = [side for side in rm.renderer.try_sides([(prompt, text) for text in pool]) if isinstance(side, DataError)]
        if bad:
            errors.append(f"{prompt_text(prompt)[:60]!r}: {bad[0]}")
        else:
            kept.append((prompt, pool))
    if errors and len(kept) < FEWEST_PROMPTS:
        raise DataError(
            f"the reward model can read all responses to {len(kept)} of {len(answered)} prompts, and at least "
            f"{FEWEST_PROMPTS} are needed; the first that it cannot read is to {errors[0]}"
        )
    if errors:
        tell_left_out(len(errors), "prompts and their responses", f"the first is {errors[0]}")
    return [prompt for prompt, _ in kept], [pool for _, pool in kept]


def _judged(
    rm: BradleyTerryRM,
    judge: Judge,
    n: int,
    prompts: Sequence[Prompt],
    responses: Sequence[list[str]],
    kept: Path,
    report: Report,
) -> pd.DataFrame:
    """The chosen response of each prompt and those it was not chosen from, judged: `1 + OPPONENTS` rows a prompt.

    Judgements are what costs, so each prompt's are in `kept` before the next prompt is asked for.
    """
    done = len(read_json_lines(kept))
    for index, (prompt, drawn) in enumerate(zip(prompts[done:], responses[done:], strict=True), start=done):
        rewards = np.asarray(rm.score([prompt] * len(drawn), drawn), dtype=np.float64)  # (n + OPPONENTS,)
        if not np.isfinite(rewards).all():
            raise ModelError(
                f"the reward model gave a reward that is not finite to a response to {prompt_text(prompt)[:60]!r}, so "
                "no best one can be named; its weights are broken or overflow. Evaluate it first."
            )
        best = int(np.argmax(rewards[:n]))  # the first of equals
        judged = [best, *range(n, n + OPPONENTS)]
        gold = judge.rewards([prompt] * len(judged), [drawn[one] for one in judged])
        rows = [
            (prompt_key(prompt), prompt_text(prompt), drawn[one], one == best, float(rewards[one]), float(value))
            for one, value in zip(judged, gold, strict=True)
        ]
        append_json_lines(kept, [{"rows": rows}])
        report(index + 1, len(prompts), f"best of {n} for {index + 1} of {len(prompts)} fresh prompts")
    every = [row for one in read_json_lines(kept) for row in one["rows"]]
    return pd.DataFrame(every, columns=["prompt_id", "prompt", "response", "chosen", "reward", "gold"])


def _fresh_prompts(settings: ConfirmationSettings, prepared: Path) -> list[Prompt]:
    """Prompts that neither the reward model was trained on nor readiness has seen.

    Raises:
        DataError: too few are left.
    """
    if settings.is_gold:
        return new_prompts(prepared, settings.fresh_prompts, f"fresh prompts {settings.seed}")
    lower = "policy.num_prompts (readiness is then judged on fewer)"
    left = held_out_prompts(prepared, seen=settings.num_prompts, why="readiness has seen", lower=lower)
    return left[: settings.fresh_prompts]
