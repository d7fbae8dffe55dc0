"""Rewards added to the served model's own: functions of the user, called in this process, and other reward servers.

A row's reward is the own reward plus the weighted further ones. Nothing is normalised: a server sees rows, and only the
trainer knows the groups in which they are compared.
"""

import hmac
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import anyio
import httpx

from rmcore.config.judging import is_function
from rmcore.core.errors import ConfigError, DataError, ServingError
from rmcore.core.named_function import REWARD_MEANING, call_for_number, load_function
from rmcore.core.proxies import LOOPBACK
from rmcore.data.pair import Prompt
from rmcore.serving.async_client import AsyncRewardClient, together
from rmcore.serving.token_file import PROOF_PATH, place_of, proof, read_kept_token
from rmcore.serving.types import MAX_ROWS, FurtherReward, ScoringRequest, ScoringResponse

SETTING = "--more-rewards"
PROOF_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class FurtherRewards:
    """The further rewards of one server, by their names in the setting.

    weights: the weight of each; that of the own reward is 1.
    functions, peers: the sources of the rewards.
    """

    weights: Mapping[str, float]
    functions: Mapping[str, Callable[[Prompt, str], Any]]
    peers: Mapping[str, "Peer"]
    _calling: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(1))
    """One call at a time: a user's function need not be thread-safe."""

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
        """Check that all peers have proved themselves and answer.

        Raises:
            ConfigError: a peer has further rewards of its own, so servers might call one another in a circle.
            ServingError, RequestError: see `Peer.prove` and `AsyncRewardClient.version`.
        """
        for name, peer in self.peers.items():
            await peer.prove()
            if (await peer.client.version()).more_rewards:
                raise ConfigError(
                    f"{SETTING} names {name}, which adds further rewards itself. Name its rewards here and start it "
                    "without them, so that servers cannot call one another in a circle."
                )

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
            RmcoreError: a peer did not prove itself, or failed; see `AsyncRewardClient.score`.
        """
        calls = anyio.to_thread.run_sync(self._call, dialogues, limiter=self._calling)
        given, *answers = await together(calls, *(peer.score(asked) for peer in self.peers.values()))
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

    def _call(self, dialogues: Sequence[tuple[Prompt, str]]) -> dict[str, Sequence[float]]:
        return {
            name: [call_for_number(SETTING, name, function, *one) for one in dialogues]
            for name, function in self.functions.items()
        }

    async def aclose(self) -> None:
        """Close the connections to all peers."""
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
    """Another reward server. The token is sent to it only after it has proved that it has the same token.

    Args:
        address: `http://HOST:PORT`.
        own_token: this server's token, used if this user has no stored token for the peer's address.
    """

    def __init__(self, address: str, own_token: str) -> None:
        self.address = address
        self._token = read_kept_token(address) or own_token
        # One request for all rows and no retry: it directly follows the proof, and goes to the server that gave it.
        self.client = AsyncRewardClient(address, token=self._token, batch_size=MAX_ROWS, attempts=1)
        is_here = httpx.URL(address).host in LOOPBACK
        self._asking = httpx.AsyncClient(base_url=address, trust_env=not is_here, timeout=PROOF_TIMEOUT_S)

    async def score(self, asked: ScoringRequest) -> ScoringResponse:
        """Return the rewards of the inputs in logits, all by one version of its weights.

        Raises:
            RmcoreError: see `prove` and `AsyncRewardClient.score`; the message names the peer.
        """
        await self.prove()
        return await self.client.score(asked.inputs, over_length=asked.over_length, policy_version=asked.policy_version)

    async def prove(self) -> None:
        """Require a proof that it has the token, for the address at which the connection ends. The token is not sent.

        Raises:
            ServingError: it cannot be reached, or does not prove it.
        """
        question = secrets.token_urlsafe()
        asked = {"question": question, "proof": proof(self._token, question)}
        try:
            async with self._asking.stream("GET", PROOF_PATH, params=asked) as answer:
                # The proof covers the address at which the connection ends, so a relayed proof of another server fails.
                place = place_of(answer.extensions["network_stream"].get_extra_info("server_addr"))
                given = await answer.aread()
        except httpx.HTTPError as error:
            raise ServingError(
                f"{self.address} of {SETTING} could not be reached ({type(error).__name__}: {error}). Check that this "
                "reward server is running."
            ) from error
        if not hmac.compare_digest(given, proof(self._token, question, place).encode()):
            raise ServingError(
                f"{self.address} of {SETTING} did not prove, as {place}, that it has the token that this server has "
                "for it, so the token was not sent. Start both with the same RM_OPT_TOKEN, or both without it on one "
                "machine, this one last. After a restart of the other server with a new token, restart this one too. "
                "Name the address at which it listens."
            )

    async def aclose(self) -> None:
        """Close all connections to it."""
        await self._asking.aclose()
        await self.client.aclose()
