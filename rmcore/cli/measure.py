"""`rm-opt evaluate | readiness pairs | diff`: measure checkpoints on a file of pairs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from rmcore.cli.analyze import measure_model
from rmcore.cli.common import print_metrics, write_report_json
from rmcore.cli.help import common
from rmcore.cli.inputs import Checkpoint, Data, JsonOut, ModelReading, PairReading, Seed, read_pairs
from rmcore.cli.options import field_options, given, options
from rmcore.cli.verdict import print_verdict
from rmcore.config.data import DataConfig
from rmcore.config.evaluate import EvaluateConfig
from rmcore.config.landscape import LandscapeConfig
from rmcore.config.pipeline import PipelineConfig
from rmcore.config.readiness import ReadinessConfig
from rmcore.data.pair import PreferencePair
from rmcore.policy.readiness.verdict import next_rung
from rmcore.reporting.figures import numbers

Metrics = Mapping[str, Mapping[str, Any]]
EVALUATE_FIELDS = ("num_resamples", "num_bins", "thresholds", "per_response")
LANDSCAPE_FIELDS = ("num_pairs",)
THRESHOLD = {"thresholds": ("--threshold",)}
readiness_app = typer.Typer(
    no_args_is_help=True, help="Judge whether a policy may be optimised against a reward model."
)


@options(*field_options(EvaluateConfig, EVALUATE_FIELDS, flags=THRESHOLD))
@common(
    "limit",
    "prompt_column",
    "chosen_column",
    "rejected_column",
    "max_seq_len",
    "device",
    "dtype",
    "json_out",
    "rewards",
)
def evaluate(
    checkpoint: Checkpoint,
    data: Data,
    reading: PairReading,
    model: ModelReading,
    json_out: JsonOut = None,
    rewards: Annotated[Path | None, typer.Option(help="Also write the per-pair rewards to this Parquet file.")] = None,
    seed: Seed = 0,
    **settings: Any,
) -> None:
    """Measure a reward model on pairs: accuracy, calibration, margins, with intervals.

    Intervals are 95 %, resampled over prompts. Example: rm-opt evaluate --checkpoint out/best --data test.parquet
    """
    config = EvaluateConfig.model_validate(given(settings, EVALUATE_FIELDS))
    pairs = reading.read(data)
    rm = model.load(checkpoint)
    table, cut, metrics = _evaluate(rm, pairs, config, seed)
    for sentence in in_words(metrics):
        print(sentence)
    if cut["num_cut_sides"]:
        print(f"{cut['num_cut_sides']} of {2 * cut['num_pairs']} sides were longer than the limit and were cut")
    print_metrics(f"{checkpoint} on {data}", metrics)
    if rewards is not None:
        rewards.parent.mkdir(parents=True, exist_ok=True)
        table.to_parquet(rewards)
    told = {"num_pairs": len(table), "beta": rm.beta, "metrics": metrics, "truncation": cut}
    write_report_json(json_out, {**model.named(checkpoint), "data": data, **told})


@readiness_app.command("pairs")
@options(*field_options(LandscapeConfig, LANDSCAPE_FIELDS))
def readiness(
    checkpoint: Checkpoint,
    data: Data,
    reading: PairReading,
    model: ModelReading,
    train_data: Annotated[
        str | None, typer.Option(help="Pairs it was trained on, for the train-test gap; without, that check fails.")
    ] = None,
    json_out: JsonOut = None,
    seed: Seed = 0,
    **settings: Any,
) -> None:
    """Judge a reward model on labelled pairs alone: checks and a verdict, which never says more than those pairs do.

    Example: rm-opt readiness pairs --checkpoint out/best --data test.parquet --train-data train.parquet
    """
    from rmcore.policy.logged_answers import logged_answers, logged_table
    from rmcore.stages.readiness import judge

    model.require_float32("one of the checks is of curvature, which rounding drowns")
    pairs = reading.read(data)
    landscape = LandscapeConfig.model_validate({"parts": (), **given(settings, LANDSCAPE_FIELDS)})
    config = PipelineConfig(landscape=landscape)
    rm = model.load(checkpoint)
    table, _, metrics = _evaluate(rm, pairs, config.evaluate, seed)
    train_accuracy = None
    if train_data is not None:
        seen = read_pairs(train_data, reading, config.evaluate.train_pairs)
        train_metrics = _evaluate(rm, seen, config.evaluate, seed)[2]
        train_accuracy = train_metrics["pairwise_accuracy"]["value"]
    spectrum = measure_model(rm, pairs, config.landscape, seed=seed)["spectrum"]
    values = {name: entry["value"] for name, entry in metrics.items()}
    logged = logged_answers(logged_table(pairs, table), num_resamples=config.evaluate.num_resamples, seed=seed)
    over_baseline = metrics["accuracy_over_baseline"]
    judged = judge(values, train_accuracy, spectrum["lambda_max"], ReadinessConfig(), over_baseline, logged)
    more = next_rung(judged["verdict"], config.model_copy(update={"data": DataConfig(source=data)}), checkpoint)
    for check in judged["gate"]:
        print(f"{'pass' if check['passed'] else 'FAIL'}        {check['text']}")
    if (original := judged["readiness"]) is not None:
        for advice in original["recommendations"]:
            print(f"advice      {advice}")
        print(f"v1          {original['overall_score']:.3f}: the original score, no verdict")
    print()
    print_verdict(judged["verdict"], more)
    told = {"num_pairs": len(pairs), **judged, "logged_answers": logged, "next_rung": more}
    write_report_json(json_out, {**model.named(checkpoint), "data": data, **told})


@options()
def diff(
    checkpoint_a: Annotated[str, typer.Argument(help="First checkpoint or Hugging Face reward model.")],
    checkpoint_b: Annotated[str, typer.Argument(help="Second one.")],
    data: Data,
    reading: PairReading,
    model: ModelReading,
    json_out: JsonOut = None,
    seed: Seed = 0,
) -> None:
    """Compare two reward models on the same pairs: difference, interval, sign-flip test."""
    from rmcore.evaluation.comparison import paired_comparison

    pairs = reading.read(data)
    tables = [_score(model.load(name), pairs)[0] for name in (checkpoint_a, checkpoint_b)]
    compared = paired_comparison(tables[0], tables[1], seed=seed)
    print(f"A = {checkpoint_a}\nB = {checkpoint_b}\n{len(pairs)} pairs of {data}")
    for name, value in compared.items():
        print(f"  {name:<34} {_shown(value)}")
    told = {"num_pairs": len(pairs), "a": checkpoint_a, "b": checkpoint_b, "dtype": model.dtype}
    write_report_json(json_out, {**told, "comparison": compared})


def _shown(value: Any) -> str:
    if isinstance(value, dict) and "value" in value:
        if value["value"] is None:
            return f"- ({value.get('reason')})"
        interval = "" if value.get("ci_low") is None else f"  [{value['ci_low']:.4f}, {value['ci_high']:.4f}]"
        return f"{value['value']:.4f}{interval}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _score(rm: Any, pairs: list[PreferencePair]) -> Any:
    from rmcore.core.progress import progress_bar
    from rmcore.ensembles.score import score_pairs_table

    with progress_bar("score") as report:
        return score_pairs_table(rm, pairs, report=report)


def _evaluate(
    rm: Any, pairs: list[PreferencePair], config: EvaluateConfig, seed: int
) -> tuple[Any, dict[str, int], dict[str, dict[str, Any]]]:
    from rmcore.stages.evaluate import measure

    table, cut = _score(rm, pairs)
    measured = measure(table, config, seed=seed, beta=rm.beta)
    return table, cut, {name: value.to_dict() for name, value in measured.items()}


def in_words(metrics: Metrics) -> list[str]:
    """A sentence about accuracy, beside guessing and length, and one about the probabilities.

    Nothing is called better that is not so at the end of its 95 % interval.
    """
    return [_accuracy(metrics), _calibration(metrics)]


def _accuracy(metrics: Metrics) -> str:
    found = metrics["pairwise_accuracy"]
    if found["value"] is None:
        return f"How often it prefers the right side is unknown: {found.get('reason') or 'not measured'}."
    longer = numbers.finite(metrics.get("longer_wins_accuracy", {}).get("value"))
    bounds = numbers.interval(found, "share")
    said = f"It prefers the right side in {numbers.percent(found['value'])} of {numbers.count(found['num'])} pairs"
    said += f" (95 %: {bounds}); guessing is right in 50 %" if bounds else "; guessing is right in 50 %"
    said += "" if longer is None else f", always taking the longer side in {numbers.percent(longer)}"
    return f"{said}: {_against(metrics['accuracy_over_baseline'])}."


def _against(over: Mapping[str, Any]) -> str:
    """Say what the paired interval of accuracy over the better of chance and length shows."""
    low, high = numbers.finite(over["ci_low"]), numbers.finite(over["ci_high"])
    if low is None or high is None:
        return "without an interval nothing is shown by that"
    if low > 0:
        return "shown to be better than both"
    return f"{'shown to be worse' if high < 0 else 'not shown to be better'} than the better of the two"


def _calibration(metrics: Metrics) -> str:
    found = metrics["ece_debiased"]
    if found["value"] is None:
        return f"How far its probabilities can be trusted is unknown: {found.get('reason') or 'not measured'}."
    nothing = numbers.nothing_found("ece_debiased", found)
    if nothing is not None:
        end = numbers.finite(found["ci_high"])
        most = "" if end is None else f"; it may be up to {100 * end:.1f} points"
        return f"No error of its probabilities was found{most} (ECE, debiased)."
    shown = numbers.floored_item("ece_debiased", found)
    low, high = shown["ci_low"], shown["ci_high"]
    bounds = "" if low is None or high is None else f", 95 %: {100 * low:.1f} to {100 * high:.1f}"
    points = 100 * float(shown["value"] or 0)
    return f"Its probabilities are off by {points:.1f} points on average (ECE, debiased{bounds})."
