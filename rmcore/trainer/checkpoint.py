"""Checkpoint folders: plain Hugging Face models that appear whole or not at all."""

import os
import shutil
from pathlib import Path

from safetensors import SafetensorError

from rmcore.errors import StoreError
from rmcore.files import fsync_tree
from rmcore.model import BradleyTerryRM


def save_checkpoint(rm: BradleyTerryRM, folder: Path) -> Path:
    """Write `rm` to `folder` atomically; an older checkpoint there is replaced only once the new one is on disk."""
    temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        try:
            rm.save(temporary)
        except SafetensorError as error:
            raise StoreError(
                f"the checkpoint {folder} could not be written ({error}), most often because the disk is full; the one "
                "before it is untouched. Free space and run again."
            ) from error
        fsync_tree(temporary)
        if folder.exists():
            retired = folder.with_name(f".{folder.name}.old-{os.getpid()}")
            folder.rename(retired)
            temporary.rename(folder)
            shutil.rmtree(retired)
        else:
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder
