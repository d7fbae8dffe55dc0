"""`rm-opt judge audit`, whether a judge is good enough to decide, and `rm-opt data label`, pairs by a judge."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from rmcore.cli.common import print_metrics, write_report_json
from rmcore.cli.help import common
from rmcore.cli.inputs import Data, JsonOut, PairReading, Seed, written_as
from rmcore.cli.options import field_options, given, options
from rmcore.config.judging import JudgingConfig
from rmcore.core.errors import ConfigError, DataError

ASKING = tuple(name for name in JudgingConfig.model_fields if name != "audit")
LABELLING = (*ASKING, "audit")
JudgeName = Annotated[
    str,
    typer.Option(
        "--judge", help="openai:MODEL@URL, module:function of (prompt, response), or the folder of a reward model."
    ),
]
SHOWN = ("agreement", "ceiling", "reliability", "position_bias", "length_bias", "injection_gain")
judge = typer.Typer(no_args_is_help=True, help="Compare a judge with people before its judgements are used.")


@judge.callback()
def group() -> None:
    """Compare a judge with people before its judgements are used."""


@judge.command()
@options(*field_options(JudgingConfig, ASKING))
@common("mode", "rubric", "max_calls", "plan", "json_out", "limit")
def audit(
    judge: JudgeName,
    data: Data,
    reading: PairReading,
    probed: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Pairs, at most, that are asked again with an injection.")
    ] = 100,
    plan: Annotated[bool, typer.Option("--plan", help="Say how many calls it takes, and ask nothing.")] = False,
    json_out: JsonOut = None,
    seed: Seed = 0,
    **settings: Any,
) -> None:
    """Audit a judge on pairs that people have labelled: agreement, biases, injections, what it costs.

    Example: rm-opt judge audit --judge openai:qwen3-8b@http://127.0.0.1:8000/v1 --data human.parquet --mode pairwise
    """
    from rmcore.core.progress import progress_bar
    from rmcore.data.pair import prompt_text
    from rmcore.judging.audit import audit as audited
    from rmcore.judging.budget import CHARACTERS, planned
    from rmcore.judging.language_model import LanguageModelJudge
    from rmcore.policy.judge import judge_identity

    judging = JudgingConfig.model_validate(given(settings, ASKING))
    pairs = reading.read(data)
    asked = _judge(judge, judging)
    if plan:
        calls = 2 * len(pairs) + (1 if judging.mode == "pointwise" else 2) * min(probed, len(pairs))
        texts = sum(len(prompt_text(pair.prompt)) + len(pair.chosen) + len(pair.rejected) for pair in pairs)
        is_asked = isinstance(asked, LanguageModelJudge)
        print(f"{asked.name}: {planned(judging, calls, texts / len(pairs) / CHARACTERS) if is_asked else '0 calls'}")
        return
    with progress_bar(f"audit of {asked.name}") as report:
        record = audited(asked, pairs, num_probed=probed, seed=seed, report=report)
    record["asked"] = judge_identity(judge, judging)
    _say(record)
    write_report_json(json_out, {"data": data, **record})


@options(*field_options(JudgingConfig, LABELLING))
@common("mode", "rubric", "max_calls", "audit")
def label(
    data: Annotated[str, typer.Argument(help="Answers: rows with columns prompt and response, several a prompt.")],
    judge: JudgeName,
    out: Annotated[
        Path, typer.Option(help="File for the pairs: .parquet or .jsonl.", callback=written_as(".parquet", ".jsonl"))
    ],
    **settings: Any,
) -> None:
    """Make preference pairs of answers by a judge; ties and what it cannot read make none.

    Each answer of the better half of a prompt's is paired with one of the other half, in the order of their scores or
    utilities. Each row names the judge as its annotator, and with --audit how much it counts in training.

    Example: rm-opt data label answers.parquet --judge openai:qwen3-8b@http://127.0.0.1:8000/v1 --out pairs.parquet
    """
    import numpy as np
    import pandas as pd

    from rmcore.core.files import atomic_file
    from rmcore.judging.language_model import LanguageModelJudge
    from rmcore.policy.sampling.samples import read_samples

    rows = read_samples(Path(data))
    if missing := [name for name in ("prompt", "response") if name not in rows]:
        raise DataError(f"{data} has no column {', '.join(missing)}; a file of answers has prompt and response.")
    judging = JudgingConfig.model_validate(given(settings, LABELLING))
    asked, signature = _judge(judge, judging), _signature(judge, judging)
    if not all(isinstance(text, str) for name in ("prompt", "response") for text in rows[name]):
        raise DataError(
            f"{data} has prompts or responses that are no text, such as dialogues of turns or empty cells; write each "
            "as one text, and leave out rows without one."
        )
    rows = rows.drop_duplicates(["prompt", "response"])
    prompts, responses = (rows[name].tolist() for name in ("prompt", "response"))
    if out.is_dir():
        raise ConfigError(f"{out} is a folder; name a file for the pairs.")
    with atomic_file(out) as unfinished:  # what cannot be written is refused before anything is paid
        rows = rows.assign(value=asked.rewards(prompts, responses))
        found: list[dict[str, Any]] = []
        for prompt, pool in rows[np.isfinite(rows["value"])].groupby("prompt", sort=False):
            ranked = pool.sort_values("value", ascending=False, kind="stable").to_dict("records")
            for better, worse in zip(ranked, ranked[(len(ranked) + 1) // 2 :], strict=False):
                if better["value"] > worse["value"]:
                    found.append(
                        {
                            **{"prompt": prompt, "chosen": better["response"], "rejected": worse["response"]},
                            **{"score_chosen": better["value"], "score_rejected": worse["value"]},
                            **signature,
                        }
                    )
        if not found:
            raise DataError(
                f"{asked.name} prefers none of {len(rows)} answers to another one of its prompt; no pair is made."
            )
        table = pd.DataFrame(found)
        if out.suffix.lower() == ".parquet":
            table.to_parquet(unfinished)
        else:
            table.to_json(unfinished, orient="records", lines=True, force_ascii=False)
    num_unread = int((~np.isfinite(rows["value"])).sum())
    print(f"{len(table):,} pairs of {table['prompt'].nunique():,} prompts in {out}; {num_unread:,} answers are unread")
    if isinstance(asked, LanguageModelJudge):
        _say_cost(asked.endpoint.spent)


def labelling_judge(named: str, settings: Mapping[str, Any]) -> Any:
    """The `LabellingJudge` that a command line names.

    Raises:
        ConfigError: see `rmcore.policy.judge.require_named_judge`.
    """
    from rmcore.active.labels import LabellingJudge
    from rmcore.core.progress import progress_bar
    from rmcore.judging.audit import ask_about
    from rmcore.judging.language_model import LanguageModelJudge

    judging = JudgingConfig.model_validate(given(settings, LABELLING))
    judge = _judge(named, judging)

    def margins(pairs: Any) -> Any:
        with progress_bar(f"labels by {judge.name}") as report:
            found = ask_about(judge, pairs, report=report).margin
        if isinstance(judge, LanguageModelJudge):
            _say_cost(judge.endpoint.spent)
        return found

    return LabellingJudge(margins, _signature(named, judging))


def _signature(named: str, judging: JudgingConfig) -> dict[str, Any]:
    """Columns of each label: who gave it, and with an audit how much it counts."""
    from rmcore.data.observation import ANNOTATOR, WEIGHT
    from rmcore.policy.judge import judge_name, label_weight

    weight = label_weight(named, judging)
    return {ANNOTATOR: judge_name(named)} | ({} if weight is None else {WEIGHT: weight})


def _judge(named: str, judging: JudgingConfig) -> Any:
    from rmcore.policy.judge import judge_of, require_named_judge

    require_named_judge(named, judging)
    return judge_of(named, is_gold=False, judging=judging)


def _say(record: Mapping[str, Any]) -> None:
    metrics, verdict = record["metrics"], record["verdict"]
    decides = "may decide" if verdict["may_decide"] else "may inform, and does not decide"
    print(f"\n{record['judge']} {decides}")
    for reason in verdict["reasons"]:
        print(f"  {reason}")
    print_metrics(
        f"{record['judge']} on {record['num_pairs']:,} pairs of {record['num_prompts']:,} prompts",
        {name: metrics[name] for name in SHOWN},
    )
    print(f"unread      {record['num_unread']:,} of {record['num_pairs']:,} pairs")
    if "cost" in record:
        _say_cost(record["cost"])


def _say_cost(spent: Mapping[str, Any]) -> None:
    models = ", ".join(f"{name or 'no name'} ({count:,})" for name, count in spent["models"].items())
    each = spent["num_tokens"] / max(spent["num_calls"], 1)
    price = f" for {spent['cost']:.4g}" if spent["cost"] else ""
    said = f"{spent['num_calls']:,} calls, {spent['num_tokens']:,} tokens ({each:.0f} a call){price}; {models}"
    print(f"cost        {said}")
