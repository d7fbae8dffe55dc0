"""`rm-opt train`: train a reward model on a file or hub data set, without an orchestrator. Also under torchrun."""

import hashlib
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
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
from rmcore.core.files import is_free, try_exclusive, write_json
from rmcore.core.hardware import BY_MODEL_SIZE, HARDWARE, hopper_pairs
from rmcore.core.processes import die_with_parent
from rmcore.data.observation import Observation
from rmcore.data.pair import PreferencePair

DATA_FIELDS = (
    *("eval_split", "limit", "eval_limit", "pairs_per_prompt", "prompt_column", "chosen_column", "rejected_column"),
    *("margin_column", "weight_column", "grade_columns", "require_complete_pairs"),
)
MODEL_FIELDS = ("max_seq_len", "use_chat_template", "render_fn", "head_only", "trust_remote_code")
TRAIN_FIELDS = tuple(TrainConfig.model_fields)
LORA_FIELDS = tuple(LoraSettings.model_fields)
FLAGS = {
    "pairs_per_step": ("--batch-size", "-b"),
    "epochs": ("--epochs", "-e"),
    "token_budget": ("--micro-token-budget",),
    "schedule": ("--lr-scheduler",),
    "targets": ("--lora-target-modules", "--lora-target"),
}
"""Flags that are not called as their field, or have a short form."""
OUTPUT_DIR = Path("checkpoints")
LOCK_FILE = ".lock"
"""Held in the folder of a training by its first process. The kernel frees it when that one dies."""
LAUNCHED, LAUNCHER_VARIABLE = "TORCHELASTIC_RUN_ID", "RM_OPT_LAUNCHER"
"""Variables by which a process knows that torchrun has started it, and the pid of that where it was started here."""
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
        str | None, typer.Option(help=f"Defaults for a machine, used for options not given: {', '.join(HARDWARE)}.")
    ] = None,
    lora: Annotated[bool, typer.Option("--lora", help="Train low-rank adapters and the reward head only.")] = False,
    device: Annotated[str, setting(PipelineConfig, "device")] = "auto",
    seed: Annotated[int, typer.Option(help="Seeds the reward head, the data order and dropout.")] = 0,
    no_early_stopping: Annotated[
        bool, typer.Option("--no-early-stopping", help="Train to the last step, whatever the validation pairs say.")
    ] = False,
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
    config = PipelineConfig.model_validate(
        {
            "study": "train",
            "seed": seed,
            "device": device,
            "data": {
                "source": _one_source(data, hf_dataset),
                "eval_source": eval_data,
                "split": hf_split,
                **given(settings, DATA_FIELDS),
            },
            "model": {"name": model, "lora": lora_settings if lora else None, **given(settings, MODEL_FIELDS)},
            "train": {
                **_of_the_machine(preset, model, settings),
                **given(settings, TRAIN_FIELDS),
                **({"early_stopping_patience": None} if no_early_stopping else {}),
            },
        }
    )
    ranks = environment_ranks()
    if config.train.num_processes > 1 and ranks.world == 1 and not dry_run:
        if not is_free(output_dir / LOCK_FILE):
            raise _taken(output_dir)
        _start_several(config.train.num_processes)
    if LAUNCHED in os.environ:
        die_with_parent(int(os.environ.get(LAUNCHER_VARIABLE, os.getppid())))
    if config.train.num_processes not in (1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) and not dry_run:
        raise ConfigError(
            f"--num-processes {config.train.num_processes} under torchrun, which has started "
            f"{os.environ.get('LOCAL_WORLD_SIZE', '1')} here; leave it out: --nproc-per-node says how many there are."
        )
    ranks.check_divides(config.train.pairs_per_step)
    if dry_run:
        _print_plan(config, _load(config.data, None))
        return
    with _claimed(output_dir) if ranks.is_main else nullcontext():
        _check_free(output_dir, is_main=ranks.is_main)
        _train(config, _load(config.data, output_dir), output_dir, is_main=ranks.is_main)


