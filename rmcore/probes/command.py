"""`rm-opt probe`: edits of answers that must not pay, and training pairs against those that do."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rmcore.cli.common import print_block, setting, write_report_json
from rmcore.cli.inputs import Checkpoint, Data, JsonOut, ModelReading, PairReading, Seed
from rmcore.cli.options import options
from rmcore.config.data import DataConfig
from rmcore.core.errors import ConfigError

if TYPE_CHECKING:
    from rmcore.data.pair import PreferencePair
    from rmcore.probes.rule import Rule

SHOWN_CHARS = 160
"""Characters of a text in the terminal."""
KEPT_CHARS = 1000
"""The same in the JSON record."""


@options()
def probe(
    checkpoint: Checkpoint,
    data: Data,
    reading: PairReading,
    model: ModelReading,
    pairs_per_prompt: Annotated[int | None, setting(DataConfig, "pairs_per_prompt")] = None,
    rule: Annotated[
        list[str] | None,
        typer.Option(
            "--rule", help="A rule by name, or module:function of your own; repeatable. Default: all of them."
        ),
    ] = None,
    repair: Annotated[
        Path | None,
        typer.Option(
            help="Write --repair-data with counterfactual pairs for the violated rules mixed in: .parquet or .jsonl."
        ),
    ] = None,
    repair_data: Annotated[
        str | None, typer.Option(help="Training pairs that --repair is made of; never those that are measured.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say of the worst mistakes what each sentence adds to its reward, too.")
    ] = False,
    seed: Seed = 0,
    json_out: JsonOut = None,
) -> None:
    """Edit answers in ways that must not pay, or must cost, and see what the rewards do.

    Each rule edits the answers of the pairs. It is violated where that is shown with an interval over prompts and after
    Holm's correction over all rules, and repaired by training on pairs that --repair writes.

    Example: rm-opt probe --checkpoint out/best --data test.parquet --repair fixed.parquet --repair-data train.parquet
    """
    from rmcore.core.progress import progress_bar
    from rmcore.data.pair import cap_pairs
    from rmcore.data.table import check_target
    from rmcore.probes.blocks import probe_block, tables_of_pairs
    from rmcore.probes.effects import explain_mistakes
    from rmcore.probes.measure import probe as measure
    from rmcore.probes.rules import find_rules
    from rmcore.reporting.html.cards import mistakes_block

    if (repair is None) != (repair_data is None):
        raise ConfigError(
            "--repair FILE and --repair-data TRAINING go together: counterfactual pairs are made of training data, and "
            "pairs that measure the repaired model must not be among them."
        )
    rules = find_rules(rule or [])
    if repair is not None and repair_data is not None:
        check_target(repair, repair_data, force=False)
    read = reading.read(data)
    pairs = cap_pairs(read, pairs_per_prompt)
    if len(pairs) < len(read):
        print(f"{len(pairs):,} of {len(read):,} pairs are measured, at most {pairs_per_prompt} of a prompt")
    rm = model.load(checkpoint)
    with progress_bar("probe") as report:
        found = measure(rm, pairs, rules, seed=seed, report=report)
        mistakes = explain_mistakes(rm, read, report=report) if explain else None
    print_block(probe_block(found.to_dict(SHOWN_CHARS)), is_whole=True)
    record: dict[str, Any] = {**model.named(checkpoint), "data": data, **found.to_dict(KEPT_CHARS)}
    if mistakes is not None:
        print_block(mistakes_block(mistakes, tables_of_pairs({"mistakes": mistakes})), is_whole=True)
        record["mistakes"] = mistakes
    if repair is not None and repair_data is not None:
        violated = [one for one in rules if one.name in found.violated]
        record["repair"] = _write_repair(violated, pairs, repair, repair_data, reading, seed)
    write_report_json(json_out, record)


def _write_repair(
    rules: "list[Rule]", measured: "list[PreferencePair]", out: Path, source: str, reading: PairReading, seed: int
) -> dict[str, Any] | None:
    """Write training pairs with counterfactual ones; nothing where no rule is violated."""
    from rmcore.data.table import write_converted
    from rmcore.probes.rules import RULE_KEY, repair_pairs

    if not rules:
        print(f"{out} is not written: no rule is shown to be violated, so there is nothing to repair.")
        return None
    training = replace(reading, limit=None).read(source)
    shared = {pair.prompt_id for pair in training} & {pair.prompt_id for pair in measured}
    if shared:
        raise ConfigError(
            f"{len(shared)} prompts of --repair-data {source} are among those that are measured: a model trained on "
            "them has seen its test. Name training pairs with prompts of their own."
        )
    pairs = repair_pairs(training, rules, seed=seed)
    write_converted(pairs, out)
    added = dict(Counter(pair.metadata[RULE_KEY] for pair in pairs if RULE_KEY in pair.metadata))
    print(f"{out}: {len(training):,} pairs of {source} and {sum(added.values()):,} counterfactual ones")
    for name, number in added.items():
        print(f"    {name:<20}{number:>8,}")
    return {"file": str(out), "num_pairs": len(training), "num_counterfactual": added}
