"""`rm-opt benchmark`: a reward model on public benchmarks, by their own rules, with intervals."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rmcore.cli.common import print_block, write_report_json
from rmcore.cli.inputs import Checkpoint, JsonOut, ModelReading
from rmcore.cli.options import options
from rmcore.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rmcore.data.pair import PreferencePair
    from rmcore.suites.record import Overlap

NAMES = ("rewardbench", "rewardbench2", "rm-bench", "llmbar", "judgebench", "rmb", "ppe-human", "ppe-correctness")


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
    train_data: Annotated[
        str | None,
        typer.Option(help="Pairs that the model was trained on, whose prompts are compared with those of each set."),
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

    Intervals are 95 %, over prompts. Next to the score is that of a rule that reads nothing: the longer answer.

    Example: rm-opt benchmark --checkpoint out/best --suite judgebench=gpt.jsonl --suite llmbar=LLMBar/Dataset/LLMBar
    """
    from rmcore.cli.inputs import PairReading, read_pairs
    from rmcore.core.progress import progress_bar
    from rmcore.data.render_fn import render_fn_digest
    from rmcore.data.table import check_target
    from rmcore.suites.blocks import benchmarks_block
    from rmcore.suites.record import benchmark_record, find_overlaps, stored_rewards
    from rmcore.suites.sets import read_sets

    if decontaminate is not None:
        if train_data is None:
            raise ConfigError("--decontaminate writes training pairs: name them with --train-data.")
        check_target(decontaminate, train_data, force=False)
    sets = read_sets(suite, partial=partial)
    pairs = None if train_data is None else read_pairs(train_data, PairReading())
    overlaps: Sequence[Overlap] = ()
    if pairs is not None:
        with progress_bar("overlap") as report:
            overlaps = find_overlaps(pairs, sets, report=report)
    read_as = {
        "max_seq_len": model.max_seq_len,
        "render_fn": None if model.render_fn is None else render_fn_digest(model.render_fn),
        "dtype": model.weights,
    }
    rewards = stored_rewards(checkpoint, sets, out, model.load, read_as)
    record = benchmark_record(checkpoint, sets, rewards, overlaps)
    write_report_json(json_out, model.named(checkpoint) | record)
    print_block(benchmarks_block(record), is_whole=True)
    if pairs is not None and decontaminate is not None:
        _write_rest(pairs, overlaps, decontaminate)


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
