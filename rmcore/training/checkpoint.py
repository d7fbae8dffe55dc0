"""Checkpoint folders: plain Hugging Face models that appear whole or not at all."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from rmcore.core.errors import StoreError
from rmcore.core.files import atomic_folder, link_or_copy
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.training.ranks import ALONE, Ranks
from rmcore.training.sharding import whole_state_dict


def save_checkpoint(rm: BradleyTerryRM, folder: Path, ranks: Ranks = ALONE) -> None:
    """Write `rm` to `folder` atomically, as one plain model; on several ranks every one must call this.

    Raises:
        StoreError: the disk is full. What was there before is untouched.
    """
    state = whole_state_dict(rm.model, keep=ranks.is_main) if ranks.world > 1 else None
    if ranks.is_main:
        _publish(folder, lambda temporary: rm.save(temporary, state=state))
    ranks.wait()


def copy_checkpoint(source: Path, folder: Path) -> None:
    """Make `folder` the same checkpoint as `source`, atomically, and by hard links where the disk has them."""
    _publish(folder, lambda place: shutil.copytree(source, place, copy_function=_link, dirs_exist_ok=True))


def _link(source: str, target: str) -> None:
    link_or_copy(Path(source), Path(target))


def repair_interrupted(folder: Path) -> None:
    """Put right what a kill between two renames left: a checkpoint set aside for a newer one that never came."""
    for retired in filter(_is_ours, folder.glob(".*.old")):
        place = folder / retired.name[1 : -len(".old")]
        if place.exists():
            shutil.rmtree(retired)
        else:
            retired.rename(place)
    for temporary in filter(_is_ours, folder.glob(".*.tmp")):
        shutil.rmtree(temporary)


def _is_ours(path: Path) -> bool:
    return re.fullmatch(r"\.(best|step_\d+)\.(tmp|old)", path.name) is not None and path.is_dir()


def _publish(folder: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a folder that takes the name, and the place of an older one, once it is whole."""
    with atomic_folder(folder, replace=True) as temporary:
        try:
            write(temporary)
        except (SafetensorError, StoreError) as error:
            raise StoreError(
                f"the checkpoint {folder} could not be written ({error}), most often because the disk is full; the one "
                "before it is untouched. Free space and run again."
            ) from error
