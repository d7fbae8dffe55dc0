"""A folder as a repository of models on the Hugging Face hub, in one commit or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rmcore.core.errors import ConfigError, ServiceError

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
"""Weights of an earlier upload under other names are removed: a loader that finds two sets takes either."""
HUB_S_OWN = ".gitattributes"
"""The file that the hub itself puts into a repository when it makes one."""
OURS, SHOWN_CHARS = (401, 403, 404, 409, 412), 300
"""Statuses of what the user can change, and characters of what the hub said that a message shows."""


def open_repository(name: str, *, is_public: bool, own_key: str) -> "ModelInfo":
    """Make a repository, or find the one that an earlier upload made: its card's metadata have the `own_key`.

    Raises:
        ConfigError: there is no token, the hub refuses, or the repository has files of somebody else or the other
            visibility.
        ServiceError: the hub does not answer, or fails.
    """
    from huggingface_hub import HfApi, get_token

    if get_token() is None:
        raise ConfigError(
            "HF_TOKEN is not set, and the hub takes files from nobody it does not know. Make a token with write access "
            "at https://huggingface.co/settings/tokens, and run: hf auth login"
        )
    api = HfApi(library_name="rm-optimizer")
    with _told(name):
        name = name if "/" in name else f"{api.whoami()['name']}/{name}"
        api.create_repo(name, private=not is_public, exist_ok=True)
        there = api.model_info(name)
    others = {file.rfilename for file in there.siblings or ()} - {HUB_S_OWN}
    if others and (there.card_data is None or own_key not in there.card_data.to_dict()):
        raise ConfigError(
            f"{name} is there already, and no card of `rm-opt export` is in it, so a push would overwrite other work; "
            "nothing was sent. Name another repository, or empty this one on the hub."
        )
    if bool(there.private) is is_public:
        raise ConfigError(
            f"{name} is there already and {'private' if is_public else 'public'}, and what you push is to be the "
            "other, so nothing was sent. Change --public, or the repository's settings on the hub."
        )
    return there


def upload(folder: Path, there: "ModelInfo") -> str:
    """Send a folder's files to a repository as `open_repository` found it; gives the address of the commit.

    Raises:
        ConfigError: the hub refuses, or the repository has changed since.
        ServiceError: the hub does not answer, or fails. What was there before is untouched.
    """
    from huggingface_hub import HfApi

    with _told(there.id):
        done = HfApi(library_name="rm-optimizer").upload_folder(
            repo_id=there.id,
            folder_path=folder,
            commit_message="Reward model and card, by rm-opt export --push",
            parent_commit=there.sha,
            delete_patterns=list(WEIGHTS),
        )
    return str(done.commit_url)


@contextmanager
def _told(name: str) -> Iterator[None]:
    """Say what a failure of the hub means; no message shows the token."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError

    try:
        yield
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        said = " ".join(str(error.__cause__ or error).split()).replace(get_token() or "\0", "[HF_TOKEN]")[:SHOWN_CHARS]
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        if status in OURS or isinstance(error, HFValidationError):
            raise ConfigError(
                f"the hub publishes nothing as {name} ({said}): it does not know the token, the token has no write "
                "access there, the name is none or somebody else's, or the repository has changed meanwhile."
            ) from error
        raise ServiceError(
            f"the files did not arrive at the hub as {name} ({said}), and what is there is as it was. Check the "
            "network, HF_ENDPOINT and HF_HUB_OFFLINE; the same push begins again later."
        ) from error
