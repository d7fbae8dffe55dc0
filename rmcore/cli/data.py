"""`rm-opt data ...`: look at preference data before training on it."""

from pathlib import Path
from typing import Annotated

import typer

from rmcore.cli.common import setting, write_report_json
from rmcore.cli.inputs import JsonOut, PairReading
from rmcore.cli.options import options
from rmcore.config.pipeline import DataConfig

app = typer.Typer(no_args_is_help=True, help="Look at preference data before training on it.")


@app.callback()
def group() -> None:
    """Look at preference data before training on it."""


@app.command()
@options()
def check(
    file: Annotated[str, typer.Argument(help="A data file, a datasets folder or a hub name.")],
    reading: PairReading,
    margin_column: Annotated[str | None, setting(DataConfig, "margin_column")] = None,
    rejected_rows: Annotated[
        Path | None, typer.Option(help="Write the rows that cannot be used, with reasons, to this JSONL file.")
    ] = None,
    json_out: JsonOut = None,
) -> None:
    """Audit preference data: layout, unusable rows, duplicates, prompts, lengths, and what length alone predicts."""
    from rmcore.data.audit import audit, format_audit
    from rmcore.data.readers.sources import load_pairs, write_rejected

    loaded = load_pairs(file, split=reading.split, columns=reading.columns(margin=margin_column), limit=reading.limit)
    findings = audit({"all": loaded.pairs}, [loaded])
    print(format_audit(findings))
    if rejected_rows is not None:
        write_rejected(loaded.rejected, rejected_rows)
    write_report_json(json_out, findings)
