"""The folder that vLLM loads: a checkpoint, or the served folder with an update, put together and given a name at once.

    weights/
        served-000001/    linked from a checkpoint
        update-3f1c.../   written by a trainer
        served-000002/    what did not travel linked from served-000001, what did from update-3f1c...

vLLM always reloads a whole folder, and of that every tensor of every file in the index. A tensor that travelled must
therefore be gone from the older files: one that has it next to others is written again without it. That happens once,
because from its first update on the head has a file of its own, and so have the adapted layers.

All that a server or a publisher does with files can be imported from here.
"""

import shutil
from pathlib import Path

from rmcore.core.files import link_or_copy
from rmcore.models.preference import PREFERENCE_FILE, read_beta, write_beta
from rmcore.models.weight_index import INDEX_FILE
from rmcore.serving.folders import published
from rmcore.serving.model_files import WHOLE_FILE, text_files
from rmcore.serving.update_check import CheckedUpdate
from rmcore.serving.weight_files import WeightLayout, copy_without, write_index


def stage_checkpoint(source: Path, folder: Path) -> None:
    """Make `folder` the model that `source` is now, without its other files, so that it stays what it is.

    Weights are hard links: a checkpoint that its owner replaces or deletes lives on here, at no cost. Who writes into
    one of its files would change this one too, but nobody does: this platform publishes checkpoints by renaming, and
    safetensors itself (0.8) writes a new file and renames it. Small files are edited by hand, so they are copied.

    Raises:
        ModelError: `source` is no whole Hugging Face folder; see `WeightLayout.read`.
        StoreError: `folder` exists, or the disk is full; nothing is left.
    """
    layout, texts = WeightLayout.read(source), text_files(source)
    if layout.files != [WHOLE_FILE]:
        texts.append(INDEX_FILE)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with published(folder) as temporary:
        for name in texts:
            shutil.copyfile(source / name, temporary / name)
        for name in layout.files:
            link_or_copy(source / name, temporary / name)


def stage_update(current_folder: Path, checked: CheckedUpdate, folder: Path) -> None:
    """Make `folder` the model of `current_folder` with the tensors of an update, and with its beta.

    Neither of them is changed, and either may be dropped afterwards. What is written again: files of `current_folder`
    that hold travelled tensors next to others, which need as much free disk, and an index.

    Args:
        current_folder: what is served.
        checked: the update, fresh from `check_update` with the layout of `current_folder`.
        folder: on the same file system for links; otherwise everything is copied.

    Raises:
        ModelError: `current_folder` is damaged.
        StoreError: `folder` exists, or the disk is full; nothing is left.
    """
    layout, travelled = WeightLayout.read(current_folder), checked.tensors.keys()
    kept = [file for file in layout.files if layout.names(file) - travelled]
    count = len(kept) + len(checked.files)
    # Numbered again, as save_pretrained does: no name can meet another one, and none grows from update to update.
    names = [WHOLE_FILE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    with published(folder) as temporary:
        for name in text_files(current_folder):
            if name != PREFERENCE_FILE:  # written again: in a link it would change under the served model
                link_or_copy(current_folder / name, temporary / name)
        write_beta(temporary, read_beta(current_folder) if checked.beta is None else checked.beta)
        for file, name in zip(kept, names, strict=False):
            if layout.names(file) & travelled:
                copy_without(current_folder / file, temporary / name, travelled)
            else:
                link_or_copy(current_folder / file, temporary / name)
        for file, name in zip(checked.files, names[len(kept) :], strict=True):
            link_or_copy(checked.folder / file, temporary / name)
        if count > 1:
            write_index(temporary, names)
