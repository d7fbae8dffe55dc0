"""`rm-opt card --push`: a trained reward model and its card on the Hugging Face hub."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rmcore.core.errors import ConfigError, DataError
from rmcore.core.hub_upload import Repository, hub_token

if TYPE_CHECKING:
    from rmcore.reporting.card.model_card import ReadCard

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def push(
    name: str, folder: Path, make_text: Callable[[], str], *, is_public: bool, although_not_ready: bool, dry_run: bool
) -> None:
    """Publish a checkpoint with its card, replacing a repository only where its card says that a push wrote it.

    Sent are weights (safetensors), configuration, tokenizer, our records of rendering and beta, a seal over them, and
    the card of the folder; `make_text` makes it where there is none. The token is read from HF_TOKEN.

    Raises:
        ConfigError: the verdict or the card forbids it, or the repository holds what no push wrote.
        ModelError: the folder holds no checkpoint that may be sent.
        ServiceError: the hub does not answer, or fails.
    """
    from rmcore.models.seal import SEAL_FILE, check_seal, seal_text
    from rmcore.reporting.card.model_card import CARD_FILE, name_repository
    from rmcore.serving.model_files import check_links

    names = _files(folder)
    check_links(folder, [*names, CARD_FILE])
    check_seal(folder)
    token = None if dry_run else hub_token()
    place = folder / CARD_FILE
    text = _read_text(place) if place.is_file() else make_text()
    _check_card(text, folder, although_not_ready=although_not_ready)
    visibility = "public" if is_public else "private"
    if token is None:
        _report_files(folder, names, name_repository(text, name))
        print(f"dry run     nothing was sent; it would be {visibility}, as {name}")
        print("removed     the hub was not asked; weights of an earlier push there are removed, and named then")
        return
    repository = Repository(name, is_private=not is_public, token=token)
    card = name_repository(text, repository.name)
    _check_replaced(repository, card)
    _report_files(folder, names, card)
    contents: dict[str, Path | bytes] = {file: folder / file for file in names}
    contents |= {CARD_FILE: card.encode(), SEAL_FILE: seal_text(folder, names).encode()}
    if stale := repository.stale(contents):
        print(f"removed     {', '.join(stale)}: weights that lie on the hub under other names")
    address = repository.publish(contents, "Reward model and card, by rm-opt card --push")
    print(f"pushed      {repository.name} ({visibility}): {address}")


def _read_text(place: Path) -> str:
    """Read a card that is there.

    Raises:
        ConfigError: it is no text.
    """
    try:
        return place.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{place} is no text in UTF-8, so it was not written by `rm-opt card`, and the hub shows nothing else. "
            "Move it away, or save it as UTF-8."
        ) from error


def _check_replaced(repository: Repository, card: str) -> None:
    """Refuse to replace what no earlier push wrote, or what was changed on the hub since; say what is replaced.

    Raises:
        ConfigError: either.
        ServiceError: the hub does not answer, or fails.
    """
    from rmcore.reporting.card.model_card import CARD_FILE, read_card

    if not repository.files:
        return
    content = repository.read(CARD_FILE) if CARD_FILE in repository.files else b""
    try:
        old = read_card(content)
    except DataError:  # metadata that are no YAML: the card was written by hand
        old = None
    if content != card.encode() and (old is None or not old.is_as_written):
        what = "its card was not written by `rm-opt card`" if content else f"it has files and no {CARD_FILE}"
        if old is not None:
            what = "its card was changed since `rm-opt card` wrote it"
        raise ConfigError(
            f"{repository.name} is there already, and {what}, so a push would overwrite other work; nothing was "
            "sent. Name another repository or, if nothing in this one is wanted, delete or rename it on the hub."
        )
    if old is not None:
        print(f"replaces    {old.digest[:16]} in {repository.name}: {old.headline or 'nobody judged'}")


def _files(folder: Path) -> list[str]:
    """Names of the files that make the model; its own Python code is not among them, which no loader should run."""
    from rmcore.models.weight_index import INDEX_FILE
    from rmcore.serving.model_files import WHOLE_FILE, text_files, weight_files

    weights = weight_files(folder)
    index = [] if weights == [WHOLE_FILE] else [INDEX_FILE]
    return [*(file for file in text_files(folder) if not file.endswith(".py")), *index, *weights]


def _report_files(folder: Path, names: list[str], card: str) -> None:
    """Say what is sent, with sizes, and what of the folder is not; a seal is made of what is sent."""
    from rmcore.models.seal import SEAL_FILE
    from rmcore.reporting.card.model_card import CARD_FILE

    sizes = {CARD_FILE: len(card.encode())} | {name: (folder / name).stat().st_size for name in names}
    for name, size in sizes.items():
        print(f"{_size(size):>11} {name}")
    print(f"{_size(sum(sizes.values())):>11} in {len(sizes)} files, and {SEAL_FILE} with their digests")
    if left_out := sorted(path.name for path in folder.iterdir() if path.name not in {*sizes, SEAL_FILE}):
        print(f"left out    {', '.join(left_out)}")


def _size(num_bytes: float) -> str:
    for unit in UNITS[:-1]:
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} {UNITS[-1]}"


def _check_card(text: str, folder: Path, *, although_not_ready: bool) -> None:
    """Refuse a model whose verdict speaks against it, and a card of other weights.

    Raises:
        ConfigError: either.
        DataError: the card's metadata cannot be read.
    """
    from rmcore.ensembles.ensemble_folder import checkpoint_digest
    from rmcore.reporting.card.model_card import CARD_FILE, read_card
    from rmcore.reporting.verdict_style import VERDICT_STYLES

    card: ReadCard | None = read_card(text)
    if card is not None and card.digest != checkpoint_digest(folder):
        raise ConfigError(
            f"{folder / CARD_FILE} was written for other weights than those next to it, so it speaks of another model; "
            "write it again with `rm-opt card`."
        )
    if although_not_ready:
        return
    if card is None:
        raise ConfigError(
            f"{folder / CARD_FILE} was not written by `rm-opt card`, so it is not known what the verdict was. Move it "
            "away, or push it as it is with --although-not-ready."
        )
    if card.status in VERDICT_STYLES and VERDICT_STYLES[card.status].tone == "bad":
        raise ConfigError(
            f"the verdict speaks against this model: {card.headline}. Anyone who loads it may optimise a policy "
            "against it. Give --although-not-ready to push it all the same; its card says what failed."
        )
