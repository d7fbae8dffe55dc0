"""`rm-opt evaluate | analyze | readiness | score | diff`: measure checkpoints on a file of pairs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from rmcore.cli.common import print_metrics, setting, write_report_json
from rmcore.config import DataConfig, EvaluateConfig, LandscapeConfig, PipelineConfig, ReadinessConfig
from rmcore.data.pair import PreferencePair
from rmcore.errors import DataError

EVALUATE, LANDSCAPE = EvaluateConfig(), LandscapeConfig()
Checkpoint = Annotated[str, typer.Option(help="A trained checkpoint, or any Hugging Face reward model.")]
Data = Annotated[str, typer.Option("--data", help="Preference pairs: a file, a datasets folder or a hub name.")]
JsonOut = Annotated[Path | None, typer.Option("--json", help="Also write the result as JSON.")]
Limit = Annotated[int | None, setting(DataConfig, "limit")]
Split = Annotated[str, setting(DataConfig, "split")]
Device = Annotated[str, setting(PipelineConfig, "device")]
Seed = Annotated[int, typer.Option(help="Seeds resampling and random vectors.")]
RenderFn = Annotated[
    str | None,
    typer.Option(help="`module:function` the checkpoint was trained with, which it names and never imports by itself."),
]
MaxLen = Annotated[int | None, typer.Option(help="Longest side in tokens; default: as the checkpoint was trained.")]
PromptColumn = Annotated[str | None, setting(DataConfig, "prompt_column")]
ChosenColumn = Annotated[str | None, setting(DataConfig, "chosen_column")]
RejectedColumn = Annotated[str | None, setting(DataConfig, "rejected_column")]
NumPairs = Annotated[int, setting(LandscapeConfig, "num_pairs")]


@dataclass(frozen=True, slots=True)
class _Model:
    """Which reward model is measured and how it reads."""

    checkpoint: str
    max_seq_len: int | None
    render_fn: str | None
    device: str

    def load(self) -> Any:
        """A BradleyTerryRM, imported here: `--help` must not pay for torch."""
        from rmcore.model import BradleyTerryRM

        return BradleyTerryRM.from_pretrained(
            self.checkpoint, device=self.device, max_seq_len=self.max_seq_len, render_fn=self.render_fn
        )


def evaluate(
    checkpoint: Checkpoint,
    data: Data,
    json_out: JsonOut = None,
    rewards: Annotated[Path | None, typer.Option(help="Also write the per-pair rewards to this Parquet file.")] = None,
    limit: Limit = None,
    split: Split = "train",
    prompt_column: PromptColumn = None,
    chosen_column: ChosenColumn = None,
    rejected_column: RejectedColumn = None,
    num_resamples: Annotated[int, setting(EvaluateConfig, "num_resamples")] = EVALUATE.num_resamples,
    num_bins: Annotated[int, setting(EvaluateConfig, "num_bins")] = EVALUATE.num_bins,
    max_seq_len: MaxLen = None,
    render_fn: RenderFn = None,
    device: Device = "auto",
    seed: Seed = 0,
) -> None:
    """Measure a reward model on preference pairs: accuracy, calibration, margins, with 95 % intervals over prompts."""
    config = EvaluateConfig(num_resamples=num_resamples, num_bins=num_bins)
    pairs = _pairs(data, split, limit, (prompt_column, chosen_column, rejected_column))
    model = _Model(checkpoint, max_seq_len, render_fn, device)
    table, cut, metrics = _evaluate(model, pairs, config, seed)
    if cut["num_cut_sides"]:
        print(f"{cut['num_cut_sides']} of {2 * cut['num_pairs']} sides were longer than the limit and were cut")
    print_metrics(f"{checkpoint} on {data}", metrics)
    if rewards is not None:
        rewards.parent.mkdir(parents=True, exist_ok=True)
        table.to_parquet(rewards)
    write_report_json(json_out, {"num_pairs": len(table), "metrics": metrics, "truncation": cut})


def analyze(
    checkpoint: Checkpoint,
    data: Data,
    json_out: JsonOut = None,
    limit: Limit = None,
    split: Split = "train",
    prompt_column: PromptColumn = None,
    chosen_column: ChosenColumn = None,
    rejected_column: RejectedColumn = None,
    method: Annotated[str, setting(LandscapeConfig, "method")] = LANDSCAPE.method,
    num_pairs: NumPairs = LANDSCAPE.num_pairs,
    top_k: Annotated[int, setting(LandscapeConfig, "top_k")] = LANDSCAPE.top_k,
    lanczos_steps: Annotated[int, setting(LandscapeConfig, "lanczos_steps")] = LANDSCAPE.lanczos_steps,
    trace_probes: Annotated[int, setting(LandscapeConfig, "trace_probes")] = LANDSCAPE.trace_probes,
    parameters: Annotated[str, setting(LandscapeConfig, "parameters")] = LANDSCAPE.parameters,
    max_seq_len: MaxLen = None,
    render_fn: RenderFn = None,
    device: Device = "auto",
    seed: Seed = 0,
) -> None:
    """Measure the curvature of the loss: extreme eigenvalues with residuals, and the trace with its standard error."""
    config = LandscapeConfig.model_validate(
        {
            "method": method,
            "num_pairs": num_pairs,
            "top_k": top_k,
            "lanczos_steps": lanczos_steps,
            "trace_probes": trace_probes,
            "parameters": parameters,
        }
    )
    pairs = _pairs(data, split, limit, (prompt_column, chosen_column, rejected_column))
    record = _analyze(_Model(checkpoint, max_seq_len, render_fn, device), pairs, config, seed)
    for name, value in record.items():
        if name not in ("eigenvalues", "residuals", "reasons"):
            print(f"{name:<22} {record['reasons'].get(name, '-') if value is None else value}")
    print("eigenvalue ± residual")
    for value, residual in zip(record["eigenvalues"], record["residuals"], strict=True):
        print(f"  {value:12.5g} ± {residual:.2g}")
    write_report_json(json_out, {"num_pairs": record["num_pairs"], "spectrum": record})


def readiness(
    checkpoint: Checkpoint,
    data: Data,
    json_out: JsonOut = None,
    train_data: Annotated[
        str | None,
        typer.Option(help="Pairs it was trained on, for the train-test gap; without, that check fails."),
    ] = None,
    limit: Limit = None,
    split: Split = "train",
    prompt_column: PromptColumn = None,
    chosen_column: ChosenColumn = None,
    rejected_column: RejectedColumn = None,
    num_pairs: NumPairs = LANDSCAPE.num_pairs,
    max_seq_len: MaxLen = None,
    render_fn: RenderFn = None,
    device: Device = "auto",
    seed: Seed = 0,
) -> None:
    """Judge whether a policy may be optimised against this model: the v1 score, the gate and the verdict."""
    from rmcore.stages.readiness import judge

    pairs = _pairs(data, split, limit, (prompt_column, chosen_column, rejected_column))
    config = PipelineConfig(landscape=LandscapeConfig(num_pairs=num_pairs))
    model = _Model(checkpoint, max_seq_len, render_fn, device)
    _, _, metrics = _evaluate(model, pairs, config.evaluate, seed)
    train_accuracy = None
    if train_data is not None:
        seen = _pairs(train_data, split, config.evaluate.train_pairs, (prompt_column, chosen_column, rejected_column))
        train_metrics = _evaluate(model, seen, config.evaluate, seed)[2]
        train_accuracy = train_metrics["pairwise_accuracy"]["value"]
    spectrum = _analyze(model, pairs, config.landscape, seed)
    values = {name: entry["value"] for name, entry in metrics.items()}
    judged = judge(values, train_accuracy, spectrum["lambda_max"], ReadinessConfig())
    print(judged["verdict"]["headline"])
    for check in judged["gate"]:
        print(f"  {'pass' if check['passed'] else 'FAIL'}  {check['text']}")
    scores = judged["readiness"]
    print(f"readiness v1: {scores['overall_score']:.3f} ({scores['verdict']})")
    for advice in scores["recommendations"]:
        print(f"  advice: {advice}")
    write_report_json(json_out, {"num_pairs": len(pairs), **judged})


def score(
    checkpoint: Checkpoint,
    data: Annotated[str, typer.Option("--data", help="Pairs, or rows with columns prompt and response.")],
    out: Annotated[Path, typer.Option(help="Parquet file for the rewards.")],
    split: Split = "train",
    prompt_column: PromptColumn = None,
    chosen_column: ChosenColumn = None,
    rejected_column: RejectedColumn = None,
    limit: Limit = None,
    max_seq_len: MaxLen = None,
    render_fn: RenderFn = None,
    device: Device = "auto",
) -> None:
    """Write rewards of preference pairs, or of prompt/response rows, to Parquet."""
    from rmcore.progress import progress_bar
    from rmcore.scoring.score import score_pairs_table, score_responses_table

    rm = _Model(checkpoint, max_seq_len, render_fn, device).load()
    rows = _response_rows(data, split, limit)
    with progress_bar("score") as report:
        if rows is None:
            table, _ = score_pairs_table(
                rm, _pairs(data, split, limit, (prompt_column, chosen_column, rejected_column)), report=report
            )
        else:
            table = score_responses_table(rm, rows, report=report)
    out.parent.mkdir(parents=True, exist_ok=True)
    table.to_parquet(out)
    print(f"{len(table)} rows scored: {out}")


def diff(
    checkpoint_a: Annotated[str, typer.Argument(help="First checkpoint or Hugging Face reward model.")],
    checkpoint_b: Annotated[str, typer.Argument(help="Second one.")],
    data: Data,
    json_out: JsonOut = None,
    limit: Limit = None,
    split: Split = "train",
    prompt_column: PromptColumn = None,
    chosen_column: ChosenColumn = None,
    rejected_column: RejectedColumn = None,
    max_seq_len: MaxLen = None,
    render_fn: RenderFn = None,
    device: Device = "auto",
    seed: Seed = 0,
) -> None:
    """Compare two reward models on the same pairs: accuracy difference, its interval, a sign-flip test."""
    from rmcore.metrics.comparison import paired_comparison

    pairs = _pairs(data, split, limit, (prompt_column, chosen_column, rejected_column))
    tables = [_score(_Model(name, max_seq_len, render_fn, device), pairs)[0] for name in (checkpoint_a, checkpoint_b)]
    compared = paired_comparison(tables[0], tables[1], seed=seed)
    print(f"A = {checkpoint_a}\nB = {checkpoint_b}\n{len(pairs)} pairs of {data}")
    for name, value in compared.items():
        print(f"  {name:<34} {_shown(value)}")
    write_report_json(json_out, {"num_pairs": len(pairs), "a": checkpoint_a, "b": checkpoint_b, "comparison": compared})


def _shown(value: Any) -> str:
    if isinstance(value, dict) and "value" in value:
        if value["value"] is None:
            return f"- ({value.get('reason')})"
        interval = "" if value.get("ci_low") is None else f"  [{value['ci_low']:.4f}, {value['ci_high']:.4f}]"
        return f"{value['value']:.4f}{interval}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _pairs(
    data: str, split: str, limit: int | None, columns: tuple[str | None, str | None, str | None]
) -> list[PreferencePair]:
    """Read pairs; say how many rows could not be used."""
    from rmcore.data.layouts import ColumnMap
    from rmcore.data.sources import load_pairs

    prompt, chosen, rejected = columns
    loaded = load_pairs(
        data, split=split, columns=ColumnMap(prompt=prompt, chosen=chosen, rejected=rejected), limit=limit
    )
    if loaded.rejected:
        _tell_unusable(data, len(loaded.rejected), loaded.num_rows)
    return loaded.pairs


def _tell_unusable(data: str, num_unusable: int, num_rows: int) -> None:
    print(f"{num_unusable} of {num_rows} rows of {data} cannot be used and are left out; `rm-opt data check` says why")


def _score(model: _Model, pairs: list[PreferencePair]) -> Any:
    from rmcore.progress import progress_bar
    from rmcore.scoring.score import score_pairs_table

    with progress_bar("score") as report:
        return score_pairs_table(model.load(), pairs, report=report)


def _evaluate(
    model: _Model, pairs: list[PreferencePair], config: EvaluateConfig, seed: int
) -> tuple[Any, dict[str, int], dict[str, dict[str, Any]]]:
    from rmcore.stages.evaluate import measure

    table, cut = _score(model, pairs)
    return table, cut, {name: value.to_dict() for name, value in measure(table, config, seed=seed).items()}


def _analyze(model: _Model, pairs: list[PreferencePair], config: LandscapeConfig, seed: int) -> dict[str, Any]:
    from rmcore.progress import progress_bar
    from rmcore.stages.landscape import measure_spectrum

    rm = model.load()
    with progress_bar("analyze") as report:
        spectrum = measure_spectrum(
            rm,
            pairs,
            config,
            seed=seed,
            progress=lambda done, total: report(done, total, "Hessian-vector products"),
        )
    return spectrum.to_dict()


def _response_rows(data: str, split: str, limit: int | None) -> list[tuple[str, str]] | None:
    """(prompt, response) rows where the file has those columns and no pairs; None for pairs."""
    from itertools import islice

    from rmcore.data.sources import iter_records

    rows: list[tuple[str, str]] = []
    num_rows = 0
    for record in islice(iter_records(data, split=split), limit):
        fields = record.fields or {}
        is_side = "pair_id" in fields and ("role" in fields or "label" in fields)
        if not rows and fields and ("response" not in fields or is_side):
            return None
        num_rows += 1
        prompt, response = fields.get("prompt"), fields.get("response")
        if isinstance(prompt, str) and isinstance(response, str) and prompt.strip() and response.strip():
            rows.append((prompt, response))
    if num_rows and not rows:
        raise DataError(
            f"none of the {num_rows} rows of {data} has a text prompt and response, so nothing can be scored."
        )
    if len(rows) < num_rows:
        _tell_unusable(data, num_rows - len(rows), num_rows)
    return rows or None
