"""`rm-opt train`: train a reward model on a file or hub data set, without an orchestrator."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rmcore.cli.common import setting
from rmcore.config import DataConfig, ModelConfig, PipelineConfig, TrainConfig
from rmcore.data.pair import PreferencePair
from rmcore.errors import ConfigError

DATA, TRAIN, MODEL = DataConfig(), TrainConfig(), ModelConfig()


def train(
    model: Annotated[str, setting(ModelConfig, "name", "--model")],
    output_dir: Annotated[Path, typer.Option(help="Folder for checkpoints and metrics; must not hold a training yet.")],
    data: Annotated[str | None, typer.Option("--data", help="Training pairs: a file or a datasets folder.")] = None,
    eval_data: Annotated[str | None, typer.Option("--eval-data", help="Held-out pairs, scored while training.")] = None,
    hf_dataset: Annotated[str | None, typer.Option(help="Training pairs from the hub: stanfordnlp/SHP.")] = None,
    hf_split: Annotated[str, setting(DataConfig, "split")] = DATA.split,
    eval_split: Annotated[str | None, setting(DataConfig, "eval_split")] = None,
    limit: Annotated[int | None, setting(DataConfig, "limit")] = None,
    eval_limit: Annotated[int | None, setting(DataConfig, "eval_limit")] = None,
    prompt_column: Annotated[str | None, setting(DataConfig, "prompt_column")] = None,
    chosen_column: Annotated[str | None, setting(DataConfig, "chosen_column")] = None,
    rejected_column: Annotated[str | None, setting(DataConfig, "rejected_column")] = None,
    margin_column: Annotated[str | None, setting(DataConfig, "margin_column")] = None,
    steps: Annotated[int | None, setting(TrainConfig, "steps")] = None,
    epochs: Annotated[float, setting(TrainConfig, "epochs")] = TRAIN.epochs,
    batch_size: Annotated[int, setting(TrainConfig, "pairs_per_step", "--batch-size")] = TRAIN.pairs_per_step,
    micro_token_budget: Annotated[int | None, setting(TrainConfig, "token_budget", "--micro-token-budget")] = None,
    max_seq_len: Annotated[int, setting(ModelConfig, "max_seq_len")] = MODEL.max_seq_len,
    use_chat_template: Annotated[bool, setting(ModelConfig, "use_chat_template")] = MODEL.use_chat_template,
    trust_remote_code: Annotated[bool, setting(ModelConfig, "trust_remote_code")] = False,
    optimizer: Annotated[str, setting(TrainConfig, "optimizer")] = TRAIN.optimizer,
    lr: Annotated[float, setting(TrainConfig, "lr")] = TRAIN.lr,
    weight_decay: Annotated[float, setting(TrainConfig, "weight_decay")] = TRAIN.weight_decay,
    warmup_steps: Annotated[int, setting(TrainConfig, "warmup_steps")] = TRAIN.warmup_steps,
    lr_scheduler: Annotated[str, setting(TrainConfig, "schedule", "--lr-scheduler")] = TRAIN.schedule,
    beta: Annotated[float, setting(TrainConfig, "beta")] = TRAIN.beta,
    regularization_lambda: Annotated[
        float, setting(TrainConfig, "regularization_lambda")
    ] = TRAIN.regularization_lambda,
    label_smoothing: Annotated[float, setting(TrainConfig, "label_smoothing")] = TRAIN.label_smoothing,
    clip: Annotated[float, setting(TrainConfig, "clip")] = TRAIN.clip,
    precision: Annotated[str, setting(TrainConfig, "precision")] = TRAIN.precision,
    gradient_checkpointing: Annotated[bool, setting(TrainConfig, "gradient_checkpointing")] = False,
    eval_every: Annotated[int, setting(TrainConfig, "eval_every")] = TRAIN.eval_every,
    early_stopping_patience: Annotated[
        int | None, setting(TrainConfig, "early_stopping_patience")
    ] = TRAIN.early_stopping_patience,
    best_metric: Annotated[str, setting(TrainConfig, "best_metric")] = TRAIN.best_metric,
    save_every: Annotated[int | None, setting(TrainConfig, "save_every")] = None,
    log_every: Annotated[int, setting(TrainConfig, "log_every")] = TRAIN.log_every,
    lora: Annotated[bool, typer.Option("--lora", help="Not available yet; see the error for what to do.")] = False,
    lora_rank: Annotated[int | None, typer.Option(help="Not available yet.")] = None,
    profile_memory: Annotated[bool, typer.Option("--profile-memory", help="Print the peak memory at the end.")] = False,
    device: Annotated[str, setting(PipelineConfig, "device")] = "auto",
    seed: Annotated[int, typer.Option(help="Seeds the reward head, the data order and dropout.")] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print steps, tokens, memory and expected time; write nothing.")
    ] = False,
) -> None:
    """Train a reward model on preference pairs.

    The folder then holds metrics.csv, metrics.jsonl, reward_distributions.json, best/ and step_*/, the last two plain
    Hugging Face folders.

    Example: rm-opt train --model minilm --data pairs.parquet --eval-data held_out.parquet --lr 5e-5 --output-dir out
    """
    if lora or lora_rank is not None:
        raise ConfigError(
            "LoRA is not part of this version, which trains all weights. Leave --lora and --lora-rank out; if memory "
            "is short, use --precision bf16, --gradient-checkpointing or a smaller --max-seq-len."
        )
    config = PipelineConfig.model_validate(
        {
            "study": "train",
            "seed": seed,
            "device": device,
            "data": {
                "source": _one_source(data, hf_dataset),
                "eval_source": eval_data,
                "split": hf_split,
                "eval_split": eval_split,
                "limit": limit,
                "eval_limit": eval_limit,
                "prompt_column": prompt_column,
                "chosen_column": chosen_column,
                "rejected_column": rejected_column,
                "margin_column": margin_column,
            },
            "model": {
                "name": model,
                "max_seq_len": max_seq_len,
                "use_chat_template": use_chat_template,
                "trust_remote_code": trust_remote_code,
            },
            "train": {
                "steps": steps,
                "epochs": epochs,
                "pairs_per_step": batch_size,
                "token_budget": micro_token_budget,
                "optimizer": optimizer,
                "lr": lr,
                "weight_decay": weight_decay,
                "schedule": lr_scheduler,
                "warmup_steps": warmup_steps,
                "beta": beta,
                "label_smoothing": label_smoothing,
                "regularization_lambda": regularization_lambda,
                "clip": clip,
                "precision": precision,
                "eval_every": eval_every,
                "early_stopping_patience": early_stopping_patience,
                "best_metric": best_metric,
                "log_every": log_every,
                "save_every": save_every,
                "gradient_checkpointing": gradient_checkpointing,
            },
        }
    )
    pairs, held_out = _load(config.data, output_dir if not dry_run else None)
    if dry_run:
        _print_plan(config, pairs, held_out)
        return
    _train(config, pairs, held_out, output_dir, profile_memory=profile_memory)


def _one_source(data: str | None, hf_dataset: str | None) -> str:
    if (data is None) == (hf_dataset is None):
        raise ConfigError("name the training pairs once: --data FILE for local data, or --hf-dataset NAME for the hub.")
    return str(data or hf_dataset)


def _load(config: DataConfig, output_dir: Path | None) -> tuple[list[PreferencePair], list[PreferencePair]]:
    """Read training and, where named, held-out pairs; note rejected rows in the output folder."""
    from rmcore.data.sources import write_rejected
    from rmcore.stages.prepare import load_sources

    if output_dir is not None and (output_dir / "best").exists():
        raise ConfigError(
            f"{output_dir} already holds a training, which would be overwritten; name another --output-dir."
        )
    loaded = load_sources(config)
    for one in loaded:
        print(
            f"{one.source}: {len(one.pairs)} pairs ({one.layout}), {len(one.rejected)} of {one.num_rows} rows unusable"
        )
    rejected = [row for one in loaded for row in one.rejected]
    if rejected and output_dir is not None:
        output_dir.mkdir(parents=True, exist_ok=True)
        write_rejected(rejected, output_dir / "rejected_rows.jsonl")
        print(f"rows set aside, with reasons: {output_dir / 'rejected_rows.jsonl'}")
    return loaded[0].pairs, loaded[1].pairs if len(loaded) > 1 else []


def _train(
    config: PipelineConfig,
    pairs: Sequence[PreferencePair],
    held_out: Sequence[PreferencePair],
    output_dir: Path,
    *,
    profile_memory: bool,
) -> None:
    from rmcore.progress import progress_bar
    from rmcore.stages.train import train_into
    from rmcore.tracking import METRICS_FILE, JsonlTracker

    output_dir.mkdir(parents=True, exist_ok=True)
    (output_dir / METRICS_FILE).unlink(missing_ok=True)
    tracker = JsonlTracker(output_dir / METRICS_FILE)
    try:
        with progress_bar("train") as report:
            result = train_into(config, pairs, held_out, output_dir, tracker, report)
    finally:
        tracker.close()
    best = "" if result.best_value is None else f", {result.best_metric} {result.best_value:.4f}"
    print(f"{result.num_steps} steps ({result.stop_reason}), {result.pairs_per_second:.1f} pairs/s")
    print(f"best step {result.best_step}{best}: {output_dir / 'best'}")
    if profile_memory:
        print(f"peak memory: {result.peak_memory_bytes / 2**20:.0f} MiB")


def _print_plan(config: PipelineConfig, pairs: Sequence[PreferencePair], held_out: Sequence[PreferencePair]) -> None:
    from rmcore.trainer.plan import plan

    lines: dict[str, Any] = plan(config, pairs, held_out)
    width = max(len(name) for name in lines)
    for name, value in lines.items():
        print(f"{name:<{width}}  {value}")
