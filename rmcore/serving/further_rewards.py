"""Rewards added to the served model's own: functions of the user, called in this process, and other reward servers.

A row's reward is the own reward plus the weighted further ones. Nothing is normalised: a server sees rows, and only the
trainer knows the groups in which they are compared.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Self

from rmcore.config.judging import is_function
from rmcore.core.errors import ConfigError, DataError, ServingError
from rmcore.core.named_function import REWARD_MEANING, call_for_number, load_function
from rmcore.data.pair import Prompt
from rmcore.serving.async_client import AsyncRewardClient, together
from rmcore.serving.signatures import SignedRequests
from rmcore.serving.token_file import find_token
from rmcore.serving.types import MAX_ROWS, FurtherReward, ScoringRequest, ScoringResponse

SETTING = "--more-rewards"


@dataclass(frozen=True)
class FurtherRewards:
    """The further rewards of one server, by their names in the setting.

    weights: the weight of each; that of the own reward is 1.
    functions, peers: the sources of the rewards.
    """

    weights: Mapping[str, float]
    functions: Mapping[str, Callable[[Prompt, str], Any]]
    peers: Mapping[str, "Peer"]
    _calling: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    """One thread: a user's function need not be thread-safe, and may run on after its request has failed."""

    @classmethod
    def named(cls, weights: Mapping[str, float], own_token: str) -> Self:
        """Import the functions and prepare the peers; nothing is sent yet.

        Args:
            weights: names and weights, as in `rlhf.more_rewards`.
            own_token: this server's token, which a peer may share.

        Raises:
            ConfigError: a name is neither a function that can be imported nor the address of a server.
        """
        functions, peers = {}, {}
        for name in weights:
            if name.startswith(("http://", "https://")):
                peers[name] = Peer(name, own_token)
            elif is_function(name):
                functions[name] = load_function(SETTING, name, REWARD_MEANING)
            else:
                raise ConfigError(
                    f"{SETTING} names {name}, which is neither module:function nor the address of a reward server. One "
                    f"vLLM serves one checkpoint: for a folder run `rm-opt serve --checkpoint {name}`, and name the "
                    "address that it prints."
                )
        return cls(dict(weights), functions, peers)

    async def check(self) -> None:
        """Check that all peers answer, and sign their answers.

        Raises:
            ConfigError: a peer has further rewards of its own, so servers might call one another in a circle.
            ServingError, RequestError: see `SignedRequests` and `AsyncRewardClient.version`.
        """
        for name, peer in self.peers.items():
            if (await peer.client.version()).more_rewards:
                raise ConfigError(nested(name))

    async def added(
        self, asked: ScoringRequest, dialogues: Sequence[tuple[Prompt, str]]
    ) -> tuple[dict[str, tuple[float, ...]], dict[str, FurtherReward]]:
        """Return the weighted further rewards of N inputs.

        Args:
            asked: the request for peers, with its N inputs.
            dialogues: the same inputs as N prompts and responses, for functions.

        Returns:
            For each reward by name N numbers, in the order of the setting; and weight and version of each.

        Raises:
            DataError: a function failed, or returned no finite number.
            RmcoreError: a peer failed; see `Peer.score`.
        """
        given, *answers = await together(
            self._call_functions(dialogues), *(peer.score(asked) for peer in self.peers.values())
        )
        by_address = dict(zip(self.peers, answers, strict=True))
        parts, further = {}, {}
        for name, weight in self.weights.items():
            rewards, source = (
                (by_address[name].rewards, by_address[name]) if name in self.peers else (given[name], None)
            )
            parts[name] = tuple(weight * one for one in rewards)
            further[name] = FurtherReward(
                weight=weight,
                weight_version=source and source.weight_version,
                checkpoint_digest=source and source.checkpoint_digest,
            )
        return parts, further

    async def _call_functions(self, dialogues: Sequence[tuple[Prompt, str]]) -> dict[str, Sequence[float]]:
        return await asyncio.get_running_loop().run_in_executor(self._calling, self._call, dialogues)

    def _call(self, dialogues: Sequence[tuple[Prompt, str]]) -> dict[str, Sequence[float]]:
        return {
            name: [call_for_number(SETTING, name, function, *one) for one in dialogues]
            for name, function in self.functions.items()
        }

    async def aclose(self) -> None:
        """Close the connections to all peers, and call no function any more."""
        self._calling.shutdown(wait=False, cancel_futures=True)
        for peer in self.peers.values():
            await peer.aclose()


def summed(parts: Mapping[str, Sequence[float]]) -> list[float]:
    """Return the sum of the rewards of each of N rows; exactly rounded, so it does not depend on their order.

    Raises:
        DataError: a sum is not finite.
    """
    columns = list(zip(*parts.values(), strict=True))
    for row, column in enumerate(columns):
        if not math.isfinite(sum(column)):
            raise DataError(f"inputs.{row}: the weighted rewards {column} have no finite sum; give smaller weights.")
    return [math.fsum(column) for column in columns]


class Peer:
    """Another reward server. Requests to it are signed with its token, and so are its answers; the token is not sent.

    Args:
        address: `http://HOST:PORT`.
        own_token: this server's token, used if this user has no token for the peer's address.

    Raises:
        ConfigError: the address or the token cannot be used.
    """

    def __init__(self, address: str, own_token: str) -> None:
        auth = SignedRequests(find_token(address) or own_token, f"{address} of {SETTING}")
        # One request for all rows: they are scored with one version of its weights.
        self.client = AsyncRewardClient(address, batch_size=MAX_ROWS, auth=auth)
        self._address = address

    async def score(self, asked: ScoringRequest) -> ScoringResponse:
        """Return the rewards of the inputs in logits, all with one version of its weights.

        Raises:
            ServingError: it adds further rewards, or did not sign its answer.
            RmcoreError: see `AsyncRewardClient.score`; the message names the peer.
        """
        answer = await self.client.score(
            asked.inputs, over_length=asked.over_length, policy_version=asked.policy_version
        )
        if answer.further is not None:
            raise ServingError(nested(self._address))
        return answer

    async def aclose(self) -> None:
        """Close all connections to it."""
        await self.client.aclose()


def nested(address: str) -> str:
    """Return the message about a server that must not be a peer."""
    return (
        f"{SETTING} names {address}, which adds further rewards itself. Name its rewards here and start it without "
        "them, so that servers cannot call one another in a circle."
    )
