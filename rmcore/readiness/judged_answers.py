"""Files of answers that a judge has scored, several a prompt: what a choice among them gains is known with no policy.

One row an answer with `prompt`, `response` and one of

    judge or score    a number, higher is better
    rank              1 is the best answer of its prompt
    wins              of comparisons with the other answers: their number, or their share

or one row a comparison with `prompt`, `chosen` and `rejected`, to whose outcomes strengths are fitted
(`label_strength`). Prompts may have different numbers of answers. What cannot be used is left out and counted; what
tells nothing is refused.
"""

import json
import sys
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from rmcore.core.arrays import FloatArray
from rmcore.core.errors import DataError
from rmcore.core.files import write_json
from rmcore.core.progress import Report, silent
from rmcore.data.pair import Prompt, prompt_key
from rmcore.data.readers.turns import asked_prompt
from rmcore.data.rendering import Renderer, TokenizedSide
from rmcore.data.splits import compared_prompt
from rmcore.evaluation.label_strength import rate_answers
from rmcore.policy.sampling.samples import read_samples
from rmcore.readiness.logged_answers import MIN_ANSWERS, LoggedPool, best_of_logged, compared_texts

if TYPE_CHECKING:  # the verdict on stored rewards needs no torch
    from rmcore.ensembles.score import SideScorer

Kind = Literal["judge", "score", "rank", "wins", "comparisons"]
COLUMNS: tuple[Kind, ...] = ("judge", "score", "rank", "wins")
"""Columns that say how good an answer is; the first that a file has counts."""
MOST_MISSING = 0.5
"""Share of the answers without a judgement above which those that have one are taken for a selection."""
MOST_AT_ONE_END = 0.5
"""Share of the answers with the judge's highest, or lowest, value above which it tells too few apart at that end."""
SPELLED, UNKNOWN = 0.8, 0.1
"""Tokens a character above which a tokenizer spells a text, and share of unknown tokens above which it cannot read it:
English has about a quarter of a token a character under its own tokenizer, Russian 0.95 under an English one."""
TRAINED_ON = "prompts are in the training pairs, so the model has seen them"
ANSWERS_FILE, COUNTS_FILE = "answers.parquet", "answers.json"
_CHECKED = 200
"""Answers whose tokens are counted."""


@dataclass(frozen=True)
class JudgedAnswers:
    """N answers to P prompts that a judge tells apart, those of a prompt together.

    Attributes:
        table: rows prompt_id, prompt (text), response and strength; of a prompt and response one row.
        kind: what the file says of an answer.
        num_rows: of the file.
        num_missing: rows without a judgement.
        num_trained_on: prompts that are left out because pairs of them were trained on.
        num_short: prompts that are left out because fewer than `MIN_ANSWERS` distinct answers are judged.
        num_undecided: prompts that are left out because all of their answers are judged alike.
    """

    table: pd.DataFrame
    kind: Kind
    num_rows: int
    num_missing: int
    num_trained_on: int
    num_short: int
    num_undecided: int

    @property
    def prompts(self) -> list[Prompt]:
        """(N,) the prompt of each answer, a transcript as turns."""
        asked = {text: asked_prompt(text) for text in self.table["prompt"].unique()}
        return [asked[text] for text in self.table["prompt"]]

    def pools(self, values: FloatArray) -> list[FloatArray]:
        """(N,) values as one array a prompt."""
        starts = np.flatnonzero(self.table["prompt_id"].ne(self.table["prompt_id"].shift()).to_numpy())
        return np.split(values, starts[1:])

    @property
    def prompt_ids(self) -> list[str]:
        """(P,) of the prompts, in the order of `pools`."""
        return list(self.table["prompt_id"].unique())

    @property
    def left_out(self) -> list[str]:
        """List what was left out and why, a sentence each."""
        counted = (
            (self.num_missing, f"of {self.num_rows} rows have no judgement"),
            (self.num_trained_on, TRAINED_ON),
            (self.num_short, f"prompts have fewer than {MIN_ANSWERS} distinct judged answers"),
            (self.num_undecided, "prompts have answers that the judge does not tell apart"),
        )
        return [f"{count} {why}; they are left out" for count, why in counted if count]


