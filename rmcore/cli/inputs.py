"""Inputs of the measuring commands: a model, pairs, and how both are read."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self

import typer

from rmcore.cli.common import setting
from rmcore.config.data import DataConfig
from rmcore.config.model import WeightDtype
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.errors import ConfigError
from rmcore.data.pair import PreferencePair

Checkpoint = Annotated[
    str, typer.Option("--checkpoint", "-c", help="A trained checkpoint, or any Hugging Face reward model.")
]
Data = Annotated[str, typer.Option("--data", "-d", help="Preference pairs: a file, a datasets folder or a hub name.")]
JsonOut = Annotated[Path | None, typer.Option("--json", help="Also write the result as JSON.")]
Limit = Annotated[int | None, setting(DataConfig, "limit")]
Split = Annotated[str, setting(DataConfig, "split")]
Device = Annotated[str, setting(PipelineConfig, "device")]
Seed = Annotated[int, typer.Option(help="Seeds resampling and random vectors.")]
RenderFn = Annotated[
    str | None,
    typer.Option(help="`module:function` the checkpoint was trained with, which it names and never imports by itself."),
]
Dtype = Annotated[
    WeightDtype,
    typer.Option(help="Of the weights but the head's; bfloat16 takes half the memory and rounds rewards a little."),
]
ScoringDtype = Annotated[
    WeightDtype | None,
    typer.Option(
        help="Of the weights but the head's. Left out: bfloat16 on a GPU (half the memory, rewards rounded a little), "
        "else float32."
    ),
]
MaxLen = Annotated[int | None, typer.Option(help="Longest side in tokens; default: as the checkpoint was trained.")]


def written_as(*endings: str) -> Callable[[Path | None], Path | None]:
    """Make the callback of an option that names a file to write: another ending than that of a form is refused.

    So a file is what its name says, and the refusal comes before anything is computed.
    """

    def check(value: Path | None) -> Path | None:
        if value is not None and value.suffix.lower() not in endings:
            raise ConfigError(
                f"{value} does not end in {' or '.join(endings)}, and a file is written in the form of its name: "
                "name it so."
            )
        return value

    return check


@dataclass(frozen=True, slots=True)
class ModelReading:
    """How a reward model reads, and where it runs."""

    max_seq_len: MaxLen = None
    render_fn: RenderFn = None
    device: Device = "auto"
    dtype: ScoringDtype = None

    @property
    def weights(self) -> WeightDtype:
        """Format of the weights: as named, or what the device takes."""
        from rmcore.models.device import scoring_dtype

        return self.dtype or scoring_dtype(self.device)

    def load(self, checkpoint: str) -> Any:
        """A BradleyTerryRM, imported here: `--help` must not pay for torch."""
        from rmcore.models.reward_model import BradleyTerryRM

        return BradleyTerryRM.from_pretrained(
            checkpoint, device=self.device, max_seq_len=self.max_seq_len, render_fn=self.render_fn, dtype=self.weights
        )

    def named(self, checkpoint: str) -> dict[str, str | None]:
        """Which model a result is about: its name, the digest of its folder (None: on the hub), its weights' format.

        So what was measured of one checkpoint is never told of another (`rm-opt export`).
        """
        from rmcore.models.seal import checkpoint_digest

        folder = Path(checkpoint)
        digest = checkpoint_digest(folder) if folder.is_dir() else None
        return {"checkpoint": checkpoint, "checkpoint_digest": digest, "dtype": self.weights}

    def words(self) -> list[str]:
        """Return the options, as they are typed, that another command needs to read with the same model as this one."""
        options = {"--max-seq-len": self.max_seq_len, "--render-fn": self.render_fn}
        options |= {} if self.device == "auto" else {"--device": self.device}
        return [word for name, value in options.items() if value is not None for word in (name, str(value))]

    def in_float32(self, why: str) -> Self:
        """The same with float32 weights, where a command does more than compare rewards; before anything is loaded.

        Raises:
            ConfigError: --dtype is bfloat16.
        """
        if self.dtype == "bfloat16":
            raise ConfigError(f"--dtype {self.dtype} is for rewards, and {why}: leave it out.")
        return replace(self, dtype="float32")


@dataclass(frozen=True, slots=True)
class PairLayout:
    """Where preference pairs stand in their file."""

    split: Split = "train"
    prompt_column: Annotated[str | None, setting(DataConfig, "prompt_column")] = None
    chosen_column: Annotated[str | None, setting(DataConfig, "chosen_column")] = None
    rejected_column: Annotated[str | None, setting(DataConfig, "rejected_column")] = None

    def columns(self, margin: str | None = None, grades: Sequence[str] | None = None) -> Any:
        """The ColumnMap of these names."""
        from rmcore.data.readers.columns import ColumnMap

        return ColumnMap(
            prompt=self.prompt_column,
            chosen=self.chosen_column,
            rejected=self.rejected_column,
            margin=margin,
            grades=tuple(grades or ()),
        )


@dataclass(frozen=True, slots=True)
class PairReading(PairLayout):
    """Which pairs of a file are read, and how."""

    limit: Limit = None

    def config(self, data: str) -> DataConfig:
        """Return the settings of a run that reads the same pairs of `data`."""
        return DataConfig(source=data, **asdict(self))

    def read(self, data: str) -> list[PreferencePair]:
        """The pairs of `data`; see `read_pairs`."""
        return read_pairs(data, self, self.limit)


def set_words(settings: Mapping[str, object]) -> list[str]:
    """Return settings by dotted name, None left out, as the words of `--set`; as JSON, which YAML reads as it is."""
    return [
        word
        for name, value in settings.items()
        if value is not None
        for word in ("--set", f"{name}={json.dumps(value)}")
    ]


def changed_reading(data: DataConfig) -> dict[str, object]:
    """Return the settings by which a run reads its source as `data` says, apart from the source itself."""
    changed = data.model_dump(mode="json", exclude_defaults=True, exclude={"source"})
    return {f"data.{name}": value for name, value in changed.items()}


def read_pairs(data: str, layout: PairLayout, limit: int | None = None) -> list[PreferencePair]:
    """Read pairs; say how many rows could not be used."""
    from rmcore.data.readers.sources import load_pairs

    loaded = load_pairs(data, split=layout.split, columns=layout.columns(), limit=limit)
    if loaded.rejected:
        report_unusable(data, len(loaded.rejected), loaded.num_rows)
    for sentence in loaded.notices():
        print(sentence)
    return list(loaded.pairs)


def report_unusable(data: str, num_unusable: int, num_rows: int) -> None:
    """Say how many rows are left out."""
    print(f"{num_unusable} of {num_rows} rows of {data} cannot be used and are left out; `rm-opt data check` says why")
