"""Publishing a folder's files in a repository of the Hugging Face hub, all of them in one commit or none."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmcore.core.errors import ConfigError, RmcoreError, ServiceError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

TOKEN_VARIABLE = "HF_TOKEN"  # noqa: S105 - the name of a variable
WEIGHT_ENDINGS = (".safetensors", ".safetensors.index.json")
"""Ends of the names of files that hold weights, or say where they are: a loader that finds two sets takes either."""
UNKNOWN, FORBIDDEN, TAKEN, TOO_MANY, SERVER_ERROR = 401, 403, 409, 429, 500
SHOWN_CHARS = 300
"""Characters of what the hub said that a message shows."""


def hub_token() -> str:
    """The token of the hub, from the environment alone.

    Raises:
        ConfigError: there is none.
    """
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    if not token:
        raise ConfigError(
            f"{TOKEN_VARIABLE} is not set, and the hub takes files from nobody it does not know. Make a token with "
            "write access at https://huggingface.co/settings/tokens and put it into the environment: "
            f"read -s {TOKEN_VARIABLE}; export {TOKEN_VARIABLE}. No option takes it: others on this machine see those."
        )
    return token


class Repository:
    """A repository of models on the hub that exists and may be written to.

    Args:
        name: as the user gives it: `owner/name`, or `name` alone for one of their own.
        is_private: whether only its owner may see it.
        token: of the hub. It stands in no message.

    Raises:
        ConfigError: the hub is switched off by HF_HUB_OFFLINE, the name is none, the repository belongs to somebody
            else, or is there and public where it is to be private, or the other way round.
        ServiceError: the hub does not answer, or fails.
    """

    def __init__(self, name: str, *, is_private: bool, token: str) -> None:
        from huggingface_hub import HfApi
        from huggingface_hub.constants import is_offline_mode
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id

        if is_offline_mode():
            raise ConfigError(
                "HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) is set, which switches the hub off; unset it to push, or "
                "look at what would be sent with --dry-run."
            )
        try:
            validate_repo_id(name)
        except HFValidationError as error:
            raise ConfigError(f"{name!r} is no name of a repository ({error}); write it as OWNER/NAME.") from error
        self._token = token
        self._api = HfApi(token=token, library_name="rm-optimizer")
        with self._told(name):
            self.name = name if "/" in name else f"{self._api.whoami()['name']}/{name}"
        with self._told(self.name):
            self._files = self._open(self._api, is_private)

    def _open(self, api: "HfApi", is_private: bool) -> list[str]:
        """Names of the files that are there; makes the repository where it is not."""
        from huggingface_hub.errors import RepositoryNotFoundError

        try:
            there = api.model_info(self.name)
        except RepositoryNotFoundError:
            api.create_repo(self.name, private=is_private)
            return []
        if bool(there.private) != is_private:
            now, asked, option = ("private", "public", "leave out --public")
            if is_private:
                now, asked, option = ("public", "private", "give --public")
            raise ConfigError(
                f"{self.name} is there already and {now}, and what you push is to be {asked}, so nothing was sent. "
                f"Name another repository, change this one in its settings on the hub, or {option}."
            )
        return [file.rfilename for file in there.siblings or []]

    def publish(self, files: Mapping[str, Path | bytes], message: str) -> str:
        """Send files by their names in the repository; gives the address of the commit.

        Weights that are there under other names are removed: loaders would take the one or the other.

        Raises:
            ConfigError: the hub refuses, or the token may not write there.
            ServiceError: the hub does not answer, or fails. What was there before is untouched.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        stale = [name for name in self._files if name.endswith(WEIGHT_ENDINGS) and name not in files]
        changes: list[Any] = [CommitOperationDelete(name) for name in stale]
        changes += [
            CommitOperationAdd(name, content if isinstance(content, bytes) else str(content))
            for name, content in files.items()
        ]
        with self._told(self.name):
            return str(self._api.create_commit(self.name, changes, commit_message=message).commit_url)

    @contextmanager
    def _told(self, name: str) -> Iterator[None]:
        """Say in one sentence what a failure of the hub means."""
        from huggingface_hub.errors import HfHubHTTPError, HTTPError

        try:
            yield
        except RmcoreError:  # said already
            raise
        except HfHubHTTPError as error:
            raise self._answered(error, name) from error
        except (HTTPError, OSError) as error:
            raise ServiceError(
                f"the hub at {self._api.endpoint} does not answer ({self._shown(error)}), so nothing was published. "
                "Check the network, and HF_ENDPOINT if you set it; the same command then begins again."
            ) from error
        except (RuntimeError, ValueError) as error:  # of an upload, whose cause is the answer of a store of large files
            cause = error.__cause__ or error
            raise ServiceError(
                f"the files did not arrive at the hub ({self._shown(error)}: {self._shown(cause)}), so {name} is as it "
                "was before. The same command begins again, and sends what has arrived no second time."
            ) from error

    def _answered(self, error: Any, name: str) -> ConfigError | ServiceError:
        status, said = error.response.status_code, self._shown(error.server_message or error)
        if status == UNKNOWN:
            return ConfigError(
                f"the hub does not know the token in {TOKEN_VARIABLE} ({said}): it is mistyped, expired or was "
                "revoked. Make another one."
            )
        if status in (FORBIDDEN, TAKEN):
            return ConfigError(
                f"the hub lets your token write nothing to {name} ({said}): the name belongs to somebody else, or the "
                "token has no write access there. Name a repository of your own, OWNER/NAME, or use another token."
            )
        if status >= SERVER_ERROR or status == TOO_MANY:
            return ServiceError(
                f"the hub failed with status {status} ({said}), so {name} has none of these files. It is the hub's "
                "trouble and mostly passes: try again later."
            )
        return ConfigError(f"the hub refuses to publish {name}, status {status} ({said}).")

    def _shown(self, error: object) -> str:
        line = " ".join(str(error).split()) or type(error).__name__
        return line.replace(self._token, f"[{TOKEN_VARIABLE}]")[:SHOWN_CHARS]
