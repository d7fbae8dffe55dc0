"""`rm-opt benchmark`: a reward model on public benchmarks, by their own rules, with intervals."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from rmcore.cli.common import write_report_json
from rmcore.cli.inputs import Checkpoint, JsonOut, ModelReading
from rmcore.cli.options import options
from rmcore.core.errors import ConfigError
from rmcore.core.files import atomic_file, exclusive

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
    if len({one.name for one, _ in chosen}) < len(chosen):
        raise ConfigError("a benchmark is named twice: its second result would stand in the place of its first.")
    sets = [_Set(one, source, *read_questions(one, source, partial=partial)) for one, source in chosen]
    record: dict[str, Any] = {"checkpoint": checkpoint, "against": against, "suites": {}}
    rewards = {name: _rewards(name, sets, model, out) for name in (checkpoint, *([against] if against else []))}
    for place, one in enumerate(sets):
        found = measure(one.suite, one.questions, rewards[checkpoint][place])
        told: dict[str, Any] = {
            "source": one.source,
            "missing": one.missing,
            "scores": {name: value.to_dict() for name, value in found.scores.items()},
            "longer_wins": found.longer,
            "over_longer_wins": found.over_longer.to_dict(),
            "more_markdown_wins": found.markdown,
            "num_questions": len(one.questions),
            "num_unreadable": found.num_unreadable,
        }
        if against is not None:
            value, p = difference(one.suite, one.questions, rewards[checkpoint][place], rewards[against][place])
            told["difference"] = {**value.to_dict(), "p": p}
        record["suites"][one.suite.name] = told
        _print(one.suite, told)
    if against is not None:
        _print_differences(record["suites"], against)
    write_report_json(json_out, record)


def _named(given: str) -> "tuple[Suite, str]":
    from rmcore.suites.measure import SUITES

    name, is_place, source = given.partition("=")
    if name not in SUITES:
        raise ConfigError(f"there is no benchmark {name!r}; name one of {', '.join(SUITES)}, or NAME=PATH.")
    found = SUITES[name]
    if is_place and not (source and Path(source).expanduser().exists()):
        raise ConfigError(f"--suite {given}: there is no file or folder {source!r}; {name} alone names the hub's.")
    if not is_place and not found.hub:
        raise ConfigError(
            f"{name} is on no hub in a form that can be read: fetch its repository and give --suite {name}=FOLDER."
        )
    return found, source if is_place else found.hub


class _Set(NamedTuple):
    suite: "Suite"
    source: str
    questions: "list[Question]"
    missing: dict[str, int]


def _rewards(checkpoint: str, sets: Sequence[_Set], model: ModelReading, out: Path) -> "list[list[FloatArray]]":
    """Rewards of all sets by a model, which is loaded only where some are not there yet."""
    import pandas as pd

    from rmcore.core.progress import prefixed, progress_bar
    from rmcore.suites.measure import from_table, score_answers, to_table

    out.mkdir(parents=True, exist_ok=True)
    places = [out / f"{one.suite.name}-{_key(checkpoint, one.questions, model)}.parquet" for one in sets]
    rm = None
    with exclusive(out / ".lock"):
        for one, place in zip(sets, places, strict=True):
            if place.is_file():
                continue
            rm = rm or model.load(checkpoint)
            with progress_bar("benchmark") as report:
                rewards = score_answers(rm, one.questions, report=prefixed(report, one.suite.name))
            with atomic_file(place) as unfinished:
                to_table(one.questions, rewards).to_parquet(unfinished)
    return [from_table(one.questions, pd.read_parquet(place)) for one, place in zip(sets, places, strict=True)]


def _key(checkpoint: str, questions: "Sequence[Question]", model: ModelReading) -> str:
    """Digest what the rewards depend on: the model (on the hub: its name), all texts, and how they are read."""
    from rmcore.data.render_fn import render_fn_digest
    from rmcore.ensembles.ensemble_folder import checkpoint_digest
    from rmcore.suites.question import digest

    folder = Path(checkpoint)
    depends = {
        "checkpoint": checkpoint_digest(folder) if folder.is_dir() else checkpoint,
        "questions": digest(questions),
        "max_seq_len": model.max_seq_len,
        "render_fn": None if model.render_fn is None else render_fn_digest(model.render_fn),
    }
    return hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:12]


def _print(suite: "Suite", told: Mapping[str, Any]) -> None:
    missing = sum(told["missing"].values())
    title = f"{suite.title} ({missing} questions are missing)" if missing else suite.title
    print(f"{title}: {suite.rule}. Terms: {suite.terms}.")
    for name, value in told["scores"].items():
        print(f"    {name:<28}{_shown(value, '.4f'):<32}{value['num']:>7,} questions")
    for words, name in (("the longer answer wins", "longer_wins"), ("more Markdown wins", "more_markdown_wins")):
        print(f"    {words:<28}{'-' if told[name] is None else format(told[name], '.4f')}")
    print(f"    {'above the longer answer by':<28}{_shown(told['over_longer_wins'], '+.4f')}")
    if told["num_unreadable"]:
        print(f"    {told['num_unreadable']} questions have an answer that the model cannot read: not right")
    print()


def _shown(value: Mapping[str, Any], form: str) -> str:
    if value["value"] is None:
        return f"- ({value['reason']})"
    low, high = value["ci_low"], value["ci_high"]
    return format(value["value"], form) + ("" if low is None else f" [{low:{form}}, {high:{form}}]")


def _print_differences(suites: Mapping[str, dict[str, Any]], against: str) -> None:
    """The differences, and which are shown after Holm's correction over the benchmarks."""
    from rmcore.evaluation.verdicts.judgement import holm

    print(f"Against {against}, on the same questions:")
    differences = {name: told["difference"] for name, told in suites.items()}
    adjusted = holm([1.0 if value["p"] is None else value["p"] for value in differences.values()])
    for (name, value), p in zip(differences.items(), adjusted, strict=True):
        value["p_adjusted"] = p
        is_shown = value["value"] is not None and p < LEVEL
        verdict = "cannot be told apart" if not is_shown else "better" if value["value"] > 0 else "worse"
        print(f"    {name:<28}{_shown(value, '+.4f'):<32} {verdict}")
