"""Rewards of a file's rows from vLLM, which is started for them and ended after them.

The server answers this process alone: on loopback, on a port of its own, with a token that is made up here.
"""

import os
import re
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd

from rmcore.core.files import atomic_file, exclusive, write_json
from rmcore.core.store import KEY_LENGTH, Store, make_key
from rmcore.data.pair import PreferencePair, Prompt
from rmcore.data.readers.sources import load_pairs, source_digest
from rmcore.data.responses import load_responses
from rmcore.evaluation.ranking import correctness
from tasks.device import device_slot, in_the_way, slot_environment
from tasks.home import home, tracking_address
from tasks.model_versions import REGISTRY_SCHEME, checkpoint_of
from tasks.waiting import Waiting, untold

if TYPE_CHECKING:
    from rmcore.serving.client import RewardClient
    from rmcore.serving.types import ScoringResponse, VersionInfo

OverLength = Literal["cut", "refuse"]


@dataclass(frozen=True, slots=True)
class ScoringData:
    """The rows of a file, and what the server is asked about them."""

    columns: pd.DataFrame
    """Names the rows: pair_id and prompt_id of pairs, else prompt and response."""
    sides: list[tuple[Prompt, str]]
    """Sides to score: chosen and rejected of each pair in turn, else the rows."""
    is_pairs: bool
    num_unusable: int
    source: str
    digest: str


@dataclass(frozen=True, slots=True)
class ModelToServe:
    """Which reward model is scored with: `name` in tables, `address` to name it again, `checkpoint` for the server."""

    name: str
    address: str
    checkpoint: str


@dataclass(frozen=True, slots=True)
class Scored:
    """Answers of the server, and how long it took to start and to answer (seconds)."""

    answer: "ScoringResponse"
    version: "VersionInfo"
    start_seconds: float
    seconds: float


def read_data(source: str, split: str, limit: int | None) -> ScoringData:
    """The pairs of a source, or its rows of prompt and response where it has these columns.

    Raises:
        DataError: it cannot be read, or nothing in it can be scored.
    """
    digest = source_digest(source)
    responses = load_responses(source, split=split, limit=limit)
    if responses is not None:
        columns = pd.DataFrame(responses.rows, columns=["prompt", "response"])
        return ScoringData(columns, list(responses.rows), False, responses.num_unusable, source, digest)
    loaded = load_pairs(source, split=split, limit=limit)
    columns = pd.DataFrame([(pair.pair_id, pair.prompt_id) for pair in loaded.pairs], columns=["pair_id", "prompt_id"])
    sides = [side for pair in loaded.pairs for side in _sides(pair)]
    return ScoringData(columns, sides, True, len(loaded.rejected), source, digest)


def _sides(pair: PreferencePair) -> tuple[tuple[Prompt, str], tuple[Prompt, str]]:
    return (pair.prompt, pair.chosen), (pair.prompt, pair.rejected)


@contextmanager
def model_to_serve(model: str) -> Iterator[ModelToServe]:
    """The model that a person named; what had to be downloaded for it is deleted after the block.

    Args:
        model: a checkpoint folder, a hub name, or a registered version (`checkpoint_of`).

    Raises:
        ConfigError, ServiceError: as `checkpoint_of`.
    """
    if not model.startswith(REGISTRY_SCHEME):
        place = Path(model).expanduser()
        yield ModelToServe(short_name(model), model, str(place) if place.is_dir() else model)
        return
    with tempfile.TemporaryDirectory(prefix=".download-", dir=home()) as scratch:
        found = checkpoint_of(model, tracking_address(home()), Path(scratch))
        yield ModelToServe(found.name, f"{REGISTRY_SCHEME}{found.name}", str(found.folder))


def short_name(model: str) -> str:
    """Shorten a model's name for names of runs and folders.

    >>> short_name("models:/rm-demo@candidate"), short_name("/home/me/out/best")
    ('rm-demo@candidate', 'out/best')
    """
    return "/".join(Path(model.removeprefix(REGISTRY_SCHEME)).parts[-2:])


def score_served(
    store: Store,
    served: ModelToServe,
    data: ScoringData,
    over_length: OverLength,
    *,
    run: str,
    waiting: Waiting = untold,
) -> Scored:
    """Serve the model on a slot of the device and score all rows by it. Nothing runs afterwards.

    `run` and `waiting` are as those of `tasks.stages.run_stage`.

    Raises:
        RmcoreError: as `rmcore.serving.server.serve` and `RewardClient.score`.
    """
    with waiting() as wait:
        wait.on(lambda: in_the_way(store, "auto"))
        with device_slot(store, run) as slot, _environment(slot_environment(slot)):
            wait.end()
            return _serve_and_score(served, data, over_length)


