"""`rm-opt train`: train a reward model on a file or hub data set, without an orchestrator. Also under torchrun."""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple, NoReturn

import typer

from rmcore.cli.common import setting
from rmcore.cli.help import common
from rmcore.cli.options import field_options, given, options
from rmcore.config.data import DataConfig
from rmcore.config.model import LoraSettings, ModelConfig
from rmcore.config.pipeline import PipelineConfig
from rmcore.config.train import TrainConfig
from rmcore.core.errors import ConfigError
from rmcore.core.files import exclusive, is_free, write_json
from rmcore.core.hardware import HARDWARE
from rmcore.core.loggers import ManyTrackers, open_loggers, require_loggers
from rmcore.data.observation import Observation
from rmcore.data.pair import PreferencePair

DATA_FIELDS = (
    "eval_split",
    "limit",
    "eval_limit",
    "pairs_per_prompt",
    "eval_pairs_per_prompt",
    "prompt_column",
    "chosen_column",
    "rejected_column",
    "margin_column",
    "weight_column",
    "grade_columns",
    "require_complete_pairs",
)
MODEL_FIELDS = ("max_seq_len", "use_chat_template", "render_fn", "head_only", "trust_remote_code")
TRAIN_FIELDS = tuple(TrainConfig.model_fields)
LORA_FIELDS = tuple(LoraSettings.model_fields)
FLAGS = {
    "pairs_per_step": ("--batch-size", "-b"),
    "epochs": ("--epochs", "-e"),
    "token_budget": ("--micro-token-budget",),
    "schedule": ("--lr-scheduler",),
    "callbacks": ("--callback",),
    "eval_thresholds": ("--eval-threshold",),
    "targets": ("--lora-target-modules", "--lora-target"),
}
"""Flags that are not called as their field, or have a short form."""
OUTPUT_DIR = Path("checkpoints")
SETTINGS_FILE = "settings.json"
"""All settings of the training, in its folder: what it was made of, which no checkpoint says by itself."""
COMMON = (
    *("model", "data", "eval_data", "output_dir", "preset", "lora", "device", "dry_run"),
    *("epochs", "pairs_per_step", "lr", "optimizer", "max_seq_len"),
)
"""Options that most trainings are given; the others are in `--help-all`."""


