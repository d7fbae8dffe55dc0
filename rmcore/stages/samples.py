"""Stage samples: what the policy answers to held-out prompts, drawn once and scored by any reward model later.

Writes `samples.parquet` (prompt_id, prompt, response, num_tokens, finished, gold, unit; one row a sample, those of a
prompt together), `unjudged.parquet` (the same prompts' samples without a judgement), `left_out.json` (how much has
none), `drawn.jsonl`, where an interrupted call continues, `sampling.json` and `summary.json`. `gold` is the true
reward: the synthetic benchmark's own, that of `policy.judge`, or the judge's column of `policy.samples`; NaN where
there is none. Prompts of one `unit` are the same or share a topic (`policy.topic_column`).
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rmcore.core.errors import DataError
from rmcore.core.files import write_json
from rmcore.core.progress import Report
from rmcore.core.tracking import Tracker
from rmcore.data.gold.world import written_responses
from rmcore.data.pair import PreferencePair, Prompt, prompt_key, prompt_text
from rmcore.data.readers.turns import asked_prompt
from rmcore.data.table import read_pairs
from rmcore.policy.independent_units import independent_units
from rmcore.policy.judge import judge_of
from rmcore.policy.policy import Policy
from rmcore.policy.sampling.sampler import SamplingSettings
from rmcore.policy.sampling.samples import read_samples
from rmcore.policy.sampling.sampling import draw_samples
from rmcore.stages.prepared import one_each, policy_place
from rmcore.stages.stages import Answering, SamplesStage
from rmcore.training.resume import FINISHED_FILE

SAMPLES_FILE, UNJUDGED_FILE, LEFT_OUT_FILE = "samples.parquet", "unjudged.parquet", "left_out.json"
FEWEST = 4
"""Samples of a prompt below which nothing can be said about a choice among them."""


def run(settings: SamplesStage, out: Path, tracker: Tracker, report: Report) -> None:
    """Draw samples, or read those drawn elsewhere; judge them where the truth is known."""
    table, unjudged, sampling = (
        _read(settings.samples, settings.judge_column, settings.topic_column)
        if settings.samples is not None
        else _draw(settings, out / "drawn.jsonl", report)
    )
    table = _with_units(table)
    table.to_parquet(out / SAMPLES_FILE)
    unjudged[["prompt_id", "prompt", "response"]].to_parquet(out / UNJUDGED_FILE)
    write_json(out / LEFT_OUT_FILE, sampling.get("given", {}) | {"is_file": settings.samples is not None})
    gold = table["gold"].to_numpy()
    sampling |= {
        "num_prompts": int(table["prompt_id"].nunique()),
        "num_units": int(table["unit"].nunique()),
        "num_samples": len(table),
        "num_empty": int((table["response"].str.strip() == "").sum()),
        "num_judged": int(np.isfinite(gold).sum()),
        "finished_share": float(table["finished"].mean()),
        "mean_tokens": float(table["num_tokens"].mean()),
        "mean_gold": float(gold.mean()) if np.isfinite(gold).all() else None,
    }
    write_json(out / "sampling.json", sampling)
    shown = ("num_samples", "num_empty", "finished_share", "mean_tokens", "mean_gold")
    metrics = {f"policy/{name}": sampling[name] for name in shown if sampling[name] is not None}
    write_json(out / "summary.json", {"metrics": metrics})
    write_json(out / FINISHED_FILE, sampling)


def _draw(settings: SamplesStage, drawn: Path, report: Report) -> tuple[pd.DataFrame, pd.DataFrame, dict[str, Any]]:
    pairs = read_pairs(settings.prepared.folder / "test.parquet")
    prompts = one_each(pairs)[: settings.num_prompts]
    topics = _topics(pairs, settings.topic_column)
    engine, rows = answers(settings, prompts, settings.samples_per_prompt, drawn, report)
    table = pd.DataFrame(
        {
            "prompt_id": [prompt_key(prompts[index]) for index in rows["prompt_index"]],
            "prompt": [prompt_text(prompts[index]) for index in rows["prompt_index"]],
            "response": rows["response"],
            "num_tokens": rows["num_tokens"],
            "finished": rows["finished"],
            "topic": [topics.get(prompt_key(prompts[index])) for index in rows["prompt_index"]],
        }
    )
    judge = judge_of(settings.judge, is_gold=settings.is_gold, device=settings.device, judging=settings.judging)
    asked = [prompts[index] for index in rows["prompt_index"]]
    table["gold"] = np.nan if judge is None else judge.rewards(asked, rows["response"].tolist())
    found: dict[str, Any] = {"engine": engine, "source": settings.policy_name}
    if judge is None:
        return table, table.iloc[:0], found
    table, unjudged, found["given"] = judged_samples(table, f"{judge.name} gave no readable judgement")
    return table, unjudged, found


def judged_samples(table: pd.DataFrame, why: str) -> tuple[pd.DataFrame, pd.DataFrame, dict[str, int]]:
    """The samples with a judgement, of prompts that have `FEWEST` of them; what is left out is said on stderr.

    Args:
        table: columns prompt_id and gold, NaN where there is no judgement.
        why: there is none.

    Returns:
        The samples, those of the same prompts without a judgement, and by name how many have none, how many prompts
        are left out, and all of both.

    Raises:
        DataError: none is left.
    """
    is_judged = np.isfinite(table["gold"])
    judged, unjudged = table[is_judged], table[~is_judged]
    judged = judged[judged.groupby("prompt_id")["gold"].transform("size") >= FEWEST]
    if judged.empty:
        raise DataError(
            f"{why} of {FEWEST} samples of any prompt, so nothing can be said about choosing among them. Judge more "
            "samples of each prompt."
        )
    num_prompts = table["prompt_id"].nunique()
    num_left_out = num_prompts - judged["prompt_id"].nunique()
    if len(judged) < len(table):
        print(
            f"warning: {len(table) - len(judged)} of {len(table)} samples are left out, {num_left_out} of "
            f"{num_prompts} prompts with all of theirs: {why}, and a prompt needs {FEWEST}.",
            file=sys.stderr,
        )
    counts = {
        "unjudged": len(unjudged),
        "samples": len(table),
        "prompts_left_out": num_left_out,
        "prompts": num_prompts,
    }
    unjudged = unjudged[unjudged["prompt_id"].isin(judged["prompt_id"])]
    return judged.reset_index(drop=True), unjudged.reset_index(drop=True), counts


def answers(
    settings: Answering, prompts: Sequence[Prompt], count: int, drawn: Path, report: Report
) -> tuple[str, pd.DataFrame]:
    """Draw the answers of the policy, or of the synthetic benchmark's writer, to prompts.

    Args:
        settings: which policy, and how it samples.
        prompts: P of them.
        count: samples of each.
        drawn: file that takes each prompt's samples, from which an interrupted call continues; unused by the writer.
        report: progress.

    Returns:
        What drew them, and P x count rows with the columns of `draw_samples`, by prompt; the writer's tokens are
        counted as words.
    """
    shortcut = settings.writer_shortcut
    if shortcut is not None:
        responses = [
            (index, response)
            for index, prompt in enumerate(prompts)
            for response in written_responses(prompt_text(prompt), count, shortcut, seed=settings.seed)
        ]
        rows = pd.DataFrame(responses, columns=["prompt_index", "response"])
        num_words = rows["response"].str.split().str.len()
        return "the synthetic benchmark's writer", rows.assign(num_tokens=num_words, finished=True)
    found = draw_samples(
        Policy.load(policy_place(settings.policy_name, settings.policy.folder)),
        prompts,
        SamplingSettings(
            num_samples=count,
            temperature=settings.temperature,
            max_new_tokens=settings.max_new_tokens,
            seed=settings.seed,
        ),
        drawn,
        engine=settings.engine,
        device=settings.device,
        report=report,
    )
    return found.engine, found.rows


def _topics(pairs: Sequence[PreferencePair], column: str | None) -> dict[str, str]:
    """The topic of each prompt whose pairs name one, by the prompt's key."""
    if column is None:
        return {}
    found = {prompt_key(pair.prompt): str(one) for pair in pairs if (one := pair.metadata.get(column)) is not None}
    if not found:
        raise DataError(
            f"none of the {len(pairs)} held-out pairs carries {column!r}, which policy.topic_column names, so it is "
            "not known which prompts share a topic. Name a column of the data, or leave it out."
        )
    return found