def read_judged_answers(path: Path, *, trained_on: Collection[str] = ()) -> JudgedAnswers:
    """Read a file of judged answers and check that it tells something.

    Args:
        path: Parquet, CSV, JSON or JSONL, also compressed.
        trained_on: `compared_prompt` of prompts that the model was trained on, or chosen by.

    Raises:
        DataError: a column is missing, hardly any answer is judged, the judgements are constant or saturated at one
            end, or no prompt is left.
    """
    rows = read_samples(path)
    is_compared = "chosen" in rows and "rejected" in rows
    kind: Kind = "comparisons" if is_compared else next((name for name in COLUMNS if name in rows), COLUMNS[0])
    judged = _compared(rows, path) if is_compared else _judged(rows, kind, path)
    num_missing = int(judged["strength"].isna().sum())
    if num_missing == len(judged) > 0:
        raise DataError(
            f"none of the {len(judged)} answers of {path} has a number in {kind!r}, where the first is "
            f"{rows[kind].iloc[0]!r}; write what the judge gave as a number, higher for the better answer."
        )
    if num_missing > MOST_MISSING * len(judged):
        raise DataError(
            f"{num_missing} of {len(judged)} answers of {path} have no number in {kind!r}: those that have one may be "
            "a selection, and nothing is said about it. Judge the others, or leave them out of the file."
        )
    judged = judged[judged["strength"].notna()]
    if kind in ("judge", "score"):
        _require_spread(judged["strength"].to_numpy(), kind, path)
    # One row a text: repeated answers of a prompt would count as ties that nobody chose between.
    judged = judged.groupby(["prompt", "response"], sort=True, as_index=False)["strength"].mean()
    keys = {prompt: prompt_key(asked_prompt(prompt)) for prompt in judged["prompt"].unique()}
    judged.insert(0, "prompt_id", judged["prompt"].map(keys))
    of_prompt = judged.groupby("prompt_id")
    seen = {text for text in judged["prompt"].unique() if compared_prompt(asked_prompt(text)) in trained_on}
    trained, short = judged["prompt"].isin(seen), of_prompt["strength"].transform("size") < MIN_ANSWERS
    alike = of_prompt["strength"].transform(np.ptp) == 0
    short, alike = short & ~trained, alike & ~short & ~trained
    table = judged[~(trained | short | alike)].sort_values(["prompt_id", "response"], ignore_index=True)
    counts = [int(judged["prompt_id"][mask].nunique()) for mask in (trained, short, alike)]
    answers = JudgedAnswers(table, kind, len(rows), num_missing, *counts)
    if table.empty:
        advice = (
            "Give answers to prompts that were not trained on",
            f"Give {MIN_ANSWERS} or more different judged answers to each of several prompts",
            "Ask the judge for a finer scale, or let it compare answers",
        )
        raise DataError(
            f"no prompt of {path} is left to choose among answers: {'; '.join(answers.left_out) or 'it has none'}. "
            f"{advice[int(np.argmax(counts))]}."
        )
    return answers


def report_left_out_answers(answers: JudgedAnswers) -> None:
    """Say on stderr what of a file of judged answers was left out, and why."""
    for sentence in answers.left_out:
        print(f"warning: {sentence}.", file=sys.stderr)


def require_readable(renderer: Renderer, answers: JudgedAnswers, path: Path | str) -> None:
    """Check that the checkpoint's tokenizer reads these texts as words, and does not spell them.

    Languages that share an alphabet are not told apart: German passes an English tokenizer.

    Raises:
        DataError: it spells them, or does not know their characters.
    """
    some = answers.table.sample(min(_CHECKED, len(answers.table)), random_state=0)
    tokenizer, texts = renderer.tokenizer, some["response"].tolist()
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    num_tokens, num_chars = sum(map(len, ids)), sum(len("".join(text.split())) for text in texts)
    unknown = sum(one.count(tokenizer.unk_token_id) for one in ids) if tokenizer.unk_token_id is not None else 0
    if num_tokens and (num_tokens > SPELLED * num_chars or unknown > UNKNOWN * num_tokens):
        raise DataError(
            f"the checkpoint's tokenizer makes {num_tokens} tokens of {num_chars} characters of {path}, {unknown} of "
            "them unknown: these texts are not in its language, and its rewards mean nothing there. Give answers in "
            "the language that it was trained on, or train on yours."
        )


def rewards_of(rm: "SideScorer", answers: JudgedAnswers, *, report: Report = silent) -> FloatArray:
    """(N,) rewards of judged answers by a reward model.

    Raises:
        DataError: an answer cannot be read; the message says which.
    """
    responses = answers.table["response"].tolist()
    sides = rm.renderer.try_sides(list(zip(answers.prompts, responses, strict=True)), report=report)
    for side, response in zip(sides, responses, strict=True):
        if isinstance(side, DataError):
            raise DataError(f"the answer {response[:60]!r} cannot be read as the reward model reads text: {side}")
    read = [side for side in sides if isinstance(side, TokenizedSide)]
    return np.asarray(rm.score_sides(read, report=report), dtype=np.float64)


