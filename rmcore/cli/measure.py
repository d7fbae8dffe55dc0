"""`rm-opt evaluate | readiness pairs, rank | diff`: measure checkpoints on a file of pairs."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rmcore.cli.common import print_metrics, print_verdict, wide_console, write_report_json
from rmcore.cli.help import common
from rmcore.cli.inputs import (
    Checkpoint,
    Data,
    JsonOut,
    ModelReading,
    PairReading,
    Seed,
    changed_reading,
    read_pairs,
    set_words,
)
from rmcore.cli.measurement import measure
from rmcore.cli.options import field_options, given, options
from rmcore.config.evaluate import EvaluateConfig
from rmcore.config.pipeline import GROUPS, PipelineConfig
from rmcore.core.errors import ConfigError
from rmcore.data.pair import PreferencePair
from rmcore.readiness.next_step import step_of_checkpoint
from rmcore.readiness.original_score import NOT_MEASURED
from rmcore.readiness.power import next_rung
from rmcore.reporting.figures import numbers
from rmcore.reporting.verdict_style import check_result
from rmcore.stages.prepared import NOT_KNOWN_OF, pairs_of_training, seen_by_checkpoint

Metrics = Mapping[str, Mapping[str, Any]]
EVALUATE_FIELDS = ("num_resamples", "thresholds")
COMMON = (
    *("limit", "prompt_column", "chosen_column", "rejected_column"),
    *("max_seq_len", "device", "dtype", "json_out", "rewards"),
)
"""Options of `rm-opt evaluate` that --help shows."""
THRESHOLD = {"thresholds": ("--threshold",)}
readiness_app = typer.Typer(
    no_args_is_help=True, help="Judge whether a policy may be optimised against a reward model."
)


@options(*field_options(EvaluateConfig, EVALUATE_FIELDS, flags=THRESHOLD))
@common(*COMMON)
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
    num_known = num_trained_on(checkpoint, pairs)
    table, cut, metrics = _evaluate(rm, pairs, config, seed)
    for sentence in in_words(metrics):
        print(sentence)
    if num_known:
        print(
            f"warning: {num_known} of these {len(pairs)} pairs are pairs that it was trained on, so the numbers say "
            "how well it remembers them; measure it on pairs that it has not seen.",
            file=sys.stderr,
        )
    if cut["num_cut_sides"]:
        print(f"{cut['num_cut_sides']} of {2 * cut['num_pairs']} sides were longer than the limit and were cut")
    print_metrics(f"{checkpoint} on {data}", metrics)
    if rewards is not None:
        rewards.parent.mkdir(parents=True, exist_ok=True)
        table.to_parquet(rewards)
    told = {"num_pairs": len(table), "beta": rm.beta, "metrics": metrics, "truncation": cut}
    write_report_json(json_out, {**model.named(checkpoint), "data": data, **told})


def num_trained_on(checkpoint: str, pairs: Sequence[PreferencePair]) -> int:
    """Count the pairs that a checkpoint was trained on, as far as that is known (`pairs_of_training`)."""
    texts = {hash((pair.prompt, pair.chosen, pair.rejected)) for pair in pairs_of_training(checkpoint) or ()}
    return sum(hash((pair.prompt, pair.chosen, pair.rejected)) in texts for pair in pairs)


@readiness_app.command("pairs")
@options()
def readiness(
    checkpoint: Checkpoint,
    data: Data,
    reading: PairReading,
    model: ModelReading,
    train_data: Annotated[
        str | None, typer.Option(help="Pairs it was trained on, for the train-test gap; without, no verdict passes.")
    ] = None,
    num_pairs: Annotated[
        int | None,
        typer.Option(min=1, help="Measure the curvature, too, on so many pairs: a part of the original score (v1)."),
    ] = None,
    json_out: JsonOut = None,
    seed: Seed = 0,
) -> None:
    """Judge a reward model on labelled pairs alone: checks and a verdict, which never says more than those pairs do.

    Example: rm-opt readiness pairs --checkpoint out/best --data test.parquet --train-data train.parquet
    """
    from rmcore.readiness.logged_answers import logged_answers, logged_table
    from rmcore.stages.readiness import judge
    from rmcore.stages.stages import CURVATURE, stage_of_metric

    curvature = stage_of_metric(CURVATURE) or ""
    if num_pairs is not None:
        if not curvature:
            raise ConfigError("--num-pairs: nothing that is installed here measures the curvature; leave it out.")
        model = model.in_float32("rounding drowns the curvature")
    pairs = reading.read(data)
    config = PipelineConfig()
    rm = model.load(checkpoint)
    table, _, metrics = _evaluate(rm, pairs, config.evaluate, seed)
    train_accuracy = None
    if train_data is not None:
        seen = read_pairs(train_data, reading, config.evaluate.train_pairs)
        train_metrics = _evaluate(rm, seen, config.evaluate, seed)[2]
        train_accuracy = train_metrics["pairwise_accuracy"]["value"]
    lambda_max = None
    if num_pairs is not None:
        settings = GROUPS[curvature].model_validate({"num_pairs": num_pairs})
        lambda_max = measure(curvature, rm, pairs, settings, seed)[CURVATURE]
    logged = logged_answers(logged_table(pairs, table), num_resamples=config.evaluate.num_resamples, seed=seed)
    judged = judge(metrics, train_accuracy, lambda_max, logged)
    read, named = reading.config(data), ["--checkpoint", checkpoint]
    more = step_of_checkpoint(judged["verdict"], judged["gate"], [*named, *model.words()], read, train_data)
    if more is None:
        device = None if model.device == "auto" else model.device
        changed = set_words({**changed_reading(read), "model.render_fn": model.render_fn, "device": device})
        found_by = [*named, "--data", data, *changed]
        more = next_rung(judged["verdict"], config.model_copy(update={"data": read}), found_by)
    for check in judged["gate"]:
        print(f"{check_result(check):<11} {check['text']}")
    original = judged["readiness"]
    for advice in original["recommendations"]:
        print(f"advice      {advice}")
    formed = f"; landscape {NOT_MEASURED}" if lambda_max is None else ""
    print(f"v1          {original['overall_score']:.3f}: the original score, no verdict{formed}")
    print()
    print_verdict(judged["verdict"], more)
    told = {"num_pairs": len(pairs), **judged, "logged_answers": logged, "next_rung": more}
    write_report_json(json_out, {**model.named(checkpoint), "data": data, **told})


@readiness_app.command("rank")
@options()
def rank(
    checkpoints: Annotated[list[str], typer.Argument(help="Trained checkpoints, or any Hugging Face reward models.")],
    answers: Annotated[
        Path,
        typer.Option(
            help="Judged answers: rows of prompt, response and judge, rank or wins; or prompt, chosen, rejected."
        ),
    ],
    model: ModelReading,
    n: Annotated[
        int | None,
        typer.Option(min=2, help="Answers that the best is chosen from; default: 16, or as many as there are."),
    ] = None,
    json_out: JsonOut = None,
    seed: Seed = 0,
) -> None:
    """Say which of several reward models to optimise against, on judged answers.

    Example: rm-opt readiness rank out/a/best out/b/best out/c/best --answers judged.parquet
    """
    from rmcore.readiness.judged_answers import (
        read_judged_answers,
        report_left_out_answers,
        require_readable,
        rewards_of,
    )
    from rmcore.readiness.rank import largest_choice, rank_models

    seen = {checkpoint: seen_by_checkpoint(checkpoint) for checkpoint in checkpoints}
    unknown = [checkpoint for checkpoint, prompts in seen.items() if prompts is None]
    given_answers = read_judged_answers(answers, trained_on=frozenset().union(*filter(None, seen.values())))
    report_left_out_answers(given_answers)
    if unknown:
        print(f"warning: {NOT_KNOWN_OF.format(', '.join(unknown))}.", file=sys.stderr)
    judged = given_answers.pools(given_answers.table["strength"].to_numpy())
    lengths = given_answers.pools(given_answers.table["response"].str.len().to_numpy(dtype=float))
    choice = largest_choice([len(pool) for pool in judged], n)
    rewards = []
    for checkpoint in checkpoints:
        rm = model.load(checkpoint)
        require_readable(rm.renderer, given_answers, answers)
        rewards.append(given_answers.pools(rewards_of(rm, given_answers)))
    found = rank_models(checkpoints, rewards, judged, lengths, n=choice, seed=seed)
    _print_ranking(found)
    told = {"answers": str(answers), "judged": given_answers.kind, "left_out": given_answers.left_out, **found}
    write_report_json(json_out, told)


def _print_ranking(found: Mapping[str, Any]) -> None:
    """Show the models by gain, and what longest and perfect choices reach."""
    from rich.table import Table

    from rmcore.evaluation.uncertainty import ends

    n = found["n"]
    table = Table("group", "reward model", f"gain of the best of {n}, sd (95 %)", "length taken out, sd", "win rate")
    for one in [*found["models"], {"name": "the longest answer", "group": "", **found["longest"]}]:
        cells = (numbers.with_interval(one[name]) for name in ("gain", "gain_without_length"))
        table.add_row(str(one["group"]), one["name"], *cells, numbers.with_interval(one["win_rate"], "share"))
    print(f"{found['num_answers']:,} judged answers to {found['num_prompts']} prompts")
    wide_console().print(table)
    best = found["models"][0]
    alike = [one["name"] for one in found["models"] if one["group"] == 1]
    low, longest = ends(best["gain"])[0], found["longest"]["gain"]["value"]
    if low is None or low <= 0:
        print(
            "none of these models is shown to choose better answers than a blind choice; optimise against none of them"
        )
    elif len(alike) > 1:
        print(f"optimise against one of {', '.join(alike)}: these answers do not tell them apart")
    else:
        print(f"optimise against {best['name']}: it gains more than any other for certain")
    over = ends(best["over_longest"])[0]
    if over is None or over <= 0:
        print(
            f"the longest answer gains {longest:.2f} sd, and {best['name']} over it "
            f"{numbers.with_interval(best['over_longest'])}: that it knows more than length is not shown"
        )
    print(f"a perfect choice gains {found['perfect_gain']:.2f} sd")


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
        unit = "points" if name.endswith("difference") else "share"
        if isinstance(value, dict):
            why = f" ({value['reason']})" if value["value"] is None and value["reason"] else ""
            print(f"  {name:<34} {numbers.with_interval(value, unit)}{why}")
        else:
            print(f"  {name:<34} {numbers.decimal(value) if isinstance(value, float) else value}")
    told = {"num_pairs": len(pairs), "a": checkpoint_a, "b": checkpoint_b, "dtype": model.weights}
    write_report_json(json_out, {**told, "comparison": compared})


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
    """A sentence about accuracy, next to guessing and length, and one about the probabilities.

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
    """Say what the paired interval of accuracy over the best baseline (chance or length) shows."""
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
