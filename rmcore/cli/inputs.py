"""What the measuring commands are given: a model, pairs, and how both are read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from rmcore.cli.common import setting
from rmcore.config.pipeline import DataConfig, LandscapeConfig, PipelineConfig
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
MaxLen = Annotated[int | None, typer.Option(help="Longest side in tokens; default: as the checkpoint was trained.")]
PromptColumn = Annotated[str | None, setting(DataConfig, "prompt_column")]
ChosenColumn = Annotated[str | None, setting(DataConfig, "chosen_column")]
RejectedColumn = Annotated[str | None, setting(DataConfig, "rejected_column")]
NumPairs = Annotated[int, setting(LandscapeConfig, "num_pairs")]


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """Which reward model is measured and how it reads."""

    checkpoint: str
    max_seq_len: int | None
    render_fn: str | None
    device: str

    def load(self) -> Any:
        """A BradleyTerryRM, imported here: `--help` must not pay for torch."""
        from rmcore.models.reward_model import BradleyTerryRM

        return BradleyTerryRM.from_pretrained(
            self.checkpoint, device=self.device, max_seq_len=self.max_seq_len, render_fn=self.render_fn
        )


@dataclass(frozen=True, slots=True)
class PairSource:
    """Which pairs are read, and how; columns are those of prompt, chosen and rejected."""

    data: str
    split: str
    limit: int | None
    columns: tuple[str | None, str | None, str | None]

    def read(self) -> list[PreferencePair]:
        """See `read_pairs`."""
        return read_pairs(self.data, self.split, self.limit, self.columns)


def read_pairs(
    data: str, split: str, limit: int | None, columns: tuple[str | None, str | None, str | None]
) -> list[PreferencePair]:
    """Read pairs; say how many rows could not be used."""
    from rmcore.data.readers.layouts import ColumnMap
    from rmcore.data.readers.sources import load_pairs

    prompt, chosen, rejected = columns
    loaded = load_pairs(
        data, split=split, columns=ColumnMap(prompt=prompt, chosen=chosen, rejected=rejected), limit=limit
    )
    if loaded.rejected:
        tell_unusable(data, len(loaded.rejected), loaded.num_rows)
    for sentence in loaded.notices():
        print(sentence)
    return loaded.pairs


def tell_unusable(data: str, num_unusable: int, num_rows: int) -> None:
    """Say how many rows are left out."""
    print(f"{num_unusable} of {num_rows} rows of {data} cannot be used and are left out; `rm-opt data check` says why")
