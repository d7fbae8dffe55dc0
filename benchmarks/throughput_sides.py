"""What comparisons with TRL share, and one cell of benchmarks/train_throughput.py: one training, watched while it runs.

All sides train the same weights on the same pairs in the same steps with the same loss, optimizer, precision and
checkpointing. What is their own: how a step is cut into micro-batches, and what is computed in them.
"""

import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, PretrainedConfig, Qwen2Config

from rmcore.config.model import ModelConfig
from rmcore.config.train import TrainConfig
from rmcore.core.files import write_json
from rmcore.core.tracking import MemoryTracker
from rmcore.data.rendering import Rendering, TokenizedPair
from rmcore.models.batching import StepOrder
from rmcore.models.device import pick_device
from rmcore.models.loading import read_config, resolve_model
from rmcore.models.precision import Precision
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.models.tiny import tiny_tokenizer
from rmcore.training.loop import Trainer

SIDES = ("TRL", "TRL-default", "padded", "packed")
"""TRL-default: with gradient checkpointing, as TRL trains unless told otherwise, whatever the other sides do."""
PAIRS_PER_STEP = 16
SEED = 0
QWEN_SHAPES = {
    "smoke": (1024, 32, 64, 2, 2, 2),
    "6.5m": (1024, 256, 1024, 6, 4, 4),
    "qwen2.5-0.5b": (151936, 896, 4864, 24, 14, 2),
    "qwen2.5-1.5b": (151936, 1536, 8960, 28, 12, 2),
    "8b-width": (16384, 4096, 14336, 4, 32, 8),
}
"""Vocabulary, width, width inside the MLP, layers, heads, key-value heads. The last has four of Llama 3.1 8B's layers,
and a small vocabulary, so that the share of the embeddings is as small as there."""
MODELS = ("minilm", *QWEN_SHAPES)


@dataclass(frozen=True)
class Cell:
    """One training: everything that its result depends on."""

    data: str
    model: str
    side: str
    repeat: int
    steps: int
    max_seq_len: int
    trl_batch: int
    precision: Precision
    gradient_checkpointing: bool
    threads: int
    pairs_per_step: int = PAIRS_PER_STEP
    compile: bool = False
    """torch.compile on this library's sides; TRL as it comes."""
    token_budget: int | None = None
    """Of this library's micro-batches; None: chosen by it from the memory of the device."""

    def file(self, out: Path) -> Path:
        """Where what was measured is kept."""
        how = "-checkpointing" if self.gradient_checkpointing else ""
        how += "-compile" if self.compile else ""
        how += f"-{self.pairs_per_step}" if self.pairs_per_step != PAIRS_PER_STEP else ""
        return out / f"{self.data}-{self.model}-{self.precision}{how}-{self.repeat}-{self.side}.json"

    @property
    def settings(self) -> TrainConfig:
        """What all sides train with. No smoothing and no penalty: the losses are then the same."""
        return TrainConfig(
            steps=self.steps,
            pairs_per_step=self.pairs_per_step,
            schedule="constant",
            warmup_steps=0,
            beta=1.0,
            label_smoothing=0.0,
            regularization_lambda=0.0,
            precision=self.precision,
            gradient_checkpointing=self.gradient_checkpointing,
            packing=self.side == "packed",
            compile=self.compile,
            token_budget=self.token_budget,
            early_stopping_patience=None,
            resume_every_seconds=86_400,  # TRL saves nothing on the way either
        )


def run_missing(cells: Sequence[Any], out: Path, run: Callable[[Any], dict], said: str) -> list[dict[str, Any]]:
    """Records of all cells, of which those that are not in `out` are run one by one, each in a process of its own.

    Args:
        cells: data classes with a `file(out)`; a cell that was run with other settings is run again.
        out: the folder of the records.
        run: measures a cell; its record names the cell.
        said: what is printed of a record.
    """
    out.mkdir(parents=True, exist_ok=True)
    for cell in missing(cells, out):
        file = cell.file(out)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            record = pool.submit(run, cell).result()
        write_json(file, record)
        print(f"{file.stem}: {record[said]:.2f} {said.replace('_', ' ')}", flush=True)
    return [json.loads(cell.file(out).read_text()) for cell in cells]


def missing(cells: Sequence[Any], out: Path) -> list[Any]:
    """The cells of which `out` has no record, or one of other settings."""

    def is_done(file: Path, settings: dict[str, Any]) -> bool:
        return file.is_file() and json.loads(file.read_text())["cell"] == settings

    return [cell for cell in cells if not is_done(cell.file(out), asdict(cell))]