def _of_the_machine(preset: str | None, model: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a preset; on h100 and h200 with as many pairs a step as suit the size of the model, which is said."""
    if preset is None:
        return {}
    if preset not in HARDWARE:
        raise ConfigError(f"preset {preset!r} is unknown; choose one of {', '.join(HARDWARE)}.")
    if preset not in BY_MODEL_SIZE or settings["pairs_per_step"] is not None:
        return HARDWARE[preset]
    from rmcore.models.loading import count_parameters

    size = count_parameters(model, trust_remote_code=bool(settings["trust_remote_code"]))
    pairs = hopper_pairs(size)
    if os.environ.get("RANK", "0") == "0":
        print(
            f"note: {pairs} pairs a step, the default of {preset} for {size / 1e9:.2f} B parameters; --batch-size "
            "takes another number, and --dry-run says what a larger one saves.",
            file=sys.stderr,
        )
    return HARDWARE[preset] | {"pairs_per_step": pairs}


def _start_several(number: int) -> NoReturn:
    """Become the launcher of so many processes of this command."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // number)))
    os.environ[LAUNCHER_VARIABLE] = str(os.getpid())
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={number}", "--no-python")
    program = ("-P", "-c", "from flows.cli import main; main()")
    os.execv(sys.executable, [sys.executable, *launcher, sys.executable, *program, *sys.argv[1:]])  # noqa: S606 - no shell is wanted


def _one_source(data: str | None, hf_dataset: str | None) -> str:
    if (data is None) == (hf_dataset is None):
        raise ConfigError("name the training pairs once: --data FILE for local data, or --hf-dataset NAME for the hub.")
    return str(data or hf_dataset)


@contextmanager
def _claimed(output_dir: Path) -> Iterator[None]:
    """Hold the folder of a training against other processes, from before anything in it is looked at.

    A folder that was not there and in which nothing was kept is removed again.

    Raises:
        ConfigError: another process trains into it.
    """
    is_new = not output_dir.exists()
    lock = output_dir / LOCK_FILE
    with try_exclusive(lock) as is_ours:
        if not is_ours:
            raise _taken(output_dir)
        try:
            yield
        except BaseException:
            if is_new and [path.name for path in output_dir.iterdir()] == [LOCK_FILE]:
                lock.unlink()  # while it is held: a process that has opened it sees that it is not the lock any more
                with suppress(OSError):  # another process has made its lock there
                    output_dir.rmdir()
            raise


def _taken(output_dir: Path) -> ConfigError:
    return ConfigError(f"another process is training into {output_dir}; wait for it, or name another folder.")


def _check_free(output_dir: Path, *, is_main: bool) -> None:
    """Refuse a folder that holds a finished training, or checkpoints of something else; `is_main`: may change it."""
    from rmcore.training.resume import FINISHED_FILE, RESUME_FOLDER, clear

    if (output_dir / FINISHED_FILE).exists():
        if is_main:
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
        # Of this training alone: processes that share it may begin before the first one has claimed the folder.
        names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
        own = hashlib.sha256(repr([os.environ.get(name) for name in names]).encode()).hexdigest()[:8]
        place = output_dir / f".pairs-{own}-{ranks.rank}"
        if ranks.is_main:  # left by a kill
            for left in {*output_dir.glob(".pairs-*")} - {*output_dir.glob(f".pairs-{own}-*")}:
                shutil.rmtree(left, ignore_errors=True)
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        try:
            loaded = load_sources(config, spool=place, holds_out=False)
        finally:
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


def _train(config: PipelineConfig, read: _Read, output_dir: Path, *, is_main: bool) -> None:
    from rmcore.core.progress import progress_bar
    from rmcore.core.tracking import METRICS_FILE, JsonlTracker, NullTracker
    from rmcore.stages.order import training_of
    from rmcore.stages.train import train_into
    from rmcore.training.profiling import PROFILE_FOLDER
    from rmcore.training.resume import rewind

    settings = training_of(config)
    if not is_main:  # writes nothing and says nothing
        silence = NullTracker(), lambda done, total, text: None
        train_into(settings, read.pairs, read.held_out, output_dir, *silence, observations=read.observations)
        return
    with progress_bar("train") as report:
        rewind(output_dir)
        write_json(output_dir / SETTINGS_FILE, config.model_dump(mode="json"))
        tracker = JsonlTracker(output_dir / METRICS_FILE)
        try:
            result = train_into(
                settings, read.pairs, read.held_out, output_dir, tracker, report, observations=read.observations
            )
        finally:
            tracker.close()
    best = "" if result.best_value is None else f", {result.best_metric} {result.best_value:.4f}"
    _say(f"{result.num_steps} steps ({result.stop_reason}), {result.pairs_per_second:.1f} pairs/s")
    _say(f"best step {result.best_step}{best}: {output_dir / 'best'}")
    if config.train.profile_memory:
        _say(f"peak memory: {result.peak_memory_bytes / 2**20:.0f} MiB; over time in {output_dir / METRICS_FILE}")
    if config.train.profile_gpu:
        _say(f"profile: {output_dir / PROFILE_FOLDER}")


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
