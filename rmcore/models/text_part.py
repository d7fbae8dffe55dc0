"""The text part of models that also read images, as a plain model of text.

Some of Hugging Face's wrappers hold a language model that is one of the plain classes, under other names. With text
alone its positions and its attention are that class's, so its rewards are, too. Others (PaliGemma, for one) attend
otherwise in text, too, and are refused by name.
Wrappers that have a class with a reward head of their own (Gemma 3, Qwen3.5) are loaded by it, vision part and all.
"""

import sys
from collections.abc import Iterable
from typing import Any

from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as WITH_A_HEAD

from rmcore.core.errors import ModelError

WRAPPERS = frozenset(["llava", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
"""Model types whose text part gives the same hidden states as the plain class."""
SEES = ("vision_config", "audio_config")
PLAIN = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
"""Text parts with a type of their own that compute what a plain one does: in text a token's three positions are one."""
CLASSIFIER = "AutoModelForSequenceClassification"
OF_IMAGES = ("mrope_section", "mrope_interleaved")
NAMES = {r"^(?:model\.language_model|language_model\.model|language_model)\.": "model."}
"""From the wrappers' names of weights to the plain model's, as patterns."""


def text_part(config: PretrainedConfig, source: str) -> PretrainedConfig | None:
    """The configuration of a wrapper's text part; None where the model is no wrapper or has a class of its own.

    Raises:
        ModelError: it is another wrapper than `WRAPPERS`, or its text part is no plain model with a reward head.
    """
    text = config.get_text_config()
    if text is config or not any(getattr(config, name, None) is not None for name in SEES):
        return None
    if config.model_type in WITH_A_HEAD or CLASSIFIER in (getattr(config, "auto_map", None) or {}):
        return None
    kind = PLAIN.get(text.model_type, text.model_type)
    if config.model_type not in WRAPPERS or kind not in WITH_A_HEAD:
        raise ModelError(
            f"{source} is a {config.model_type} model, which reads more than text, and its text part, "
            f"{text.model_type}, is not known to be a plain model: that is so of {', '.join(sorted(WRAPPERS))}. Name a "
            "model of text, or save its language model in a folder of its own."
        )
    if kind == text.model_type:
        return text
    settings = text.to_dict() | {"model_type": kind, "architectures": None}
    rope = settings.get("rope_parameters")
    if rope is not None:
        settings["rope_parameters"] = {name: value for name, value in rope.items() if name not in OF_IMAGES}
    return AutoConfig.for_model(**settings)


def report_unused_parts(config: PretrainedConfig, source: str) -> None:
    """Say on stderr that a model which reads more than text is used for text alone."""
    if any(getattr(config, name, None) is not None for name in SEES):
        print(
            f"note: {source} is a {config.model_type} model; its text part alone is used, and images and audio are "
            "refused.",
            file=sys.stderr,
        )


def settle(model: PreTrainedModel, unexpected: Iterable[str], source: str) -> None:
    """Make what was read by `NAMES` a plain model, which is saved under its own names, in place.

    Raises:
        ModelError: the text part's layers hold weights that the plain model has no place for.
    """
    left = sorted(name for name in unexpected if name.startswith("model.layers."))
    if left:
        raise ModelError(
            f"the text part of {source} has weights that a plain model has no place for ({', '.join(left[:3])}), so "
            "its rewards would be another model's. Name a model of text."
        )
    ours: Any = model  # transformers keeps how it read a model, and would write it back under those names
    ours._weight_conversions = [
        one for one in ours._weight_conversions if set(one.source_patterns).isdisjoint(NAMES.keys())
    ]