def in_turns(sides: Sequence[str], repeats: int) -> list[tuple[int, str]]:
    """Each repeat with each side; the next repeat goes through them backwards."""
    return [(repeat, side) for repeat in range(repeats) for side in (sides if repeat % 2 == 0 else sides[::-1])]


def trained_by_trl(trainer: Any, rows: Sequence[dict], settings: TrainConfig) -> Any:
    """Train, after and before a look at whether it is what was meant: all pairs, all steps."""
    assert [dict(row) for row in trainer.train_dataset] == rows, "TRL changed the pairs"
    result = trainer.train()
    assert trainer.state.global_step == settings.steps, trainer.state.global_step
    return result


def trl_settings(settings: TrainConfig, seed: int, **own: Any) -> dict[str, Any]:
    """The arguments of TRL's `RewardConfig` that train what our settings train; `own` are the others."""
    return {
        "max_steps": settings.steps,
        "learning_rate": settings.lr,
        "warmup_steps": settings.warmup_steps,
        "lr_scheduler_type": settings.schedule,
        "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.clip,
        "bf16": settings.precision == "bf16",
        "gradient_checkpointing": settings.gradient_checkpointing,
        "use_cpu": not torch.cuda.is_available(),
        "seed": seed,
        "train_sampling_strategy": "sequential",  # the rows are in the order of our own steps
        "logging_steps": settings.log_every,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    } | own


def rows_for_trl(steps: Iterable[Sequence[TokenizedPair]], tokenizer: Any) -> list[dict[str, list[int]]]:
    """Token ids of the pairs of all steps; and an EOS for the tokenizer, which TRL wants and does not use on ids.

    Ids and not texts: TRL would drop every pair with a side over the limit, where here such a side is cut.
    """
    if tokenizer.eos_token is None:
        tokenizer.eos_token = tokenizer.sep_token
    return [
        {"chosen_ids": list(pair.chosen.ids), "rejected_ids": list(pair.rejected.ids)}
        for step in steps
        for pair in step
    ]


class Watch:
    """Time and memory of a training loop, from the end of its first step, which warms up, to that of its last."""

    def __init__(self, cell: Cell, num_steps: int, device: torch.device) -> None:
        self.num_steps, self.pairs_per_step, self.device = num_steps, cell.pairs_per_step, device
        self._started = self._seconds = 0.0
        self._peak_bytes = self._resident = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            Path("/proc/self/clear_refs").write_text("5")  # the resident peak begins anew
            self._resident = _status_bytes("VmRSS")

    def step_ended(self, step: int) -> None:
        """Note the end of a step, counted from 1."""
        if step not in (1, self.num_steps):
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if step == 1:
            self._started = time.perf_counter()
            return
        self._seconds = time.perf_counter() - self._started
        on_gpu = self.device.type == "cuda"
        self._peak_bytes = (
            torch.cuda.max_memory_allocated(self.device) if on_gpu else _status_bytes("VmHWM") - self._resident
        )

    def seen(self, num_tokens: int, first_loss: float) -> dict[str, Any]:
        """What a side did; `num_tokens` were computed after the first step."""
        pairs = (self.num_steps - 1) * self.pairs_per_step
        return {
            "pairs_per_second": pairs / self._seconds,
            "tokens_per_pair": num_tokens / pairs,
            "peak_bytes": self._peak_bytes,
            "first_loss": first_loss,
        }


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def model_config(model: str) -> PretrainedConfig:
    """The architecture of one of MODELS."""
    if model == "minilm":
        return read_config(resolve_model(model), trust_remote_code=False)
    tokenizer = tiny_tokenizer()
    vocabulary, width, inner, layers, heads, kv_heads = QWEN_SHAPES[model]
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    config.num_labels = 1
    return config


def make_rm(cell: Cell, device: torch.device) -> BradleyTerryRM:
    """The model that all sides of a cell start from: the same weights in every process."""
    if cell.model == "minilm":
        return BradleyTerryRM.new(ModelConfig(name="minilm", max_seq_len=cell.max_seq_len), seed=SEED, device=device)
    torch.manual_seed(SEED)
    with device:  # drawing 1.5 billion weights on a CPU takes minutes
        model = AutoModelForSequenceClassification.from_config(model_config(cell.model), dtype=torch.float32)
    return BradleyTerryRM.of(model, tiny_tokenizer(), Rendering("plain", cell.max_seq_len))


def steps_of(pairs: Sequence[TokenizedPair], cell: Cell) -> list[list[TokenizedPair]]:
    """The pairs of each optimizer step, which are the same on all sides."""
    order = StepOrder(len(pairs), cell.pairs_per_step, cell.steps, seed=SEED)
    return [[pairs[index] for index in step] for step in order]


