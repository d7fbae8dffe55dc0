"""Settings of the preference pairs: the built-in synthetic benchmark, or data that are read."""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rmcore.config.base import Names, Settings

GOLD = "gold"
"""Source of the synthetic benchmark."""
NO_PAIRS = ""
"""Source of a preset that is for pairs of the user's own: they are still to be named."""
Shortcut = Literal["length", "flattery", "none"]


class GoldConfig(Settings):
    """The synthetic benchmark: procedural preferences with a known true reward (rmcore/data/gold/world.py)."""

    num_prompts: int = Field(default=1200, ge=20, le=1_000_000)
    """Different in-distribution prompts; a fifth as many out-of-distribution ones come on top."""
    pairs_per_prompt: int = Field(default=3, ge=1, le=64)
    """Preference pairs drawn for each prompt."""
    temperature: float = Field(default=1.0, gt=0)
    """Labels are drawn from sigmoid((gold_a - gold_b) / temperature): higher is noisier."""
    flip_rate: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of labels flipped after that, as by careless annotators."""
    length_bias: float = Field(default=0.0, ge=0, le=1)
    """Share of labels that name the longer response whatever it says, as by annotators in a hurry."""
    shortcut: Shortcut = "length"
    """Spurious feature that goes with the true reward in training and stops doing so in the tail."""
    tail_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the answers in training pairs that come from the tail. The policy's have 0.2 of them: with as many, the
    pairs are labelled where the policy is."""


class DataConfig(Settings):
    """Which preference pairs, how they are read and how they are split."""

    source: Annotated[str, Names("pairs")] = GOLD
    """`gold` (the built-in world), a file (.parquet, or .json .jsonl .csv .tsv, these also .gz), a datasets folder, or
    a hub name."""
    eval_source: Annotated[str | None, Names("pairs")] = None
    """Held-out pairs of the same forms. Left out: a share of the prompts of `source` is held out."""
    split: str = "train"
    """Split of a hub data set or datasets folder to train on."""
    eval_split: str | None = None
    """Split of the same hub data set or datasets folder to test on."""
    limit: int | None = Field(default=None, ge=1)
    """Use at most this many pairs of `source`, in file order."""
    eval_limit: int | None = Field(default=None, ge=1)
    """Use at most this many held-out pairs."""
    pairs_per_prompt: int | None = Field(default=None, ge=1)
    """Train on at most this many pairs of one prompt, the first ones; held-out prompts keep all. SHP's authors: 5."""
    validation_fraction: float = Field(default=0.1, ge=0, lt=0.9)
    """Share of the training prompts kept for choosing the checkpoint and fitting the temperature."""
    test_fraction: float = Field(default=0.15, gt=0, lt=0.9)
    """Share of the prompts held out for the reported numbers, where no eval data is named."""
    test_seed: int | None = Field(default=None, ge=0, lt=2**31)
    """Seed that deals out the test prompts, and draws the synthetic benchmark, in place of the run's seed: runs under
    different seeds then share their test pairs, and what one trains on is in no other's test. Left out: the run's
    seed."""
    prompt_column: str | None = None
    """Column of the prompt, where the layout is not recognised."""
    chosen_column: str | None = None
    """Column of the preferred completion or dialogue."""
    rejected_column: str | None = None
    """Column of the other completion or dialogue."""
    margin_column: str | None = None
    """Column of the annotated preference strength (optional)."""
    weight_column: str | None = None
    """Column of how often a judgement counts, above 0. Left out: each counts once, whatever columns there are."""
    grade_columns: tuple[str, ...] | None = None
    """Columns that grade the answer of a row, where their names are not recognised."""
    attribute_weights: dict[str, float] | None = None
    """How much each graded attribute counts in which of two answers is better. Left out: overall, helpfulness, score,
    rating, quality or grade counts alone, else all alike."""
    require_complete_pairs: bool = False
    """Make a pair with a side missing, or with two of one side, an error instead of a counted, rejected row."""
    gold: GoldConfig = GoldConfig()
    """The synthetic benchmark's own settings, used with `source: gold`."""

    @model_validator(mode="after")
    def _grades_mean_something(self) -> Self:
        weights = self.attribute_weights
        if weights is not None and not (any(weights.values()) and all(map(math.isfinite, weights.values()))):
            raise ValueError("attribute_weights must be finite and one of them other than 0: nothing else is better")
        if self.grade_columns == ():
            raise ValueError("grade_columns is empty: name some, or leave it out")
        return self

    @model_validator(mode="after")
    def _something_left_to_train_on(self) -> Self:
        if self.validation_fraction + self.test_fraction >= 1:
            raise ValueError("validation_fraction + test_fraction must stay below 1: the rest is trained on")
        return self
