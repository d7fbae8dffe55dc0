"""A number that would start, allocate or repeat for ever is refused by the name of its setting."""

from typing import get_args

import pytest
from pydantic import BaseModel, ValidationError

from rmcore.config.pipeline import PipelineConfig, change_config

LIMITS_OF_DATA = {*("data.limit", "data.eval_limit", "data.pairs_per_prompt"), "evaluate.train_pairs"}
"""At most so many of what is there: no larger than the data, whatever is given."""
LENGTHS = {
    *("model.max_seq_len", "train.steps", "train.token_budget", "train.warmup_steps"),
    *("train.eval_every", "train.log_every", "train.save_every", "train.early_stopping_patience"),
    *("rlhf.steps", "rlhf.micro_batch_size", "rlhf.measure_every"),
}
"""Longest sides, times and distances: nothing is made of such a size, and each is stopped as a training is."""


def whole_numbers(model, prefix=""):
    """Each setting that is a whole number, by its dotted name, with its largest value."""
    for name, field in model.model_fields.items():
        kinds = [field.annotation, *get_args(field.annotation)]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from whole_numbers(kind, f"{prefix}{name}.")
        if int in kinds:
            yield f"{prefix}{name}", next((bound.le for bound in field.metadata if hasattr(bound, "le")), None)


BOUNDED = dict(whole_numbers(PipelineConfig))


def test_every_setting_that_is_no_limit_or_length_has_an_upper_bound():
    unbounded = {name for name, most in BOUNDED.items() if most is None and not name.endswith("seed")}
    assert unbounded <= LIMITS_OF_DATA | LENGTHS


@pytest.mark.parametrize(
    "name", ["train.num_workers", "train.num_processes", "train.pairs_per_step", "data.gold.num_prompts"]
)
def test_an_absurd_number_is_refused_by_name(name):
    with pytest.raises(ValidationError, match=rf"{name.rpartition('.')[2]}\n.*less than or equal to {BOUNDED[name]}"):
        change_config(PipelineConfig(), {name: 10**9})
