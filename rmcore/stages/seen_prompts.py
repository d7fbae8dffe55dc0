"""The prompts that a reward model was trained on: answers to them say how well it remembers, and are set aside."""

from collections.abc import Iterable
from pathlib import Path

from rmcore.config.data import DataConfig
from rmcore.core.files import read_object
from rmcore.core.manifests import require_format
from rmcore.data.pair import PreferencePair
from rmcore.data.parquet_rows import RecordFile
from rmcore.data.readers.columns import ColumnMap
from rmcore.data.readers.sources import load_pairs
from rmcore.data.splits import compared_prompt
from rmcore.data.table import PAIRS
from rmcore.stages.prepared import observations_of

NOT_KNOWN_OF = "it is not known which prompts {} was trained on: on those that it has seen a gain may be memory"


def prompts_of_training(prepared: Path) -> set[str]:
    """Give the prompts that a model was trained on, or its best step chosen by, as `compared_prompt` gives them.

    Args:
        prepared: artifact of the stage prepare.
    """
    found: set[str] = set()
    for split in ("train", "validation"):
        if (prepared / f"{split}.parquet").is_file():
            found |= {compared_prompt(pair.prompt) for pair in RecordFile(PAIRS, prepared / f"{split}.parquet")}
        if (said := observations_of(prepared, split)) is not None:
            found |= {compared_prompt(one.prompt) for one in said}
    return found


def seen_by(train: Path, prepared: Path) -> set[str] | None:
    """Give the prompts that the model of a stage train was trained on; of a given checkpoint, see `seen_by_checkpoint`.

    Args:
        train: artifact of the stage train, in which a given checkpoint is a link.
        prepared: artifact of the stage prepare, whose splits say nothing of a given checkpoint.
    """
    best = train / "best"
    return seen_by_checkpoint(str(best.resolve())) if best.is_symlink() else prompts_of_training(prepared)


def seen_by_checkpoint(checkpoint: str) -> set[str] | None:
    """Give the prompts that a checkpoint was trained on; None where that is not known (`pairs_of_training`)."""
    folder = _prepared(Path(checkpoint).absolute().parent)
    if folder is not None:
        return prompts_of_training(folder)
    pairs = pairs_of_training(checkpoint)
    return None if pairs is None else {compared_prompt(pair.prompt) for pair in pairs}


def pairs_of_training(checkpoint: str) -> Iterable[PreferencePair] | None:
    """Read the pairs that a checkpoint was trained on, as far as the folder of its training says which these were.

    A stage's artifact names what it was made of by its digest, and that of the stage before is stored next to it; the
    folder of `rm-opt train` has its settings. Of other checkpoints, or where the files have gone, nothing is known.

    Raises:
        ConfigError: it is in a store of another version of this package.
    """
    folder = Path(checkpoint).absolute().parent
    if (prepared := _prepared(folder)) is not None:
        return RecordFile(PAIRS, prepared / "train.parquet")
    settings = None if (folder / "MANIFEST.json").exists() else read_object(folder / "settings.json")
    data = None if settings is None else DataConfig.model_validate(settings.get("data", {}))
    if data is None or not Path(data.source).is_file():
        return None
    return load_pairs(data.source, columns=ColumnMap.from_config(data), limit=data.limit).pairs


def _prepared(folder: Path) -> Path | None:
    """The artifact of the stage prepare that the artifact of a stage train names; None where there is none.

    Raises:
        ConfigError: another version of this package has written them.
    """
    wanted = (read_object(folder / "MANIFEST.json") or {}).get("inputs", {}).get("upstream", {}).get("prepare")
    store = folder.parent.parent
    found = [] if wanted is None else [*(store / "prepare").glob("*/MANIFEST.json")]
    if found:  # a copy of a training's folder is in no store, whatever is around it
        require_format(store)
    return next((path.parent for path in found if (read_object(path) or {}).get("digest") == wanted), None)