def _with_units(table: pd.DataFrame) -> pd.DataFrame:
    """The samples with the number of their prompt's independent unit in place of its topic."""
    prompts = table.drop_duplicates("prompt_id")
    topics = [None if pd.isna(topic) else str(topic) for topic in prompts["topic"]]
    units = independent_units(prompts["prompt"].tolist(), topics)
    numbers = dict(zip(prompts["prompt_id"], units, strict=True))
    return table.drop(columns="topic").assign(unit=table["prompt_id"].map(numbers))


def _read(path: str, judge_column: str, topic_column: str | None) -> tuple[pd.DataFrame, pd.DataFrame, dict[str, Any]]:
    """The samples of a file that have a judge's reward, those of a prompt together; and the others of these prompts."""
    rows = read_samples(Path(path))
    named = ("prompt", "response", judge_column, *([] if topic_column is None else [topic_column]))
    missing = [name for name in named if name not in rows]
    if missing:
        raise DataError(
            f"{path} has no column {', '.join(missing)} among {', '.join(map(str, rows.columns))}; a file of samples "
            "has prompt, response and the judge's reward. Name the last one with policy.judge_column, and a topic's "
            "with policy.topic_column."
        )
    if any(isinstance(prompt, (list, dict)) for prompt in rows["prompt"]):
        raise DataError(
            f"{path} has prompts that are no text, such as dialogues of turns; write each as one text, as "
            "`rm-opt readiness best-of-n` writes them to samples.parquet."
        )
    gold = pd.to_numeric(rows[judge_column], errors="coerce")
    rows = rows.assign(gold=gold.where(np.isfinite(gold))).sort_values("prompt", kind="stable")
    table = pd.DataFrame(
        {
            "prompt_id": [prompt_key(asked_prompt(prompt)) for prompt in rows["prompt"].astype(str)],
            "prompt": rows["prompt"].astype(str),
            "response": rows["response"].fillna("").astype(str),
            "num_tokens": rows.get("num_tokens", pd.Series(0, index=rows.index)),
            "finished": rows.get("finished", pd.Series(True, index=rows.index)),
            "gold": rows["gold"],
            "topic": None if topic_column is None else rows[topic_column],
        }
    )
    table, unjudged, counts = judged_samples(table, f"{path} has no number in {judge_column!r}")
    return table, unjudged, {"engine": None, "source": path, "given": counts}