class LoopEndedError(Exception):
    """All steps are done and measured; the checkpoint and what comes after are no part of it."""


def train_here(
    rm: BradleyTerryRM,
    config: TrainConfig,
    pairs: Sequence[TokenizedPair],
    *,
    begin: Callable[[Trainer], object],
    after_step: Callable[[int], object],
) -> tuple[Trainer, MemoryTracker]:
    """Train with this library as a user would, up to the end of the last step: the checkpoint is no part of it."""
    tracker = MemoryTracker()

    def report(step: int, num_steps: int, _: str) -> None:
        after_step(step)
        if step == num_steps:
            raise LoopEndedError

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            rm, config, train=pairs, validation=[], folder=Path(folder), tracker=tracker, seed=SEED, report=report
        )
        begin(trainer)
        try:
            trainer.run()
        except LoopEndedError:
            return trainer, tracker
    raise AssertionError("the training ended before its last step")


def measure_here(cell: Cell, pairs: Sequence[TokenizedPair], device: torch.device) -> dict[str, Any]:
    """Train with this library, packed or padded; then the first step once more, to see it alone."""
    watches: list[Watch] = []

    def end_step(step: int) -> None:
        watches[-1].step_ended(step)

    def trained(pairs: Sequence[TokenizedPair], steps: int) -> tuple[Trainer, MemoryTracker]:
        return train_here(
            make_rm(cell, device),
            cell.settings.model_copy(update={"steps": steps}),
            pairs,
            begin=lambda trainer: watches.append(Watch(cell, trainer.num_steps, device)),
            after_step=end_step,
        )

    trainer, _ = trained(pairs, cell.steps)
    short, tracker = trained(steps_of(pairs, cell)[0], 1)
    tokens = trainer.progress.totals.num_tokens - short.progress.totals.num_tokens
    packing = trainer.packing.kernel if trainer.packing else None
    return watches[0].seen(tokens, tracker.rows[0][1]["train/loss"]) | {"packing": packing}


def measure_trl(cell: Cell, pairs: Sequence[TokenizedPair], device: torch.device) -> dict[str, Any]:
    """Train with TRL's RewardTrainer."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import RewardConfig, RewardTrainer

    rm, settings = make_rm(cell, device), cell.settings
    assert rm.model.config._attn_implementation == "sdpa"
    rows = rows_for_trl(steps_of(pairs, cell), rm.tokenizer)
    batches_per_step = cell.pairs_per_step // cell.trl_batch
    first_losses: list[torch.Tensor] = []
    tokens: list[int] = []

    class Counting(RewardTrainer):
        """Counts what is computed."""

        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
            tokens.append(inputs["input_ids"].numel())
            loss = super().compute_loss(model, inputs, *arguments, **options)
            if len(first_losses) < batches_per_step:
                first_losses.append(loss.detach().clone())
            return loss

    class Watching(TrainerCallback):
        """Tells the watch."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch.step_ended(state.global_step)

    with tempfile.TemporaryDirectory() as folder:
        own = {"output_dir": folder, "max_length": cell.max_seq_len, "per_device_train_batch_size": cell.trl_batch}
        if cell.side == "TRL-default":
            own["gradient_checkpointing"] = True
        arguments = RewardConfig(**trl_settings(settings, SEED, gradient_accumulation_steps=batches_per_step, **own))
        trainer = Counting(
            model=rm.model,
            args=arguments,
            processing_class=rm.tokenizer,
            train_dataset=Dataset.from_list(rows),
            callbacks=[Watching()],
        )
        watch = Watch(cell, cell.steps, device)
        trained_by_trl(trainer, rows, settings)
    return watch.seen(sum(tokens[batches_per_step:]), float(torch.stack(first_losses).mean()))


def run_cell(pairs: Sequence[TokenizedPair], cell: Cell) -> dict[str, Any]:
    """Measure one cell; to be called in a process of its own."""
    torch.set_num_threads(cell.threads)
    device = pick_device("auto")
    measure = measure_trl if cell.side.startswith("TRL") else measure_here
    seen = measure(cell, pairs, device)
    return {"cell": asdict(cell), "device": device.type, "machine": machine(cell.threads)} | seen


def machine(threads: int) -> str:
    """What is measured on and with, as one line."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.machine())
    gpu = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    found = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "trl") if find_spec(name))
    return f"{gpu}{os.cpu_count()} cores of {cpu}, {threads} thread(s), Python {platform.python_version()}, {found}"
