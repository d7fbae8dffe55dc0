"""Stage train: prepared pairs in, a checkpoint folder out.

Writes `best/` and `step_*/` (plain Hugging Face folders), `metrics.csv`, `metrics.jsonl`, `reward_distributions.json`,
`dropped_pairs.jsonl`, `training.json` (how it ended), `summary.json` and the training curves.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from shutil import rmtree
from typing import Any

from rmcore.config.model import ModelConfig
from rmcore.config.policy import SFT
from rmcore.config.train import TrainConfig
from rmcore.core.files import read_json_lines, write_json, write_json_lines
from rmcore.core.progress import Report, prefixed
from rmcore.core.tracking import METRICS_FILE, Tracker
from rmcore.data.parquet_rows import RecordFile
from rmcore.data.readers.sources import source_digest
from rmcore.data.table import PAIRS
from rmcore.data.tokenized import REASONS, Pairs, Tokenized, open_tokenized, write_tokenized
from rmcore.data.tokenized_observations import Observations, ReadObservations
from rmcore.models.device import pick_device
from rmcore.models.loading import max_positions
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.reporting.figures.style import save
from rmcore.reporting.figures.training import training_curves_figure
from rmcore.stages.prepared import observations_of, policy_place
from rmcore.stages.stages import Training, TrainStage
from rmcore.training.loop import BF16_NOTE, Trainer, with_precision
from rmcore.training.material import Material, tokens_of
from rmcore.training.ranks import Ranks, environment_ranks, share_of_host
from rmcore.training.record import TrainResult, passes
from rmcore.training.resume import FINISHED_FILE, clear
from rmcore.training.sharding import process_group, shard


def run(settings: TrainStage, out: Path, tracker: Tracker, report: Report) -> None:
    """Train on the prepared splits."""
    prepared = settings.prepared.folder
    if settings.policy is not None:  # the reward model starts from the policy that was fine-tuned there
        model = settings.model.model_copy(update={"name": policy_place(SFT, settings.policy.folder)})
        settings = settings.changed(model=model)
    validation = prepared / "validation.parquet"
    train_into(
        settings,
        RecordFile(PAIRS, prepared / "train.parquet"),
        RecordFile(PAIRS, validation) if validation.is_file() else [],
        out,
        tracker,
        report,
        observations=observations_of(prepared, "train"),
    )


def train_into(
    settings: Training,
    train: Pairs,
    validation: Pairs,
    out: Path,
    tracker: Tracker,
    report: Report,
    *,
    observations: Observations | None = None,
) -> TrainResult:
    """Train the model of `settings` on `train`, choosing the best step on `validation` (may be empty), into `out`.

    Where there are `observations`, those are trained on, and not the pairs that they imply (`train.objective`).

    The pairs may lie on disk, and their tokens do, in `out`, while it trains. `tracker` must write to
    `out/metrics.jsonl`, from where the training curves are drawn. Under torchrun every process calls this with the same
    arguments; the first one writes. An unfinished training in `out` is resumed, after
    `rmcore.training.resume.rewind(out)`.
    """
    device = pick_device(settings.device)
    material = Material.choose(settings.train, train, observations, settings.attribute_weights)
    place = environment_ranks()
    defer = place.world > 1  # each of several processes reads only its slices of the weights
    # Before joining a group, in which rank 0 alone could write `tiny`.
    rm = BradleyTerryRM.new(settings.model, seed=settings.seed, device=device, defer=defer)
    material.attach_to(rm)
    config = with_precision(settings.train, rm, device)
    share, world = share_of_host(), environment_ranks().world
    if world > share[1]:
        report(0, 1, f"waits for the other hosts at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}")
    if settings.train.precision == "bf16" and place.is_main:
        print(BF16_NOTE, file=sys.stderr)
    with ExitStack() as stack:
        ranks = stack.enter_context(process_group(device))
        read, held_out = stack.enter_context(
            _tokens(rm, settings.train, material, validation, out, ranks, share, report)
        )
        if ranks.is_main:
            _report_left_out(chain(read.left_out(), held_out.left_out()))
        if defer:
            report(0, 1, "each process takes its share of the weights")
            shard(rm, ranks, config.chosen_precision)
        num = len(tokens_of(read))
        if config.steps is None and config.epochs is None and ranks.is_main:
            print(
                f"note: {passes(config, num):g} passes over {num} pairs, chosen by their number; "
                "train.epochs takes another number.",
                file=sys.stderr,
            )
        trainer = Trainer(
            rm,
            config,
            train=tokens_of(read),
            validation=held_out.pairs,
            folder=out,
            tracker=tracker,
            seed=settings.seed,
            report=report,
            settings=_model_settings(settings.model, device.type) | material.settings(),
            ranks=ranks,
        )
        result = trainer.run()
        if not ranks.is_main:
            return result
        num_dropped = read.num_left_out + held_out.num_left_out
        truncation = {"train": read.cut, "validation": held_out.cut, "num_dropped_pairs": num_dropped}
        write_json_lines(out / "dropped_pairs.jsonl", map(_without_row, chain(read.left_out(), held_out.left_out())))
        _write_outcome(out, trainer, result)
    write_json(out / FINISHED_FILE, _record(rm, result, truncation))
    clear(out)
    return result


@contextmanager
def _tokens(
    rm: BradleyTerryRM,
    config: TrainConfig,
    material: Material,
    validation: Pairs,
    out: Path,
    ranks: Ranks,
    share: tuple[int, int],
    report: Report,
) -> Iterator[tuple[Tokenized | ReadObservations, Tokenized]]:
    """Tokenize both on disk, each process of a host its share, for use inside the block."""
    folder = out / f".tokens-{ranks.rank // share[1]}"  # hosts may see one another's files
    if share[0] == 0:
        for left in out.glob(".tokens-*"):  # by an attempt that was killed
            rmtree(left, ignore_errors=True)
    ranks.wait()
    try:
        said = prefixed(report, "train")
        material.write(rm.renderer, folder / "train", config, share=share, report=said)
        said = prefixed(report, "validation")
        write_tokenized(rm.renderer, validation, folder / "validation", over_length=None, share=share, report=said)
        ranks.wait()
        try:
            read = material.open(folder / "train", parts=share[1])
            held_out = open_tokenized(folder / "validation", len(validation), parts=share[1])
        finally:
            ranks.wait()  # all have opened them, or have the same to say of them
        yield read, held_out
    finally:
        if share[0] == 0:
            rmtree(folder, ignore_errors=True)  # what is mapped still outlives its name


def _report_left_out(left_out: Iterable[dict[str, Any]]) -> None:
    """Say on stderr how many rows are left out for another reason than their length, with the first one's."""
    others = (one for one in left_out if one["reason"] not in REASONS)
    first = next(others, None)
    if first is not None:
        print(
            f"warning: {1 + sum(1 for _ in others)} rows cannot be used and are left out, each with its reason in "
            f"dropped_pairs.jsonl; the first is {first['pair_id']}: {first['reason']}",
            file=sys.stderr,
        )


