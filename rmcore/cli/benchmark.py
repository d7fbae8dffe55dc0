"""`rm-opt benchmark`: a reward model on public benchmarks, by their own rules, with intervals."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rmcore.cli.common import write_report_json
from rmcore.cli.inputs import Checkpoint, JsonOut, ModelReading
from rmcore.cli.options import options
from rmcore.core.errors import ConfigError
from rmcore.core.files import atomic_file

if TYPE_CHECKING:
    from rmcore.core.arrays import FloatArray
    from rmcore.suites.question import Question, Suite

LEVEL = 0.05
"""Familywise level of all differences together (Holm)."""
NAMES = ("rewardbench", "rewardbench2", "rm-bench", "llmbar", "judgebench", "rmb")


@options()
def benchmark(
    checkpoint: Checkpoint,
    suite: Annotated[
        list[str],
        typer.Option(
            help=f"{', '.join(NAMES)}; or NAME=PATH: its own file or folder here. May be repeated. A NAME alone is "
            "fetched from the Hugging Face hub."
        ),
    ],
    model: ModelReading,
    out: Annotated[Path, typer.Option(help="Folder of the rewards: what is there already is not scored again.")] = Path(
        "benchmark-rewards"
    ),
    against: Annotated[
        str | None, typer.Option(help="Another checkpoint or hub name: the differences on the same questions, too.")
    ] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Accept a set with rows missing; its score is no published one's equal.")
    ] = False,
    json_out: JsonOut = None,
) -> None:
    """Score a reward model on public benchmarks, each by its own rule.

    Intervals are 95 %, over prompts. Beside the score stands how far reading nothing gets: the longer answer, or the
    one with more Markdown.

    Example: rm-opt benchmark --checkpoint out/best --suite judgebench=gpt.jsonl --suite llmbar=LLMBar/Dataset/LLMBar
    """
    from rmcore.suites.measure import difference, measure
    from rmcore.suites.question import read_questions

    chosen = [_named(one) for one in suite]
    sets = [(one, source, read_questions(one, source, partial=partial)) for one, source in chosen]
    record: dict[str, Any] = {"checkpoint": checkpoint, "against": against, "partial": partial, "suites": {}}
    rewards = {name: _rewards(name, sets, model, out) for name in (checkpoint, *([against] if against else []))}
    for place, (one, source, questions) in enumerate(sets):
        found = measure(one, questions, rewards[checkpoint][place])
        told: dict[str, Any] = {
            "source": source,
            "scores": {name: value.to_dict() for name, value in found.scores.items()},
            "longer_wins": found.longer,
            "more_markdown_wins": found.markdown,
            "num_questions": found.num_questions,
            "num_unreadable": found.num_unreadable,
        }
        if against is not None:
            value, p = difference(one, questions, rewards[checkpoint][place], rewards[against][place])
            told["difference"] = {**value.to_dict(), "p": p}
        record["suites"][one.name] = told
        _print(one, told, partial)
    if against is not None:
        _print_differences(record["suites"], against)
    write_report_json(json_out, record)


def _named(given: str) -> "tuple[Suite, str]":
    from rmcore.suites.measure import SUITES

    name, _, source = given.partition("=")
    if name not in SUITES:
        raise ConfigError(f"there is no benchmark {name!r}; name one of {', '.join(SUITES)}, or NAME=PATH.")
    found = SUITES[name]
    if not source and not found.hub:
        raise ConfigError(
            f"{name} is on no hub in a form that can be read: fetch its repository and give --suite {name}=FOLDER."
        )
    return found, source or found.hub


def _rewards(
    checkpoint: str, sets: "list[tuple[Suite, str, list[Question]]]", model: ModelReading, out: Path
) -> "list[list[FloatArray]]":
    """Rewards of all sets by a model, which is loaded only where some are not there yet."""
    import pandas as pd

    from rmcore.core.progress import prefixed, progress_bar
    from rmcore.suites.measure import from_table, score_answers, to_table

    out.mkdir(parents=True, exist_ok=True)
    places = [out / f"{suite.name}-{_key(checkpoint, source, model)}.parquet" for suite, source, _ in sets]
    rm = None
    for (suite, _, questions), place in zip(sets, places, strict=True):
        if place.is_file() and len(pd.read_parquet(place)) == sum(len(one.answers) for one in questions):
            continue
        rm = rm or model.load(checkpoint)
        with progress_bar("benchmark") as report:
            rewards = score_answers(rm, questions, report=prefixed(report, suite.name))
        with atomic_file(place) as unfinished:
            to_table(questions, rewards).to_parquet(unfinished)
    return [from_table(one[2], pd.read_parquet(place)) for one, place in zip(sets, places, strict=True)]


def _key(checkpoint: str, source: str, model: ModelReading) -> str:
    """Digest what the rewards depend on: the content of model and set, and how the model reads."""
    from rmcore.data.readers.sources import source_digest
    from rmcore.ensembles.ensemble_folder import checkpoint_digest

    folder = Path(checkpoint)
    depends = {
        "checkpoint": checkpoint_digest(folder) if folder.is_dir() else checkpoint,
        "set": source_digest(source),
        "max_seq_len": model.max_seq_len,
        "render_fn": model.render_fn,
    }
    return hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:12]


def _print(suite: "Suite", told: Mapping[str, Any], partial: bool) -> None:
    print(f"{suite.title}{' (in part)' if partial else ''}: {suite.rule}. Terms: {suite.terms}.")
    for name, value in told["scores"].items():
        interval = "" if value["ci_low"] is None else f" [{value['ci_low']:.3f}, {value['ci_high']:.3f}]"
        print(f"    {name:<28}{value['value']:.4f}{interval:<18}{value['num']:>7,} questions")
    print(f"    {'the longer answer wins':<28}{told['longer_wins']:.4f}")
    print(f"    {'more Markdown wins':<28}{told['more_markdown_wins']:.4f}")
    if told["num_unreadable"]:
        print(f"    {told['num_unreadable']} questions have an answer that the model cannot read: not right")
    print()


def _print_differences(suites: Mapping[str, Mapping[str, Any]], against: str) -> None:
    """The differences, and which are shown after Holm's correction over the benchmarks."""
    from rmcore.evaluation.verdicts.judgement import holm

    print(f"Against {against}, on the same questions:")
    differences = {name: told["difference"] for name, told in suites.items()}
    adjusted = holm([1.0 if value["p"] is None else value["p"] for value in differences.values()])
    for (name, value), p in zip(differences.items(), adjusted, strict=True):
        interval = "" if value["ci_low"] is None else f" [{value['ci_low']:+.3f}, {value['ci_high']:+.3f}]"
        verdict = ("better" if value["value"] > 0 else "worse") if p < LEVEL else "cannot be told apart"
        print(f"    {name:<28}{value['value']:+.4f}{interval:<18} {verdict}")
