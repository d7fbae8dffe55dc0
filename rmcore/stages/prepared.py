"""Readers of the artifacts of the stages prepare and policy: pairs, and which prompts were trained on or are fresh."""

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

from rmcore.config.data import DataConfig
from rmcore.config.policy import SFT
from rmcore.core.errors import DataError
from rmcore.core.files import read_object
from rmcore.core.manifests import require_format
from rmcore.data.gold.tasks import draw_prompt
from rmcore.data.observation import Observation
from rmcore.data.pair import PreferencePair, Prompt, prompt_text
from rmcore.data.parquet_rows import RecordFile
from rmcore.data.readers.columns import ColumnMap
from rmcore.data.readers.sources import load_pairs
from rmcore.data.splits import compared_prompt
from rmcore.data.table import OBSERVATIONS, PAIRS, read_pairs

CEILING_FILE = "label_ceiling.json"
"""Best accuracy any model can expect on each split; only the synthetic benchmark knows it."""
POLICY_FOLDER = "model"
"""Where the artifact of the stage policy has a policy that was fine-tuned there."""


def observations_of(prepared: Path, split: str) -> RecordFile[Observation] | None:
    """All that a split of the artifact of the stage prepare says; None where that is strict pairs alone."""
    path = prepared / f"{split}_observations.parquet"
    return RecordFile(OBSERVATIONS, path) if path.is_file() else None


def policy_place(name: str, artifact: Path) -> str:
    """Folder or hub name of the policy `name`, whose artifact of the stage policy is given."""
    return str(artifact / POLICY_FOLDER) if name == SFT else name


def one_each(pairs: Sequence[PreferencePair]) -> list[Prompt]:
    """The first prompt of each conversation, in order: intervals are drawn over the prompts that are answered."""
    first: dict[str, Prompt] = {}
    for pair in pairs:
        first.setdefault(pair.prompt_id, pair.prompt)
    return list(first.values())


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
    """The artifact of the stage prepare that the artifact of a stage train names; None where there is none."""
    wanted = (read_object(folder / "MANIFEST.json") or {}).get("inputs", {}).get("upstream", {}).get("prepare")
    store = folder.parent.parent
    found = [] if wanted is None else [*(store / "prepare").glob("*/MANIFEST.json")]
    if found:  # a copy of a training's folder is in no store, whatever is around it
        require_format(store)
    return next((path.parent for path in found if (read_object(path) or {}).get("digest") == wanted), None)


FEWEST_PROMPTS = 10


def new_prompts(prepared: Path, number: int, name: str) -> list[Prompt]:
    """Prompts of the synthetic benchmark that stand in no pair.

    Args:
        prepared: the artifact of the stage prepare.
        number: that are drawn.
        name: seeds the draw.
    """
    files = [prepared / f"{part}.parquet" for part in ("train", "validation", "test", "ood")]
    seen = {prompt_text(pair.prompt) for file in files if file.is_file() for pair in read_pairs(file)}
    rng = random.Random(name)  # noqa: S311 - data, not cryptography
    fresh: dict[Prompt, None] = {}
    while len(fresh) < number:
        prompt = draw_prompt(rng, ood=False)
        if prompt not in seen:
            fresh[prompt] = None
    return list(fresh)


def seen_prompts(prepared: Path, number: int) -> list[Prompt]:
    """The first `number` held-out prompts, one a conversation: those that readiness sees."""
    return one_each(read_pairs(prepared / "test.parquet"))[:number]


def held_out_prompts(prepared: Path, *, seen: int, why: str, lower: str) -> list[Prompt]:
    """Held-out prompts after the first `seen`, one a conversation.

    Args:
        prepared: the artifact of the stage prepare.
        seen: prompts that are not fresh.
        why: who has seen them.
        lower: setting that makes them fewer, and what that costs.

    Raises:
        DataError: fewer than `FEWEST_PROMPTS` are left.
    """
    held_out = one_each(read_pairs(prepared / "test.parquet"))
    left = held_out[seen:]
    if len(left) < FEWEST_PROMPTS:
        raise DataError(
            f"{len(held_out)} prompts are held out and {why} the first {seen} of them, so {len(left)} are fresh, and a "
            f"gain over fewer than {FEWEST_PROMPTS} says little. Lower {lower}, or hold out more (data.test_fraction)."
        )
    return left
