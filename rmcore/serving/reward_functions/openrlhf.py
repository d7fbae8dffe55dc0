"""A file for OpenRLHF's `--reward.remote_url FILE.py`, for a server started with `--protocols openrlhf`.

The server is that of RM_OPT_SERVER, its token that of RM_OPT_TOKEN or of the file which `rm-opt serve` keeps: nothing
of it is in the trainer's address. Read from OpenRLHF 0.11 (`utils/agent.py`, `SingleTurnAgentExecutor`).
"""

import logging
import os
from collections.abc import Sequence
from typing import Any

import httpx
import torch

from rmcore.serving.token_file import find_token

SERVER = os.environ.get("RM_OPT_SERVER", "http://127.0.0.1:8100")


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any], **_: Any) -> dict[str, Any]:
    """Rewards of texts; what the server notices about the texts is logged."""
    headers = {"Authorization": f"Bearer {find_token(SERVER)}"}
    if isinstance(queries, str):
        queries, prompts, labels = [queries], [prompts], [labels]  # type: ignore[list-item]  # one text of each
    asked = {"query": list(queries), "prompts": list(prompts), "labels": list(labels)}
    answer = httpx.post(f"{SERVER}/get_reward", json=asked, headers=headers, timeout=180)
    answer.raise_for_status()
    found = answer.json()
    for warning in found["warnings"]:
        logging.getLogger(__name__).warning(warning)
    rewards = torch.tensor(found["rewards"])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {}}
