"""A reward model that was not trained here, in the place of a training."""

from pathlib import Path

from rmcore.core.errors import ModelError
from rmcore.core.manifests import make_key
from rmcore.core.store import ArtifactRef, Store
from rmcore.data.readers.sources import source_digest


def given_checkpoint(checkpoint: str, folder: Path) -> ArtifactRef:
    """A checkpoint folder as the artifact of a stage train: by content, so a moved folder is the same one.

    Args:
        checkpoint: folder of a trained reward model.
        folder: where a link to it is kept, as `KEY/best`.

    Raises:
        ModelError: it is no folder with a config.json.
    """
    place = Path(checkpoint).expanduser().resolve()
    if not (place / "config.json").is_file():
        raise ModelError(
            f"{checkpoint} is no checkpoint folder: there is no config.json in it. Name the folder that a training "
            "wrote as best/, or one that `save_pretrained` wrote."
        )
    digest = make_key({"checkpoint": source_digest(str(place))})
    best = folder / digest[:12] / "best"
    best.parent.mkdir(parents=True, exist_ok=True)
    if best.is_symlink():
        best.unlink()
    best.symlink_to(place, target_is_directory=True)
    return ArtifactRef("train", digest, str(best.parent), digest)


def trained_key(checkpoint: str, store: Store) -> str | None:
    """Key of the training of this store whose best checkpoint the folder is; None where it is none."""
    place = Path(checkpoint).expanduser().resolve()
    if place.name != "best" or place.parent.parent != store.root.resolve() / "train":
        return None
    manifest = store.manifest("train", place.parent.name.rpartition("-")[2])
    return None if manifest is None else str(manifest["key"])