def _without_row(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != "row"}


def _model_settings(model: ModelConfig, device_type: str) -> dict[str, Any]:
    """Give what else must be the same when a training is resumed; a folder counts by its content, not by its path."""
    settings = {f"model.{name}": value for name, value in model.model_dump(mode="json").items()}
    if Path(model.name).is_dir():
        settings["model.name"] = source_digest(model.name)
    return settings | {"device": device_type}


def _record(rm: BradleyTerryRM, result: TrainResult, truncation: dict[str, Any]) -> dict[str, Any]:
    return result.to_dict() | {
        "num_parameters": rm.num_parameters,
        "num_trained_parameters": rm.num_trained_parameters,
        "max_positions": max_positions(rm.model.config),
        "rendering": rm.renderer.rendering.format,
        "truncation": truncation,
    }


def _write_outcome(out: Path, trainer: Trainer, result: TrainResult) -> None:
    costs = {
        "cost/train_seconds": result.train_seconds,
        "cost/train_pairs_per_second": result.pairs_per_second,
        "train/best_step": result.best_step,
        "train/num_steps": result.num_steps,
    }
    if result.peak_training_bytes is not None:
        costs["cost/peak_training_mib"] = result.peak_training_bytes / 2**20
    write_json(out / "summary.json", {"metrics": costs})
    history, best = read_json_lines(out / METRICS_FILE), result.best_step
    save(training_curves_figure(history, best_step=best), out / "figures" / "training_curves.png")
