"""Names that other trainers give to settings, so that a user who brings one is told ours.

docs/from-trl.md and docs/from-openrlhf.md say of each what differs besides its name; a test holds them to this table.
"""

from typing import NamedTuple


class Ours(NamedTuple):
    """A setting that another trainer calls otherwise."""

    library: str
    setting: str
    """By its dotted name."""
    flag: str
    """The option of `rm-opt train`."""


GROUPS = ("", "train", "model", "data")
"""Groups in which another trainer's name means what it means there; "" is the command line."""
_TRL, _OPENRLHF = "TRL and transformers", "OpenRLHF"
_TABLE: dict[str, dict[str, tuple[str, str]]] = {
    _TRL: {
        "model_name_or_path": ("model.name", "--model"),
        "dataset_name": ("data.source", "--hf-dataset"),
        "learning_rate": ("train.lr", "--lr"),
        "num_train_epochs": ("train.epochs", "--epochs"),
        "max_steps": ("train.steps", "--steps"),
        "per_device_train_batch_size": ("train.pairs_per_step", "--batch-size"),
        "gradient_accumulation_steps": ("train.pairs_per_step", "--batch-size"),
        "max_length": ("model.max_seq_len", "--max-seq-len"),
        "lr_scheduler_type": ("train.schedule", "--lr-scheduler"),
        "max_grad_norm": ("train.clip", "--clip"),
        "center_rewards_coefficient": ("train.centering", "--centering"),
        "bf16": ("train.precision", "--precision"),
        "disable_dropout": ("train.dropout", "--dropout"),
        "eval_steps": ("train.eval_every", "--eval-every"),
        "metric_for_best_model": ("train.best_metric", "--best-metric"),
        "save_steps": ("train.save_every", "--save-every"),
        "save_total_limit": ("train.keep_top_k", "--keep-top-k"),
        "use_peft": ("model.lora", "--lora"),
        "lora_r": ("model.lora.rank", "--lora-rank"),
    },
    _OPENRLHF: {
        "data.max_len": ("model.max_seq_len", "--max-seq-len"),
        "data.max_samples": ("data.limit", "--limit"),
        "data.apply_chat_template": ("model.use_chat_template", "--use-chat-template"),
        "eval.dataset": ("data.eval_source", "--eval-data"),
        "eval.steps": ("train.eval_every", "--eval-every"),
        "train.batch_size": ("train.pairs_per_step", "--batch-size"),
        "train.micro_batch_size": ("train.token_budget", "--micro-token-budget"),
        "train.max_epochs": ("train.epochs", "--epochs"),
        "adam.lr": ("train.lr", "--lr"),
        "adam.weight_decay": ("train.weight_decay", "--weight-decay"),
        "lr_scheduler": ("train.schedule", "--lr-scheduler"),
        "lr_warmup_ratio": ("train.warmup_steps", "--warmup-steps"),
        "max_norm": ("train.clip", "--clip"),
        "ds.packing_samples": ("train.packing", "--packing"),
        "ds.param_dtype": ("train.precision", "--precision"),
        "ds.zero_stage": ("train.num_processes", "--num-processes"),
        "ds.lora.rank": ("model.lora.rank", "--lora-rank"),
        "ds.lora.alpha": ("model.lora.alpha", "--lora-alpha"),
        "train.seed": ("seed", "--seed"),
    },
}
ELSEWHERE: dict[str, Ours] = {
    name: Ours(library, *ours) for library, names in _TABLE.items() for name, ours in names.items()
}
"""By the other trainer's name, with underscores."""


def foreign_name(given: str) -> Ours | None:
    """Look up our name of a setting by that of another trainer, an option or a dotted setting; None of any other name.

    >>> foreign_name("--learning-rate").setting, foreign_name("train.learning_rate").setting
    ('train.lr', 'train.lr')
    """
    name = given.lstrip("-").replace("-", "_")
    group, _, own = name.rpartition(".")
    return ELSEWHERE.get(name) or (ELSEWHERE.get(own) if group in GROUPS else None)
