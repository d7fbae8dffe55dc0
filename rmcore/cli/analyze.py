"""`rm-opt analyze`: the curvature of the loss at a checkpoint, on a file of pairs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from rmcore.cli.common import write_report_json
from rmcore.cli.help import common
from rmcore.cli.inputs import Checkpoint, Data, JsonOut, ModelReading, PairReading, Seed
from rmcore.cli.options import field_options, given, options
from rmcore.config.landscape import CurvaturePart, LandscapeConfig

LANDSCAPE = LandscapeConfig()
Kind = Literal["hessian", "ggn", "density", "slices", "layers", "noise", "all"]
PARTS: dict[Kind, tuple[CurvaturePart, ...]] = {
    "hessian": ("normalized",),
    "ggn": ("gauss_newton",),
    "density": ("density",),
    "slices": ("slices",),
    "layers": ("layers",),
    "noise": ("noise",),
    "all": LANDSCAPE.parts,
}
FIELDS = tuple(name for name in LandscapeConfig.model_fields if name not in ("checkpoint", "parts"))
"""Settings that the command line names alike; not the others: --checkpoint is a folder, --type chooses the parts."""


@options(*field_options(LandscapeConfig, FIELDS, panel="Curvature"))
@common("limit", "max_seq_len", "device", "kind", "out", "json_out", "num_pairs", "parameters", "lanczos_steps")
def analyze(
    checkpoint: Checkpoint,
    data: Data,
    reading: PairReading,
    model: ModelReading,
    kind: Annotated[
        Kind,
        typer.Option(
            "--type",
            "-t",
            help="hessian: both ends and the trace, also at margins of size 1 (the others have both ends, too). "
            "ggn: the exact spectrum of the Gauss-Newton matrix. density: of all eigenvalues. slices: the loss along "
            "directions. layers: trace and ends by layer. noise: errors over prompts, and bf16. all: everything.",
        ),
    ] = "hessian",
    out: Annotated[
        Path | None, typer.Option(help="Also write a page to read, the figures and the record into this folder.")
    ] = None,
    other: Annotated[
        str | None, typer.Option(help="Another checkpoint of the same shape: slices then show the way to it.")
    ] = None,
    json_out: JsonOut = None,
    seed: Seed = 0,
    **settings: Any,
) -> None:
    """Measure the curvature of the loss at a checkpoint.

    What it is, how sure that is, and where it sits: in the head, in a layer, in an adapter.

    Example: rm-opt analyze --checkpoint DIR --data pairs.parquet --type all --num-pairs 64 --out curvature

    docs/landscape.md says what each number means and what it must not be read as.
    """
    model.require_float32("curvature drowns in their rounding")
    chosen = given(settings, FIELDS)
    parts = tuple(part for part in PARTS[kind] if part != "normalized" or chosen.get("method") != "power_iteration")
    config = LandscapeConfig.model_validate({"parts": parts, **chosen})
    pairs = reading.read(data)
    there = None if other is None else model.load(other)
    record = measure_model(model.load(checkpoint), pairs, config, seed=seed, other=there)
    _print(record, f"{checkpoint} on {record['spectrum']['num_pairs']} pairs of {data}")
    write_report_json(json_out, record)
    if out is not None:
        print(f"page        {_write(record, out, checkpoint, data)}")


def measure_model(
    rm: Any, pairs: list[Any], config: LandscapeConfig, *, seed: int, other: Any = None
) -> dict[str, Any]:
    """The curvature record of the reward model `rm` on pairs drawn from `pairs`."""
    from rmcore.core.progress import progress_bar
    from rmcore.landscape.measure import measure_curvature
    from rmcore.stages.landscape import draw_sample

    sample = draw_sample(rm, pairs, config, seed=seed)
    with progress_bar("analyze") as report:
        return measure_curvature(rm, sample, config, seed=seed, report=report, other=other)


def _print(record: Mapping[str, Any], title: str) -> None:
    """The tables of the page, on the terminal."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from rmcore.reporting.html.curvature_rows import block_rows, groups

    console = Console()
    console.print(escape(title))
    for sentence in record.get("left_out", []):
        console.print(escape(sentence))
    for group in groups(record):
        table = Table("quantity", "value", "error on these pairs", "error over prompts", title_justify="left")
        table.title = escape(f"{group.title}: {group.basis}")
        for row in group.rows:
            cells = (" ".join(cell).strip() for cell in (row.value, row.computed, row.sampled))
            table.add_row(escape(row.label), *map(escape, cells))
        console.print(table)
    if "layers" in record:
        table = Table("block", "parameters", "trace", "λmax", "λmin", title="by layer", title_justify="left")
        for block in block_rows(record):
            table.add_row(
                *map(escape, (block.name, block.num_parameters, block.trace, block.lambda_max, block.lambda_min))
            )
        console.print(table)


def _write(record: Mapping[str, Any], out: Path, checkpoint: str, data: str) -> Path:
    """The page, the figures and the record in one folder; returns the page."""
    from rmcore.reporting.html.curvature import write_curvature_page
    from rmcore.stages.landscape import write_curvature

    out.mkdir(parents=True, exist_ok=True)
    write_curvature(record, out)
    figures = {path.stem: path for path in sorted((out / "figures").glob("*.png"))}
    facts = [("checkpoint", checkpoint), ("pairs", data)]
    return write_curvature_page(
        record, figures, out / "curvature.html", title=f"Curvature of {checkpoint}", facts=facts
    )
