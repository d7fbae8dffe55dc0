"""Which parameters are the reward head: one rule for the model, the optimizers and the adapters.

Hugging Face's sequence-classification classes call their head by few names. Whoever treats the head differently from
the backbone (kept trainable beside adapters, float32 under autocast, AdamW beside Muon) asks here.
"""

REWARD_HEAD_PATTERNS: tuple[str, ...] = ("score", "classifier", "lm_head")
"""Module names of the reward head: `score` (causal models), `classifier` (encoders), `lm_head`."""


def is_reward_head(name: str) -> bool:
    """Tell whether a module or parameter name belongs to the reward head.

    True if a whole dotted part of the name is one of `REWARD_HEAD_PATTERNS`, wherever it stands: heads have layers of
    their own (`classifier.out_proj.weight`), and PEFT wraps names on both sides
    (`base_model.model.score.modules_to_save.default.weight`).
    """
    return not set(REWARD_HEAD_PATTERNS).isdisjoint(name.split("."))
