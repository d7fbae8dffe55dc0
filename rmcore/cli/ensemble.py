"""`rm-opt ensemble`: several checkpoints as one reward with its uncertainty."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rmcore.cli.common import print_metrics, write_report_json
from rmcore.cli.help import common
from rmcore.cli.inputs import Device, Dtype, JsonOut, PairReading, RenderFn, Seed
from rmcore.cli.options import options
from rmcore.config.model import WeightDtype
from rmcore.core.errors import ConfigError
from rmcore.data.pair import PreferencePair

if TYPE_CHECKING:
    from rmcore.ensembles.ensemble import EnsemblePrediction, RewardModelEnsemble

GOLD_SEEDS = 1_000_000
"""Added to the seed of the synthetic benchmark, whose pairs then differ from those of a training with the same seed."""
SPLITS = {"calibrate": 0.5, "test": 0.5}
INSIDE, OUTSIDE = "in distribution", "out of distribution"


@options()
@common("limit", "ood", "share", "num_resamples", "device", "dtype", "seed", "json_out")
def ensemble(
    checkpoint: Annotated[list[str], typer.Option(help="A trained checkpoint; repeat it for one member each.")],
    data: Annotated[
        str,
        typer.Option("--data", help="Pairs that no member was trained on: a file, a folder, a hub name, or `gold`."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the ensemble, its figure and its record.")],
    reading: PairReading,
    ood: Annotated[
        str | None,
        typer.Option(
            help="Pairs unlike those; with --data gold the synthetic benchmark's own. Their labels are not needed."
        ),
    ] = None,
    share: Annotated[float, typer.Option(help="Share of responses like those of --data that are not flagged.")] = 0.95,
    num_resamples: Annotated[
        int, typer.Option(min=100, max=100_000, help="Resamples of the bootstrap over prompts.")
    ] = 1000,
    render_fn: RenderFn = None,
    device: Device = "auto",
    dtype: Dtype = "float32",
    seed: Seed = 0,
    json_out: JsonOut = None,
) -> None:
    """Make an ensemble of reward models, and measure what their disagreement shows.

    How much they usually disagree is calibrated first, by half of the prompts of --data; the others measure.

    Example: rm-opt ensemble --checkpoint a/best --checkpoint b/best --data held_out.parquet --out ensemble

    Python: RewardModelEnsemble.load("ensemble").predict(prompts, responses)
    """
    inside, outside = _read(data, ood, reading, seed)
    parts = _deal(inside, seed)
    made = load_members(checkpoint, device, render_fn, dtype)
    record = _measure(made, parts, outside, share, num_resamples, seed, out)
    made.save(out)
    print(f"ensemble    {out / 'ensemble.json'}: load it with RewardModelEnsemble.load({str(out)!r})")
    _write(
        out,
        json_out,
        {"checkpoints": list(checkpoint), "data": data, "ood": ood, "dtype": dtype, "seed": seed, **record},
    )


@dataclass(frozen=True)
class _Sides:
    """Both sides of P pairs: chosen, rejected, chosen, ..."""

    prompts: list[Any]
    responses: list[str]
    prompt_ids: list[str]

    @classmethod
    def of(cls, pairs: Sequence[PreferencePair]) -> "_Sides":
        return cls(
            [pair.prompt for pair in pairs for _ in range(2)],
            [text for pair in pairs for text in (pair.chosen, pair.rejected)],
            [pair.prompt_id for pair in pairs for _ in range(2)],
        )


def _read(
    data: str, ood: str | None, reading: PairReading, seed: int
) -> tuple[list[PreferencePair], list[PreferencePair] | None]:
    """Pairs like those of the training, and unlike them where there are such."""
    if data == "gold":
        from rmcore.config.data import GoldConfig
        from rmcore.data.gold.world import generate_pairs

        world = generate_pairs(GoldConfig(), GOLD_SEEDS + seed)
        inside, outside = world.pairs[: reading.limit], world.ood_pairs[: reading.limit]
    else:
        inside, outside = reading.read(data), []
    if ood is not None:
        outside = reading.read(ood)
    return inside, outside or None


def _deal(pairs: Sequence[PreferencePair], seed: int) -> dict[str, Sequence[PreferencePair]]:
    from rmcore.data.splits import split_by_prompt

    parts = split_by_prompt(pairs, fractions=SPLITS, seed=seed)
    empty = [name for name, part in parts.items() if not part]
    if empty:
        raise ConfigError(f"{len(pairs)} pairs leave none to {', '.join(empty)}: pass pairs of more prompts.")
    return parts


def load_members(
    checkpoints: Sequence[str], device: str, render_fn: str | None, dtype: WeightDtype = "float32"
) -> "RewardModelEnsemble":
    """Load an ensemble of checkpoints, and say on how many backbones."""
    from rmcore.ensembles.ensemble import RewardModelEnsemble

    made = RewardModelEnsemble.from_checkpoints(checkpoints, device=device, render_fn=render_fn, dtype=dtype)
    count = len(made.members.backbones)
    print(f"{len(made)} members on {count} different backbone{'s' * (count > 1)}, each computed once")
    return made


def _measure(
    made: "RewardModelEnsemble",
    parts: Mapping[str, Sequence[PreferencePair]],
    outside: list[PreferencePair] | None,
    share: float,
    num_resamples: int,
    seed: int,
    out: Path,
) -> dict[str, Any]:
    """Calibrate, say what the ensemble is worth on pairs that it has not seen, draw it."""
    from rmcore.reporting.figures.ensemble import disagreement_figure
    from rmcore.reporting.figures.style import save

    groups = {INSIDE: parts["test"]} | ({} if outside is None else {OUTSIDE: outside})
    sides = {name: _Sides.of(made.members.readable(pairs)) for name, pairs in groups.items()}
    _score(made, _Sides.of(made.members.readable(parts["calibrate"])), share)
    assert made.calibration is not None  # noqa: S101 - just calibrated
    threshold = made.calibration.threshold
    found = {name: _score(made, one) for name, one in sides.items()}
    options: dict[str, Any] = {"num_resamples": num_resamples, "seed": seed}
    record: dict[str, Any] = {
        "calibration": asdict(made.calibration),
        "accuracy": {name: _accuracy(made, found[name], sides[name], options) for name in groups},
        "flagged": {name: float((one.std_reward > threshold).mean()) for name, one in found.items()},
        "detection": _detection(found, sides, options),
        "accuracy_by_disagreement": {name: _by_disagreement(found[name], sides[name], options) for name in groups},
    }
    for name, table in record["accuracy"].items():
        print_metrics(f"pairwise accuracy {name}", table)
    _say(record, {name: len(one.responses) for name, one in sides.items()})
    figure = disagreement_figure(
        found[INSIDE].std_reward,
        found[OUTSIDE].std_reward if OUTSIDE in found else None,
        threshold,
        record["detection"].get("disagreement"),
        record["accuracy_by_disagreement"],
    )
    print(f"figure      {save(figure, out / 'disagreement.png')}")
    return record


def _score(made: "RewardModelEnsemble", sides: _Sides, share: float | None = None) -> "EnsemblePrediction":
    """Predict, or calibrate where a share is given."""
    from rmcore.core.progress import labelled, progress_bar

    with progress_bar("score" if share is None else "calibrate") as report:
        told = labelled(report, "sides scored")
        if share is None:
            return made.predict(sides.prompts, sides.responses, report=told)
        return made.calibrate(sides.prompts, sides.responses, share, report=told)


def _accuracy(
    made: "RewardModelEnsemble", found: "EnsemblePrediction", sides: _Sides, options: dict[str, Any]
) -> dict[str, Any]:
    """Measure the accuracy of each member, of the mean and of the worst case."""
    import numpy as np

    from rmcore.evaluation.detection import accuracies

    rewards = np.vstack([found.individual_rewards, found.mean_reward, found.individual_rewards.min(axis=0)])
    values = accuracies(rewards[:, 0::2] - rewards[:, 1::2], sides.prompt_ids[0::2], **options)
    names = [*made.members.names, "mean of members", "worst case"]
    return {name: value.to_dict() for name, value in zip(names, values, strict=True)}


def _detection(
    found: dict[str, "EnsemblePrediction"], sides: dict[str, _Sides], options: dict[str, Any]
) -> dict[str, Any]:
    """AUROC of disagreement, and of the length of a response, which costs nothing to look at."""
    if OUTSIDE not in found:
        return {}
    from rmcore.evaluation.detection import auroc

    ids = sides[INSIDE].prompt_ids, sides[OUTSIDE].prompt_ids
    lengths = {name: [len(text) for text in one.responses] for name, one in sides.items()}
    spreads = {name: one.std_reward for name, one in found.items()}
    return {
        name: auroc(values[INSIDE], values[OUTSIDE], *ids, **options).to_dict()
        for name, values in (("disagreement", spreads), ("response_length", lengths))
    }


def _by_disagreement(found: "EnsemblePrediction", sides: _Sides, options: dict[str, Any]) -> list[dict[str, Any]]:
    from rmcore.evaluation.detection import accuracy_by_score

    margins = found.individual_rewards[:, 0::2] - found.individual_rewards[:, 1::2]
    bins = accuracy_by_score(margins.mean(axis=0), margins.std(axis=0), sides.prompt_ids[0::2], **options)
    return [{"disagreement": middle, "accuracy": value.to_dict()} for middle, value in bins]


def _say(record: dict[str, Any], num_responses: dict[str, int]) -> None:
    from rmcore.reporting.figures.numbers import interval, percent

    found = record["calibration"]
    print(
        f"threshold   {found['threshold']:.3g} standard deviations within prompts: {percent(found['share'])} of the "
        f"{found['num_responses']:,} responses that it was calibrated on disagree less"
    )
    for name, value in record["flagged"].items():
        print(f"flagged     {percent(value)} of {num_responses[name]:,} other responses {name}")
    if record["detection"]:
        print("AUROC       of telling which responses are out of distribution; 0.5 is chance:")
    for name, value in record["detection"].items():
        print(f"            {value['value']:.3f} ({interval(value) or value['reason']}) by {name.replace('_', ' ')}")


def _write(out: Path, json_out: Path | None, record: dict[str, Any]) -> None:
    from rmcore.core.files import write_json

    write_json(out / "report.json", record)
    write_report_json(json_out, record)
