"""Publishing a folder's files in a repository of the Hugging Face hub, all of them in one commit or none."""

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rmcore.core.errors import ConfigError, RmcoreError, ServiceError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

TOKEN_VARIABLE = "HF_TOKEN"  # noqa: S105 - the name of a variable
WEIGHT_ENDINGS = (".safetensors", ".safetensors.index.json")
"""Ends of the names of files that hold weights, or say where they are: a loader that finds two sets takes either."""
UNKNOWN, FORBIDDEN, TAKEN, MOVED, TOO_MANY, SERVER_ERROR = 401, 403, 409, 412, 429, 500
HUB_S_OWN = ".gitattributes"
"""The file that the hub itself puts into a repository when it makes one."""
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
    """A repository of models on the hub that exists and may be written to, as it was when it was looked at.

    Args:
        name: as the user gives it: `owner/name`, or `name` alone for one of their own.
        is_private: whether only its owner may see it.
        token: of the hub. No message shows it.

    Raises:
        ConfigError: the hub is switched off by HF_HUB_OFFLINE, the name is none, the repository belongs to someone
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
            self.files, self._commit = self._open(self._api, is_private)

    def _open(self, api: "HfApi", is_private: bool) -> tuple[frozenset[str], str | None]:
        """Files that others put there, and the commit that has them; makes the repository where it is not."""
        from huggingface_hub.errors import RepositoryNotFoundError

        try:
            there = api.model_info(self.name)
        except RepositoryNotFoundError:
            api.create_repo(self.name, private=is_private)
            return frozenset(), None
        if bool(there.private) != is_private:
            now, asked, option = ("private", "public", "leave out --public")
            if is_private:
                now, asked, option = ("public", "private", "give --public")
            raise ConfigError(
                f"{self.name} is there already and {now}, and what you push is to be {asked}, so nothing was sent. "
                f"Name another repository, change this one in its settings on the hub, or {option}."
            )
        return frozenset(file.rfilename for file in there.siblings or []) - {HUB_S_OWN}, there.sha

    def read(self, name: str) -> bytes:
        """Content of one of `files`.

        Raises:
            ConfigError: the hub refuses.
            ServiceError: the hub does not answer, or fails.
        """
        with self._told(self.name), tempfile.TemporaryDirectory() as folder:
            place = self._api.hf_hub_download(self.name, name, revision=self._commit, cache_dir=folder)
            return Path(place).read_bytes()

    def stale(self, names: Iterable[str]) -> list[str]:
        """Weights that a push of files of these names removes: in the first folder, under other names.

        Loaders would take the one or the other. What is in folders, such as adapters, is read by its own name alone.
        """
        kept = {*names}
        return sorted(
            name for name in self.files if name.endswith(WEIGHT_ENDINGS) and "/" not in name and name not in kept
        )

    def publish(self, files: Mapping[str, Path | bytes], message: str) -> str:
        """Send files by their names in the repository; gives the address of the commit.

        `stale` files are removed.

        Raises:
            ConfigError: the hub refuses, the token may not write there, or the repository has changed since
                it was looked at.
            ServiceError: the hub does not answer, or fails. What was there before is untouched.
        """
        from huggingface_hub import CommitOperationAdd, CommitOperationDelete

        changes: list[Any] = [CommitOperationDelete(name) for name in self.stale(files)]
        changes += [
            CommitOperationAdd(name, content if isinstance(content, bytes) else str(content))
            for name, content in files.items()
        ]
        with self._told(self.name):
            done = self._api.create_commit(self.name, changes, commit_message=message, parent_commit=self._commit)
        return str(done.commit_url)

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
                f"the hub lets your token write nothing to {name} ({said}): the name belongs to someone else, or the "
                "token has no write access there. Name a repository of your own, OWNER/NAME, or use another token."
            )
        if status == MOVED:
            return ConfigError(
                f"someone has changed {name} since this push looked at it ({said}), so it has none of these files. "
                "Look at what came; the same command then begins again."
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
