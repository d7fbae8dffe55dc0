"""Reading a trained reward model back: its weights, tokenizer and rendering, whatever tool trained it."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from rmcore.config.model import WeightDtype
from rmcore.core.errors import ModelError
from rmcore.core.hub import is_hub_name
from rmcore.data.render_fn import load_render_fn
from rmcore.data.rendering import Renderer, Rendering, choose_rendering
from rmcore.data.tokenizers import depends_on_the_day
from rmcore.models import lora
from rmcore.models.layers import is_reward_head
from rmcore.models.loading import (
    DEFAULT_LIMIT,
    Backbone,
    Origin,
    check_positions,
    check_sealed,
    fetch_snapshot,
    give_pad_token,
    load_backbone,
    load_tokenizer,
    max_positions,
    num_labels,
    read_config,
    resolve_model,
)
from rmcore.models.seal import check_seal, read_beta

RECORD_PATTERNS = ["*.json", "*.jinja", "*.txt", "*.model", lora.ADAPTER_WEIGHTS]
"""Files of a hub model that are read here next to its weights: records, tokenizer, and adapters, which PEFT wants in a
folder. Whole weights transformers fetches itself, as safetensors."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained reward model on the CPU."""

    model: Any
    """A sequence-classification model with one label, or PEFT's wrapper around one."""
    tokenizer: PreTrainedTokenizerBase
    rendering: Rendering
    origin: Origin
    adapter_base: lora.AdapterBase | None
    """Base that its adapters were trained on, where it has some."""
    beta: float
    """Scale of its margins; 1 where its folder has no record."""


def load_trained(
    name_or_path: str,
    *,
    max_seq_len: int | None,
    trust_remote_code: bool,
    render_fn: str | None,
    dtype: WeightDtype = "float32",
) -> Trained:
    """Load a checkpoint of this platform, a LoRA adapter, or any Hugging Face reward model.

    See `BradleyTerryRM.from_pretrained`, which this is the reading part of.

    Raises:
        ModelError: it cannot be read, has no trained reward head, an adapter's base is missing or another one, or its
            recorded beta is no finite number above 0.
        ConfigError: max_seq_len exceeds the model's positions.
    """
    source = resolve_model(name_or_path)
    folder = _records(source)
    beta = read_beta(folder)
    base = None
    if lora.is_adapter(folder):
        check_sealed(source)  # as `load_backbone` does it of a whole model
        base = lora.read_base(folder)
    loaded = (
        lora.load_base(base, folder, trust_remote_code=trust_remote_code, dtype=dtype)
        if base is not None
        else _load_whole(source, trust_remote_code=trust_remote_code, dtype=dtype)
    )
    rendering = _rendering(source, folder, loaded.model.config, loaded.tokenizer, max_seq_len, render_fn)
    model = loaded.model if base is None else lora.load_adapter(loaded, folder, base)
    return Trained(model, loaded.tokenizer, rendering, loaded.origin, base, beta)


def load_renderer(name_or_path: str, *, max_seq_len: int | None, render_fn: str | None) -> Renderer:
    """How a trained model reads text, without its weights: what `load_trained` gives of that.

    Raises:
        ModelError: its tokenizer or rendering cannot be read, or its rendering function was not named.
        ConfigError: max_seq_len exceeds the model's positions, or render_fn cannot be imported.
    """
    source = resolve_model(name_or_path)
    folder = _records(source)
    check_seal(folder, texts_only=True)
    is_adapter = lora.is_adapter(folder)
    base = lora.read_base(folder).name if is_adapter else source
    tokenizer = load_tokenizer(str(folder) if is_adapter else source)
    config = read_config(resolve_model(base), trust_remote_code=False)
    give_pad_token(tokenizer, config, is_trained=True)
    rendering = _rendering(source, folder, config, tokenizer, max_seq_len, render_fn)
    return Renderer(tokenizer, rendering, load_render_fn(render_fn) if render_fn else None)


def _records(source: str) -> Path:
    """The folder of a model's records, and of its adapters where it has some: of a hub model one that is fetched."""
    return fetch_snapshot(source, RECORD_PATTERNS) if is_hub_name(source) else Path(source)


def _rendering(
    source: str,
    folder: Path,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    max_seq_len: int | None,
    render_fn: str | None,
) -> Rendering:
    """The recorded one, else what suits the tokenizer; with the requested limit."""
    recorded = Rendering.load(folder)
    limit = max_seq_len or (
        recorded.max_seq_len if recorded else min(DEFAULT_LIMIT, max_positions(config) or DEFAULT_LIMIT)
    )
    check_positions(config, limit, name=source)
    if recorded:
        rendering = replace(recorded, max_seq_len=limit)
    else:
        rendering = choose_rendering(tokenizer, use_chat_template=True, max_seq_len=limit, render_fn=render_fn)
    warn_of_date(tokenizer, rendering, source)
    return rendering


def _load_whole(source: str, *, trust_remote_code: bool, dtype: WeightDtype) -> Backbone:
    if num_labels(source, read_config(source, trust_remote_code=trust_remote_code)) is None:
        raise ModelError(
            f"{source} has no reward head, so its rewards would be random; train it first, or name a "
            "sequence-classification model with one label."
        )
    loaded = load_backbone(source, seed=0, trust_remote_code=trust_remote_code, dtype=dtype)
    if loaded.origin.fresh:
        raise ModelError(
            f"{source} lacks the weights {', '.join(sorted(loaded.origin.fresh)[:4])}, so its rewards would be "
            "random; restore its weight files, or train it first."
        )
    return loaded


def warn_of_date(tokenizer: PreTrainedTokenizerBase, rendering: Rendering, name: str) -> None:
    """Say so on stderr where a model's rewards depend on the day, as its chat template writes the date."""
    if rendering.format == "chat" and depends_on_the_day(tokenizer):
        print(
            f"warning: the chat template of {name} writes the day's date (strftime_now), so its tokens and rewards "
            "depend on the day; put a date in its place in chat_template.jinja.",
            file=sys.stderr,
        )


def warn_of_random_weights(loaded: Backbone, name: str) -> None:
    """Say so on stderr where more than the head of a model that is to be trained starts at random."""
    drawn = sorted(key for key in loaded.origin.fresh if not is_reward_head(key) and "pooler" not in key)
    if drawn:
        print(
            f"warning: {name} holds no weights for {len(drawn)} parameters of its backbone, which start at random "
            f"(first {drawn[0]}); its files may be of another class than config.json says.",
            file=sys.stderr,
        )
