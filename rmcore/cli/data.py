"""`rm-opt data ...`: look at preference data before training on it, and convert it."""

import shlex
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from rmcore.cli.common import setting, write_report_json
from rmcore.cli.inputs import JsonOut, PairReading, changed_reading, set_words
from rmcore.cli.options import options
from rmcore.config.data import DataConfig
from rmcore.core.capabilities import capabilities
from rmcore.core.printing import printable_lines

RejectedRows = Annotated[
    Path | None, typer.Option(help="Write the rows that cannot be used, with reasons, to this JSONL file.")
]

GradeColumns = Annotated[list[str] | None, setting(DataConfig, "grade_columns")]

app = typer.Typer(no_args_is_help=True, help="Look at preference data, convert it, and choose what to label next.")


@app.callback()
def group() -> None:
    """Look at preference data, convert it, and choose what to label next."""


@app.command()
@options()
def check(
    file: Annotated[str, typer.Argument(help="A data file, a datasets folder or a hub name.")],
    reading: PairReading,
    margin_column: Annotated[str | None, setting(DataConfig, "margin_column")] = None,
    grade_columns: GradeColumns = None,
    rejected_rows: RejectedRows = None,
    json_out: JsonOut = None,
) -> None:
    """Audit preference data: layout, judgements, unusable rows, duplicates, lengths, and three rows as understood."""
    from rmcore.data.audit import audit, format_audit
    from rmcore.data.observation import Observation
    from rmcore.data.observation_counts import examples, format_examples
    from rmcore.data.readers.sources import load_pairs, write_rejected

    columns = reading.columns(margin=margin_column, grades=grade_columns)
    loaded = load_pairs(file, split=reading.split, columns=columns, limit=reading.limit, require_pairs=False)
    said = loaded.observations or [Observation.of_pair(pair) for pair in loaded.pairs]
    findings = audit({"all": loaded.pairs}, [loaded], {"all": said})
    findings["examples"] = examples(said)
    print(printable_lines(format_audit(findings) + format_examples(findings["examples"], len(said))))
    if rejected_rows is not None:
        write_rejected(loaded.rejected, rejected_rows)
    write_report_json(json_out, findings)
    if loaded.pairs or loaded.observations:
        named = {"data.margin_column": margin_column, "data.grade_columns": grade_columns or None}
        changed = set_words({**changed_reading(reading.config(file)), **named})
        print(printable_lines(f"\nnext        {shlex.join(['rm-opt', 'run', '--data', file, *changed])}"))


@app.command()
@options()
def convert(
    source: Annotated[str, typer.Argument(help="A data file, a datasets folder or a hub name.")],
    out: Annotated[Path, typer.Argument(help="The file to write: .parquet or .jsonl.")],
    reading: PairReading,
    margin_column: Annotated[str | None, setting(DataConfig, "margin_column")] = None,
    grade_columns: GradeColumns = None,
    rejected_rows: RejectedRows = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file if it is there.")] = False,
) -> None:
    """Write preference data of any recognised layout as prompt, chosen, rejected, target_margin and metadata.

    Read again, the file gives the same pairs with the same ids; ties, rankings and grades are written as the pairs that
    they imply. Example: rm-opt data convert export.json pairs.parquet
    """
    from rmcore.data.readers.sources import load_pairs, write_rejected
    from rmcore.data.table import check_target, write_converted

    check_target(out, source, force=force)
    loaded = load_pairs(
        source,
        split=reading.split,
        columns=reading.columns(margin=margin_column, grades=grade_columns),
        limit=reading.limit,
    )
    write_converted(loaded.pairs, out)
    with_margin = sum(pair.target_margin is not None for pair in loaded.pairs)
    said = [
        f"{source}: {loaded.layout}",
        f"{'rows read':<32}{loaded.num_rows:>9,}",
        f"{'pairs written':<32}{len(loaded.pairs):>9,}  {with_margin:,} of them with a margin",
        f"{'rows left out':<32}{len(loaded.rejected):>9,}",
    ]
    reasons = Counter(row.reason for row in loaded.rejected).most_common()
    said += [f"    {reason:<28}{count:>9,}" for reason, count in reasons]
    if loaded.num_ties:
        said.append(f"{'ties, which are no pairs':<32}{loaded.num_ties:>9,}")
    print(printable_lines("\n".join([*said, *loaded.notices()])))
    if rejected_rows is not None:
        write_rejected(loaded.rejected, rejected_rows)
    print(printable_lines(f"Written to {out}. Look at it: rm-opt data check {out}"))


for capability, what in capabilities().items():
    for name in what.data_commands:
        app.command()(getattr(import_module(f"rmcore.{capability}.command"), name))
