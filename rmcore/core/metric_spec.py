"""The description of one metric: its name, label, unit and definition, which way is better and how it is judged."""

from dataclasses import dataclass
from typing import Literal

Unit = Literal["share", "points", "seconds", "pairs/s", "MiB", "steps", "nats", "logits", "logits²", "sd", "count", ""]
"""How values are printed. share: a fraction, in percent; "": a plain number; the others are appended."""


@dataclass(frozen=True, slots=True)
class Bands:
    """Words for a value's band."""

    about: str
    """The number that the words are about: eval accuracy."""
    words: tuple[tuple[float, float, str], ...]
    """Both ends of each band; the first one that holds a value counts, so an end belongs to the band named first."""


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric. The fields from `cell_name` on are empty for what no cell of an experiment reports."""

    name: str
    """As it is computed: pairwise_accuracy."""
    label: str
    """Where one model is described."""
    unit: Unit
    definition: str = ""
    """One clause for the reader of a report; empty where the label says it all."""
    better: Literal["higher", "lower"] | None = None
    """None: neither, or it is never compared."""
    cell_name: str = ""
    """As a cell and MLflow report it: eval/test_pairwise_accuracy."""
    cell_label: str = ""
    """Where arms are compared; empty: `label` there, too."""
    stage: str | None = None
    """Which one a cell has it from; what `evaluate` scores on held-out pairs has an error over prompts."""
    within_unit: bool = False
    """Its true value cannot lie outside of [0, 1]. A difference of two shares can."""
    floor: float | None = None
    """Its true value cannot lie below, though an estimate can: such a one is noise. People are shown the floor and the
    upper end of the interval (`floored`); records and trackers keep the estimate."""
    needs_target: bool = False
    """Defined only where the experiment declares a `target_accuracy`."""
    bands: Bands | None = None
    """The validation plan's."""

    @property
    def higher_is_better(self) -> bool | None:
        """None: neither."""
        return None if self.better is None else self.better == "higher"
