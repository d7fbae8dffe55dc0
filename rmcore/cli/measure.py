"""`rm-opt evaluate | score | diff`, and readiness v1: measure checkpoints on a file of pairs."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from rmcore.cli.analyze import measure_model
from rmcore.cli.common import print_metrics, setting, write_report_json
from rmcore.cli.inputs import (
    Checkpoint,
    ChosenColumn,
    Data,
    Device,
    JsonOut,
    Limit,
    MaxLen,
    MeasuredModel,
    PairSource,
    PromptColumn,
    RejectedColumn,
    RenderFn,
    Seed,
    Split,
    read_pairs,
    tell_unusable,
)
from rmcore.config.pipeline import EvaluateConfig, LandscapeConfig, PipelineConfig, ReadinessConfig
from rmcore.data.pair import PreferencePair

EVALUATE = EvaluateConfig()


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
    threshold: Annotated[
        list[float], typer.Option(help=f"{EvaluateConfig.model_fields['thresholds'].description} Repeat it for more.")
    ] = list(EVALUATE.thresholds),  # noqa: B006 - typer reads it, nobody changes it
    per_response: Annotated[bool, setting(EvaluateConfig, "per_response")] = EVALUATE.per_response,
    max_seq_len: MaxLen = None,
    render_fn: RenderFn = None,
    device: Device = "auto",
    seed: Seed = 0,
) -> None:
    """Measure a reward model on preference pairs: accuracy, calibration, margins, with 95 % intervals over prompts."""
    config = EvaluateConfig(
        num_resamples=num_resamples, num_bins=num_bins, thresholds=tuple(threshold), per_response=per_response
    )
    pairs = read_pairs(data, split, limit, (prompt_column, chosen_column, rejected_column))
    model = MeasuredModel(checkpoint, max_seq_len, render_fn, device)
    table, cut, metrics = _evaluate(model, pairs, config, seed)
    if cut["num_cut_sides"]:
        print(f"{cut['num_cut_sides']} of {2 * cut['num_pairs']} sides were longer than the limit and were cut")
    print_metrics(f"{checkpoint} on {data}", metrics)
    if rewards is not None:
        rewards.parent.mkdir(parents=True, exist_ok=True)
        table.to_parquet(rewards)
    write_report_json(json_out, {"num_pairs": len(table), "metrics": metrics, "truncation": cut})


def v1_readiness(
    model: MeasuredModel,
    source: PairSource,
    *,
    train_data: str | None,
    num_pairs: int,
    seed: int,
    json_out: Path | None,
) -> None:
    """Judge a model on labelled pairs alone: the v1 score, the gate and the verdict, printed."""
    from rmcore.stages.readiness import judge

    pairs = source.read()
    config = PipelineConfig(landscape=LandscapeConfig(parts=(), num_pairs=num_pairs))
    _, _, metrics = _evaluate(model, pairs, config.evaluate, seed)
    train_accuracy = None
    if train_data is not None:
        seen = replace(source, data=train_data, limit=config.evaluate.train_pairs).read()
        train_metrics = _evaluate(model, seen, config.evaluate, seed)[2]
        train_accuracy = train_metrics["pairwise_accuracy"]["value"]
    spectrum = measure_model(model, pairs, config.landscape, seed=seed)["spectrum"]
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
    from rmcore.core.progress import progress_bar
    from rmcore.data.responses import load_responses
    from rmcore.ensembles.score import score_pairs_table, score_responses_table

    rm = MeasuredModel(checkpoint, max_seq_len, render_fn, device).load()
    responses = load_responses(data, split=split, limit=limit)
    if responses is not None and responses.num_unusable:
        tell_unusable(data, responses.num_unusable, responses.num_rows)
    with progress_bar("score") as report:
        if responses is None:
            table, _ = score_pairs_table(
                rm, read_pairs(data, split, limit, (prompt_column, chosen_column, rejected_column)), report=report
            )
        else:
            table = score_responses_table(rm, responses.rows, report=report)
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
    from rmcore.evaluation.comparison import paired_comparison

    pairs = read_pairs(data, split, limit, (prompt_column, chosen_column, rejected_column))
    tables = [
        _score(MeasuredModel(name, max_seq_len, render_fn, device), pairs)[0] for name in (checkpoint_a, checkpoint_b)
    ]
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


def _score(model: MeasuredModel, pairs: list[PreferencePair]) -> Any:
    from rmcore.core.progress import progress_bar
    from rmcore.ensembles.score import score_pairs_table

    with progress_bar("score") as report:
        return score_pairs_table(model.load(), pairs, report=report)


def _evaluate(
    model: MeasuredModel, pairs: list[PreferencePair], config: EvaluateConfig, seed: int
) -> tuple[Any, dict[str, int], dict[str, dict[str, Any]]]:
    from rmcore.stages.evaluate import measure

    table, cut = _score(model, pairs)
    return table, cut, {name: value.to_dict() for name, value in measure(table, config, seed=seed).items()}