@options(
    *field_options(TrainConfig, TRAIN_FIELDS, panel="Training", flags=FLAGS),
    *field_options(ModelConfig, MODEL_FIELDS, panel="Text and model", flags=FLAGS),
    *field_options(LoraSettings, LORA_FIELDS, panel="LoRA", flags=FLAGS, prefix="lora_"),
    *field_options(DataConfig, DATA_FIELDS, panel="Data", flags=FLAGS),
)
@common(*COMMON)
def train(
    model: Annotated[str, setting(ModelConfig, "name", "--model", "-m")],
    output_dir: Annotated[
        Path,
        typer.Option(
            "--output-dir",
            "-o",
            help="Folder for checkpoints and metrics. An unfinished training there is resumed, a finished one never "
            "overwritten.",
        ),
    ] = OUTPUT_DIR,
    data: Annotated[
        str | None, typer.Option("--data", "-d", help="Training pairs: a file or a datasets folder.")
    ] = None,
    eval_data: Annotated[str | None, typer.Option("--eval-data", help="Held-out pairs, scored while training.")] = None,
    hf_dataset: Annotated[
        str | None, typer.Option(help="Training pairs from the hub (stanfordnlp/SHP) or a local datasets folder.")
    ] = None,
    hf_split: Annotated[str, setting(DataConfig, "split")] = "train",
    preset: Annotated[
        str | None, typer.Option(help=f"Settings of a machine for what is not given: {', '.join(HARDWARE)}.")
    ] = None,
    lora: Annotated[bool, typer.Option("--lora", help="Train low-rank adapters and the reward head only.")] = False,
    device: Annotated[str, setting(PipelineConfig, "device")] = "auto",
    seed: Annotated[int, typer.Option(help="Seeds the reward head, the data order and dropout.")] = 0,
    no_early_stopping: Annotated[
        bool, typer.Option("--no-early-stopping", help="Train to the last step, whatever the validation pairs say.")
    ] = False,
    logger: Annotated[
        list[str] | None, typer.Option("--logger", help="Send the curves to tensorboard or wandb, too; repeatable.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print steps, tokens, memory and expected time; write nothing.")
    ] = False,
    **settings: Any,
) -> None:
    """Train a reward model on preference pairs.

    The folder then holds metrics.csv, metrics.jsonl, reward_distributions.json, settings.json, training.json, best/ and
    step_*/, the last two plain Hugging Face folders. After a kill the same command continues where it was, exactly.

    Example: rm-opt train --model minilm --data pairs.parquet --eval-data held_out.parquet --lr 5e-5 --output-dir out

    Shortest, one epoch into the folder checkpoints: rm-opt train -m minilm -d pairs.parquet

    Several GPUs or hosts: torchrun --nproc-per-node 8 --no-python rm-opt train --model ... --output-dir out
    """
    from rmcore.training.ranks import environment_ranks

    lora_settings = given(settings, LORA_FIELDS, prefix="lora_")
    if "targets" in lora_settings:
        lora_settings["targets"] = [name.strip() for part in lora_settings["targets"] for name in part.split(",")]
    if lora_settings and not lora:
        flags = [FLAGS.get(name, (f"--lora-{name}",))[0] for name in lora_settings]
        raise ConfigError(f"{', '.join(flags)} without --lora; add --lora.")
    if preset is not None and preset not in HARDWARE:
        raise ConfigError(f"preset {preset!r} is unknown; choose one of {', '.join(HARDWARE)}.")
    config = PipelineConfig.model_validate(
        {
            "study": "train",
            "seed": seed,
            "device": device,
            "loggers": logger or (),
            "data": {
                "source": _one_source(data, hf_dataset),
                "eval_source": eval_data,
                "split": hf_split,
                **given(settings, DATA_FIELDS),
            },
            "model": {"name": model, "lora": lora_settings if lora else None, **given(settings, MODEL_FIELDS)},
            "train": {
                **HARDWARE.get(preset or "", {}),
                **given(settings, TRAIN_FIELDS),
                **({"early_stopping_patience": None} if no_early_stopping else {}),
                **({"callbacks": ()} if settings["callbacks"] == ["none"] else {}),
            },
        }
    )
    ranks = environment_ranks()
    if config.train.num_processes > 1 and ranks.world == 1 and not dry_run:
        _start_several(config.train.num_processes)
    if config.train.num_processes not in (1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) and not dry_run:
        raise ConfigError(
            f"--num-processes {config.train.num_processes} under torchrun, which has started "
            f"{os.environ.get('LOCAL_WORLD_SIZE', '1')} here; leave it out: --nproc-per-node says how many there are."
        )
    if config.train.num_nodes > 1:
        raise ConfigError(
            f"train.num_nodes={config.train.num_nodes} is of `rm-opt run`; here torchrun --nnodes starts several hosts."
        )
    ranks.check_divides(config.train.pairs_per_step)
    if dry_run:
        _print_plan(config, _load(config.data, None))
        return
    require_loggers(config.loggers)
    _check_free(output_dir)
    _train(config, _load(config.data, output_dir), output_dir, is_main=ranks.is_main)


