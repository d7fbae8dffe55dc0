"""`rm-opt benchmark`: a reward model on public benchmarks, by their own rules, with intervals."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rmcore.cli.common import print_block, write_report_json
from rmcore.cli.inputs import Checkpoint, JsonOut, ModelReading
from rmcore.cli.options import options
from rmcore.core.errors import ConfigError, DataError
from rmcore.reporting.figures import numbers

if TYPE_CHECKING:
    from rmcore.data.pair import PreferencePair
    from rmcore.suites.overlap import Overlap

NAMES = ("rewardbench", "rewardbench2", "rm-bench", "llmbar", "judgebench", "rmb", "ppe-human", "ppe-correctness")
PUBLISHED_SUFFIX = ".json"


@options()
def benchmark(
    checkpoint: Checkpoint,
    suite: Annotated[
        list[str],
        typer.Option(
            help=f"{', '.join(NAMES)}; NAME=PATH: its own file or folder here; FILE.yaml: a set of your own. May be "
            "repeated. A NAME alone is fetched from the Hugging Face hub; all: every one that is there."
        ),
    ],
    model: ModelReading,
    out: Annotated[Path, typer.Option(help="Folder of the rewards: what is there already is not scored again.")] = Path(
        "benchmark-rewards"
    ),
    against: Annotated[
        list[str], typer.Option(help="Another checkpoint or hub name, or published scores in a .json. May be repeated.")
    ] = [],  # noqa: B006 - typer copies it
    train_data: Annotated[
        str | None,
        typer.Option(
            help="Pairs that the model was trained on: their overlap with each set, and what their words get."
        ),
    ] = None,
    decontaminate: Annotated[
        Path | None, typer.Option(help="Write the training pairs that share no prompt with a set: .parquet or .jsonl.")
    ] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Accept a set with rows missing; its score is no published one's equal.")
    ] = False,
    json_out: JsonOut = None,
) -> None:
    """Score a reward model on public benchmarks, each by its own rule.

    Intervals are 95 %, over prompts. Next to the score is that of rules that read nothing: the longer answer, or the
    one with more Markdown.

    Example: rm-opt benchmark --checkpoint out/best --suite judgebench=gpt.jsonl --suite llmbar=LLMBar/Dataset/LLMBar
    """
    from rmcore.cli.inputs import PairReading, read_pairs
    from rmcore.core.progress import progress_bar
    from rmcore.data.render_fn import render_fn_digest
    from rmcore.data.table import check_target
    from rmcore.reporting.html.benchmarks import benchmarks_block
    from rmcore.suites.record import benchmark_record, find_overlaps
    from rmcore.suites.sets import read_sets
    from rmcore.suites.standing import read_published, require_known
    from rmcore.suites.stored import stored_rewards

    if decontaminate is not None:
        if train_data is None:
            raise ConfigError("--decontaminate writes training pairs: name them with --train-data.")
        check_target(decontaminate, train_data, force=False)
    files = [name for name in against if name.endswith(PUBLISHED_SUFFIX)]
    published = _merged([read_published(Path(name)) for name in files])
    models = [checkpoint, *(name for name in against if name not in files)]
    places = {Path(name).resolve() if Path(name).exists() else name for name in models}
    if len(places | published.keys()) < len(models) + len(published):
        raise ConfigError("--against names a model twice, or the checkpoint itself: each is compared once.")
    sets = read_sets(suite, partial=partial)
    require_known(published, sets)
    pairs = None if train_data is None else read_pairs(train_data, PairReading())
    overlaps: Sequence[Overlap] = ()
    if pairs is not None:
        with progress_bar("overlap") as report:
            overlaps = find_overlaps(pairs, sets, report=report)
    read_as = {
        "max_seq_len": model.max_seq_len,
        "render_fn": None if model.render_fn is None else render_fn_digest(model.render_fn),
    }
    if model.weights != "float32":  # so that rewards in float32 keep the names they had before there was a choice
        read_as["dtype"] = model.weights
    rewards = {name: stored_rewards(name, sets, out, model.load, read_as) for name in models}
    record = benchmark_record(sets, rewards, published=published, pairs=pairs, overlaps=overlaps)
    write_report_json(json_out, model.named(checkpoint) | record)
    print_block(benchmarks_block(record), is_whole=True)
    for told in record["suites"].values():
        if "standing" in told:
            _print_standing(told, checkpoint)
        if published and told["missing"]:
            print(f"{told['title']}: published scores are of the whole set, and not compared with a part of it")
    if pairs is not None and decontaminate is not None:
        _write_rest(pairs, overlaps, decontaminate)


def _merged(files: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Published scores of several files by model.

    Raises:
        ConfigError: two files give a model different scores on one benchmark.
    """
    found: dict[str, dict[str, float]] = {}
    for file in files:
        for model, scores in file.items():
            known = found.setdefault(model, {})
            if differing := [name for name in scores if known.get(name, scores[name]) != scores[name]]:
                raise ConfigError(f"two files give {model} different scores on {differing[0]}: keep one of them.")
            known.update(scores)
    return found


def _write_rest(pairs: "Sequence[PreferencePair]", overlaps: "Sequence[Overlap]", out: Path) -> None:
    from rmcore.data.table import write_converted

    kept = [pair for place, pair in enumerate(pairs) if not any(one.pairs[place] for one in overlaps)]
    if not kept:
        raise DataError(
            f"all {len(pairs):,} training pairs share a prompt with these sets, so {out} would be empty and is not "
            "written: were the model trained on the benchmark itself?"
        )
    write_converted(kept, out)
    print(f"{len(kept):,} of {len(pairs):,} training pairs share no prompt with these sets: written to {out}")


def _print_standing(told: Mapping[str, Any], checkpoint: str) -> None:
    """Places with ties, and the difference of each model to this one, after Holm's correction over all of them."""
    print(f"\n{told['title']}: place  model")
    for one in told["standing"]:
        against = told["differences"].get(one["model"])
        words = "this model" if one["model"] == checkpoint else "" if against is None else _against(against)
        published = ", published" if one["is_published"] else ""
        print(f"    {one['place']:>5}  {one['model']} {numbers.percent(one['score'])}{published}  {words}")


def _against(value: Mapping[str, Any]) -> str:
    verdicts = {"better": "this model is better", "worse": "this model is worse"}
    return f"{verdicts.get(value['verdict'], value['verdict'])}: {numbers.with_interval(value, 'points')}"
