"""Which parameters are the reward head: one rule for the model, the optimizers and the adapters.

Hugging Face's sequence-classification classes call their head by few names. Code that treats the head differently from
the backbone (kept trainable with adapters, float32 under autocast, AdamW next to Muon) asks here.
"""

from collections.abc import Mapping

REWARD_HEAD_PATTERNS: tuple[str, ...] = ("score", "classifier", "lm_head")
"""Module names of the reward head: `score` (causal models), `classifier` (encoders), `lm_head`."""


def is_reward_head(name: str) -> bool:
    """Tell whether a module or parameter name belongs to the reward head.

    True if a whole dotted part of the name is one of `REWARD_HEAD_PATTERNS`, at any place: heads have layers of
    their own (`classifier.out_proj.weight`), and PEFT wraps names on both sides
    (`base_model.model.score.modules_to_save.default.weight`).
    """
    return not set(REWARD_HEAD_PATTERNS).isdisjoint(name.split("."))


def head_rows(shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    """Count the outputs of the reward head among a checkpoint's weights: the rows of its last layer; None: no head.

    Only names outside the layers of the backbone count, and `lm_head` does not: in a language model's checkpoint it
    gives tokens.

    Args:
        shapes: of the tensors, by name.
    """
    rows = []
    for name, shape in shapes.items():
        parts = name.split(".")
        outside = parts[: next((place for place, part in enumerate(parts) if part.isdigit()), len(parts))]
        if parts[-1] == "weight" and len(shape) == 2 and {"score", "classifier"} & {*outside}:
            rows.append(shape[0])
    return min(rows, default=None)  # layers before the last one have the width of the model