def _start_several(number: int) -> NoReturn:
    """Become the launcher of so many processes of this command."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // number)))
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={number}", "--no-python")
    program = ("-P", "-c", "from flows.cli import main; main()")
    os.execv(sys.executable, [sys.executable, *launcher, sys.executable, *program, *sys.argv[1:]])  # noqa: S606 - no shell is wanted


def _one_source(data: str | None, hf_dataset: str | None) -> str:
    if (data is None) == (hf_dataset is None):
        raise ConfigError("name the training pairs once: --data FILE for local data, or --hf-dataset NAME for the hub.")
    return str(data or hf_dataset)


def _check_free(output_dir: Path) -> None:
    """Refuse a folder that holds a finished training, or checkpoints of something else."""
    from rmcore.training.resume import FINISHED_FILE, RESUME_FOLDER, clear, was_cut_off

    finished = output_dir / FINISHED_FILE
    if was_cut_off(output_dir):
        finished.unlink()  # it resumes from there
    if finished.exists():
        clear(output_dir)  # left by a kill just after the end
        raise ConfigError(
            f"{output_dir} already holds a finished training, which would be overwritten; name another --output-dir."
        )
    if (output_dir / "best").exists() and not (output_dir / RESUME_FOLDER).is_dir():
        raise ConfigError(
            f"{output_dir} holds checkpoints that no training here can resume from; name another --output-dir."
        )


class _Read(NamedTuple):
    """The data of a training, and what is measured on meanwhile."""

    pairs: Sequence[PreferencePair]
    held_out: Sequence[PreferencePair]
    observations: Sequence[Observation] | None
    """Where the training source says more than strict pairs."""


def _load(config: DataConfig, output_dir: Path | None) -> _Read:
    """Read training and, where named, held-out pairs; note rejected rows in the output folder."""
    from rmcore.data.readers.sources import write_rejected
    from rmcore.stages.prepare import load_sources
    from rmcore.training.ranks import environment_ranks

    ranks = environment_ranks()
    if output_dir is None:
        with TemporaryDirectory(ignore_cleanup_errors=True) as spool:  # what is mapped outlives its name
            loaded = load_sources(config, spool=Path(spool), holds_out=False)
    else:
        place = output_dir / f".pairs-{ranks.rank}"  # a name of its own: one that was left by a kill is not kept
        shutil.rmtree(place, ignore_errors=True)
        is_new = not output_dir.exists()
        place.mkdir(parents=True)
        try:
            loaded = load_sources(config, spool=place, holds_out=False)
        except BaseException:
            shutil.rmtree(output_dir if is_new and ranks.world == 1 else place, ignore_errors=True)
            raise
        shutil.rmtree(place, ignore_errors=True)
    for one in loaded:
        more = f", {len(one.observations)} judgements" if one.observations else ""
        _say(
            f"{one.source}: {len(one.pairs)} pairs{more} ({one.layout}), {len(one.rejected)} of {one.num_rows} rows "
            "unusable"
        )
        for sentence in one.notices():
            _say(sentence)
    rejected = [row for one in loaded for row in one.rejected]
    if rejected and output_dir is not None and ranks.is_main:
        write_rejected(rejected, output_dir / "rejected_rows.jsonl")
        _say(f"rows set aside, with reasons: {output_dir / 'rejected_rows.jsonl'}")
    return _Read(loaded[0].pairs, loaded[1].pairs if len(loaded) > 1 else [], loaded[0].observations or None)


def _train(
    config: PipelineConfig,
    read: _Read,
    output_dir: Path,
    *,
    is_main: bool,
) -> None:
    from rmcore.core.progress import progress_bar
    from rmcore.core.store import flatten
    from rmcore.core.tracking import METRICS_FILE, JsonlTracker, NullTracker
    from rmcore.stages.settings import TrainSettings
    from rmcore.stages.train import train_into
    from rmcore.training.resume import rewind

    settings, flat = TrainSettings.of(config), flatten(config.model_dump(mode="json"))
    if not is_main:  # writes nothing and says nothing
        silence = NullTracker(), lambda done, total, text: None
        train_into(settings, read.pairs, read.held_out, output_dir, *silence, observations=read.observations)
        return
    lock = output_dir / ".lock"
    if not is_free(lock):
        raise ConfigError(f"another process is training into {output_dir}; wait for it, or name another folder.")
    with exclusive(lock), progress_bar("train") as report:
        rewind(output_dir)
        write_json(output_dir / SETTINGS_FILE, config.model_dump(mode="json"))
        also = open_loggers(config.loggers, study=config.study, run=output_dir.name, folder=output_dir, config=flat)
        tracker = JsonlTracker(output_dir / METRICS_FILE)
        try:
            with also as others:
                both = ManyTrackers((tracker, others))
                result = train_into(
                    settings, read.pairs, read.held_out, output_dir, both, report, observations=read.observations
                )
        finally:
            tracker.close()
    best = "" if result.best_value is None else f", {result.best_metric} {result.best_value:.4f}"
    _say(f"{result.num_steps} steps ({result.stop_reason}), {result.pairs_per_second:.1f} pairs/s")
    _say(f"best step {result.best_step}{best}: {output_dir / 'best'}")
    if config.train.profile_memory:
        _say(f"peak memory: {result.peak_memory_bytes / 2**20:.0f} MiB; over time in {output_dir / METRICS_FILE}")


def _say(text: str) -> None:
    from rmcore.training.ranks import environment_ranks

    if environment_ranks().is_main:
        print(text)


def _print_plan(config: PipelineConfig, read: _Read) -> None:
    from rmcore.training.plan import plan

    lines: dict[str, Any] = plan(config, read.pairs, read.held_out, read.observations)
    width = max(len(name) for name in lines)
    for name, value in lines.items():
        _say(f"{name:<{width}}  {value}")
