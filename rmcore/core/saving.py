"""Writing models and tokenizers, whose libraries do not say by an OSError that the disk is full."""

from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from rmcore.core.errors import StoreError


def save_pretrained(part: Any, folder: Path, **options: Any) -> None:
    """Write a model, tokenizer or adapter configuration into `folder` by its own `save_pretrained`.

    Raises:
        StoreError: safetensors or tokenizers could not write, above all because the disk is full.
        OSError: what Python itself could not write.
    """
    try:
        part.save_pretrained(folder, **options)
    except Exception as error:
        if type(error) not in (SafetensorError, Exception):  # tokenizers raises nothing but a bare Exception
            raise
        raise StoreError(
            f"{folder} could not be written ({error}), most often because the disk is full or has no inodes left. Free "
            "space and run again."
        ) from error
