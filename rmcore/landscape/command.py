"""`rm-opt analyze`: the curvature of the loss at a checkpoint, on a file of pairs."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from rmcore.cli.common import print_block, write_report_json
from rmcore.cli.help import common
from rmcore.cli.inputs import Checkpoint, Data, JsonOut, ModelReading, PairReading, Seed
from rmcore.cli.options import field_options, given, options
from rmcore.landscape.settings import LandscapeConfig

FIELDS = tuple(LandscapeConfig.model_fields)


@options(*field_options(LandscapeConfig, FIELDS, panel="Curvature"))
@common(
    "limit", "max_seq_len", "device", "type_", "method", "out", "json_out", "num_pairs", "parameters", "lanczos_steps"
)
def analyze(
    checkpoint: Checkpoint,
    data: Data,
    reading: PairReading,
    model: ModelReading,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Also write the record and its figure into this folder.")
    ] = None,
    json_out: JsonOut = None,
    type_: Annotated[
        Literal["hessian"], typer.Option("--type", "-t", help="What is analysed: the Hessian of the loss.")
    ] = "hessian",
    seed: Seed = 0,
    **settings: Any,
) -> None:
    """Measure the curvature of the loss at a checkpoint: both ends of the spectrum, and the trace.

    Example: rm-opt analyze --checkpoint DIR --data pairs.parquet --num-pairs 64 --out curvature

    docs/landscape.md says what each number means and what it must not be read as.
    """
    from rmcore.landscape.blocks import curvature_block

    model = model.in_float32("curvature drowns in their rounding")
    pairs = reading.read(data)
    config = LandscapeConfig.model_validate(given(settings, FIELDS))
    record = measure_model(model.load(checkpoint), pairs, config, seed=seed)
    print(f"{checkpoint} on {record['num_pairs']} pairs of {data}")
    print_block(curvature_block(record))
    write_report_json(json_out, record)
    if out is not None:
        from rmcore.landscape.stage import write_curvature

        out.mkdir(parents=True, exist_ok=True)
        write_curvature(record, out)
        print(f"written     {out}")


def measure_model(rm: Any, pairs: list[Any], config: LandscapeConfig, *, seed: int) -> dict[str, Any]:
    """The curvature record of the reward model `rm` on pairs drawn from `pairs`."""
    from rmcore.core.progress import progress_bar
    from rmcore.landscape.measure import measure_curvature
    from rmcore.landscape.sample import draw_sample

    sample = draw_sample(rm, pairs, config, seed=seed)
    with progress_bar("analyze") as report:
        return measure_curvature(rm, sample, config, seed=seed, report=report)