def write_judged_answers(folder: Path, answers: JudgedAnswers, rewards: FloatArray) -> None:
    """Write judged answers with a model's (N,) rewards into a folder."""
    answers.table.assign(reward=rewards).to_parquet(folder / ANSWERS_FILE)
    counts = {field.name: getattr(answers, field.name) for field in fields(answers) if field.name != "table"}
    write_json(folder / COUNTS_FILE, counts)


def stored_judged_answers(folder: Path) -> tuple[JudgedAnswers, FloatArray]:
    """Read what `write_judged_answers` wrote."""
    table, counts = pd.read_parquet(folder / ANSWERS_FILE), json.loads((folder / COUNTS_FILE).read_text())
    return JudgedAnswers(table.drop(columns="reward"), **counts), table["reward"].to_numpy(dtype=np.float64)


def choose_among_judged(
    answers: JudgedAnswers, rewards: FloatArray, *, num_resamples: int = 1000, seed: int = 0, report: Report = silent
) -> dict[str, Any]:
    """How the model's best of k among a prompt's judged answers does against another of them.

    Args:
        answers: N of them.
        rewards: (N,) by the model.
        num_resamples: of the bootstrap over prompts.
        seed: of the bootstrap.
        report: of the bootstrap of each k.

    Returns:
        The record of `logged_answers.logged_answers`, with `judged` (what the file says of an answer) and
        `left_out` in place of what is said of pairs.
    """
    lengths = answers.table["response"].str.len().to_numpy(dtype=np.float64)
    columns = (answers.pools(one) for one in (rewards, answers.table["strength"].to_numpy(), lengths))
    pools = [
        LoggedPool(prompt_id, reward, strength, chars, annotated=True)
        for prompt_id, reward, strength, chars in zip(answers.prompt_ids, *columns, strict=True)
    ]
    return {
        "judged": answers.kind,
        "left_out": answers.left_out,
        "num_prompts": len(pools),
        "num_answers": len(rewards),
        **best_of_logged(pools, num_resamples=num_resamples, seed=seed, report=report),
    }


def _require_prompts(rows: pd.DataFrame, path: Path, *names: str) -> None:
    missing = [name for name in ("prompt", *names) if name not in rows]
    if missing:
        raise DataError(
            f"{path} has no column {', '.join(missing)} among {', '.join(map(str, rows.columns))}. Judged answers are "
            f"rows of prompt, response and one of {', '.join(COLUMNS)}, or rows of prompt, chosen and rejected."
        )
    if any(isinstance(prompt, list | dict) for prompt in rows["prompt"]):
        raise DataError(f"{path} has prompts that are no text, such as dialogues of turns; write each as one text.")


def _judged(rows: pd.DataFrame, kind: Kind, path: Path) -> pd.DataFrame:
    _require_prompts(rows, path, "response", kind)
    value = pd.to_numeric(rows[kind], errors="coerce").astype(np.float64)
    value = value.where(np.isfinite(value))
    if kind == "rank":
        # Of K ranks the best is K - 1 wins and the worst none, so that prompts with more answers spread no wider.
        size = value.groupby(rows["prompt"]).transform("count")
        value = (size - value) / (size - 1).clip(lower=1)
    texts = {"prompt": rows["prompt"].astype(str), "response": rows["response"].fillna("").astype(str)}
    return pd.DataFrame(texts | {"strength": value})


def _compared(rows: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Answers of comparisons with the strengths that fit best; of each prompt its largest connected part."""
    _require_prompts(rows, path, "chosen", "rejected")
    parts = []
    for prompt, pairs in rows.astype({"chosen": str, "rejected": str}).groupby(rows["prompt"].astype(str), sort=True):
        texts, better, worse = compared_texts(pairs)
        rated = rate_answers(better, worse, np.ones(len(pairs)), len(texts))
        parts.append(pd.DataFrame({"prompt": prompt, "response": texts[rated.answers], "strength": rated.strength}))
    return pd.concat(parts, ignore_index=True)


def _require_spread(values: FloatArray, kind: str, path: Path) -> None:
    for end, words in ((values.max(initial=-np.inf), "highest"), (values.min(initial=np.inf), "lowest")):
        share = float(np.mean(values == end)) if len(values) else 0.0
        if share == 1:
            raise DataError(
                f"{kind!r} of {path} is {end:g} for all {len(values)} answers: the judge tells nothing apart, so no "
                "choice can be judged. Ask for grades, or let it compare answers."
            )
        if share > MOST_AT_ONE_END:
            raise DataError(
                f"{100 * share:.0f} % of the answers of {path} have the {words} value of {kind!r}, {end:g}: the judge "
                "is saturated at that end and tells too few of them apart. Use a finer scale, or a harder comparison."
            )