def _serve_and_score(served: ModelToServe, data: ScoringData, over_length: OverLength) -> Scored:
    from rmcore.serving.bulk_scoring import REQUEST_TIMEOUT_S
    from rmcore.serving.http_app import HttpSettings
    from rmcore.serving.process import RewardServer
    from rmcore.serving.server import ServeSettings

    settings = ServeSettings(served.checkpoint, port=0, http=HttpSettings(token=secrets.token_urlsafe()))
    began = time.perf_counter()
    with RewardServer(settings) as server, server.client(timeout_s=REQUEST_TIMEOUT_S) as client:
        ready = time.perf_counter()
        answer = ask(client, data, over_length)
        return Scored(answer, client.version(), ready - began, time.perf_counter() - ready)


def ask(client: "RewardClient", data: ScoringData, over_length: OverLength) -> "ScoringResponse":
    """Rewards of all sides of `data` from the server that the client speaks to.

    Raises:
        RmcoreError: as `RewardClient.score`.
    """
    return client.score([_wire(*side) for side in data.sides], over_length=over_length)


def _wire(prompt: Prompt, response: str) -> dict[str, Any]:
    turns = prompt if isinstance(prompt, str) else tuple(turn._asdict() for turn in prompt)
    return {"prompt": turns, "response": response}


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Variables that the server inherits; a flow run is a process of its own, so nobody else sees them."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def rewards_table(data: ScoringData, rewards: Sequence[float], num_cut: Sequence[int]) -> pd.DataFrame:
    """The rows of `data` with their rewards in logits and the tokens that were left out.

    Returns:
        For pairs pair_id, prompt_id, reward_chosen, reward_rejected, chosen_cut, rejected_cut; else prompt, response,
        reward, cut.
    """
    if not data.is_pairs:
        return data.columns.assign(reward=list(rewards), cut=list(num_cut))
    return data.columns.assign(
        reward_chosen=list(rewards[::2]),
        reward_rejected=list(rewards[1::2]),
        chosen_cut=list(num_cut[::2]),
        rejected_cut=list(num_cut[1::2]),
    )


def summarise(served: ModelToServe, data: ScoringData, table: pd.DataFrame, scored: Scored) -> dict[str, Any]:
    """Sum up a scored file, JSON-ready. `rows_per_second` leaves the start of vLLM out."""
    accuracy = None
    if data.is_pairs and len(table):
        accuracy = float(correctness((table.reward_chosen - table.reward_rejected).to_numpy()).mean())
    return {
        "model": served.name,
        "checkpoint": served.address,
        "checkpoint_digest": scored.answer.checkpoint_digest,
        "weight_version": scored.answer.weight_version,
        "dtype": scored.version.dtype,
        "data": data.source,
        "num_rows": len(table),
        "num_unusable": data.num_unusable,
        "num_cut": sum(tokens > 0 for tokens in scored.answer.num_cut),
        "start_seconds": scored.start_seconds,
        "seconds": scored.seconds,
        "rows_per_second": len(table) / scored.seconds,
        "tokens_per_second": sum(scored.answer.num_tokens) / scored.seconds,
        "pairwise_accuracy": accuracy,
    }


def scores_key(summary: Mapping[str, Any], data: ScoringData, **settings: Any) -> str:
    """Digest of what the rewards depend on: the model's and the data's content, precision and `settings`."""
    model = {"checkpoint": summary["checkpoint_digest"], "dtype": summary["dtype"]}
    return make_key({"stage": "scores", "data": data.digest, **model, **settings})


def write_scores(table: pd.DataFrame, summary: Mapping[str, Any], key: str) -> Path:
    """Write `rewards.parquet` and `summary.json`, each whole or not at all; gives their folder below the home's scores.

    Raises:
        OSError: the disk is full or may not be written to.
    """
    place = home() / "scores"
    slug = re.sub(r"[^A-Za-z0-9._]+", "-", str(summary["model"])).strip("-.")
    folder = place / f"{slug}-{key[:KEY_LENGTH]}"
    with exclusive(place / ".lock"):  # against another run with the same outcome
        folder.mkdir(exist_ok=True)
        with atomic_file(folder / "rewards.parquet") as unfinished:
            table.to_parquet(unfinished)
        write_json(folder / "summary.json", summary)
    return folder
