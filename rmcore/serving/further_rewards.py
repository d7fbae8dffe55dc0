"""Rewards next to the served model's own: functions of the user's, which this process calls, and other reward servers.

A row's reward is the own one plus each further one times its weight. Nothing is normalised: a server sees rows, and
the groups that they are compared in are known to the trainer alone.
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

    weights: of each, the own reward's being 1.
    functions, peers: what gives them.
    """

    weights: Mapping[str, float]
    functions: Mapping[str, Callable[[Prompt, str], Any]]
    peers: Mapping[str, "Peer"]
    _calling: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(1))
    """One at a time: a user's function need not be made for several threads."""

    @classmethod
    def named(cls, weights: Mapping[str, float], own_token: str) -> Self:
        """Import the functions and name the peers; nothing is sent yet.

        Args:
            weights: names, of the form of `rlhf.more_rewards`, and their weights.
            own_token: this server's, which a peer may share.

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
        """See that all peers are ours and answer.

        Raises:
            ConfigError: a peer has further rewards of its own, so that servers might ask one another in a circle.
            ServingError, RequestError: see `Peer.prove` and `AsyncRewardClient.version`.
        """
        for name, peer in self.peers.items():
            await peer.prove()
            if (await peer.client.version()).more_rewards:
                raise ConfigError(
                    f"{SETTING} names {name}, which sums further rewards itself. Name its rewards here, and give it "
                    "none, so that no servers ask one another in a circle."
                )

    async def added(
        self, asked: ScoringRequest, dialogues: Sequence[tuple[Prompt, str]]
    ) -> tuple[dict[str, tuple[float, ...]], dict[str, FurtherReward]]:
        """Weighted further rewards of N inputs.

        Args:
            asked: what peers are asked, with its N inputs.
            dialogues: the same as N prompts and responses, for the functions.

        Returns:
            N numbers by the name of each reward, in the order of the setting, and what gave them.

        Raises:
            DataError: a function failed, or gave no finite number.
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
    """Sums over the rewards of N rows, which do not depend on their order to the last bit.

    Raises:
        DataError: one is not finite.
    """
    columns = list(zip(*parts.values(), strict=True))
    for row, column in enumerate(columns):
        if not math.isfinite(sum(column)):
            raise DataError(f"inputs.{row}: the weighted rewards {column} have no finite sum; give smaller weights.")
    return [math.fsum(column) for column in columns]


class Peer:
    """Another reward server of ours. A token is sent to it only after it has proved that it has the same one.

    Args:
        address: `http://HOST:PORT`.
        own_token: this server's, for a peer that keeps no token for this user at its address.
    """

    def __init__(self, address: str, own_token: str) -> None:
        self.address = address
        self._token = read_kept_token(address) or own_token
        # One request for all rows and no second try: what is sent after the proof goes to who has given it.
        self.client = AsyncRewardClient(address, token=self._token, batch_size=MAX_ROWS, attempts=1)
        is_here = httpx.URL(address).host in LOOPBACK
        self._asking = httpx.AsyncClient(base_url=address, trust_env=not is_here, timeout=PROOF_TIMEOUT_S)

    async def score(self, asked: ScoringRequest) -> ScoringResponse:
        """Rewards of the inputs in logits, all by one version of its weights.

        Raises:
            RmcoreError: see `prove` and `AsyncRewardClient.score`; the message names the peer.
        """
        await self.prove()
        return await self.client.score(asked.inputs, over_length=asked.over_length, policy_version=asked.policy_version)

    async def prove(self) -> None:
        """Have it prove that it has the token, at the address that the connection ends at. The token is not sent.

        Raises:
            ServingError: it cannot be reached, or does not prove it.
        """
        question = secrets.token_urlsafe()
        asked = {"question": question, "proof": proof(self._token, question)}
        try:
            async with self._asking.stream("GET", PROOF_PATH, params=asked) as answer:
                # Where the connection ends is in the proof, so that nobody can hand on the proof of another server.
                place = place_of(answer.extensions["network_stream"].get_extra_info("server_addr"))
                given = await answer.aread()
        except httpx.HTTPError as error:
            raise ServingError(
                f"{self.address} of {SETTING} could not be reached ({type(error).__name__}: {error}). See that this "
                "reward server runs."
            ) from error
        if not hmac.compare_digest(given, proof(self._token, question, place).encode()):
            raise ServingError(
                f"{self.address} of {SETTING} did not prove, as {place}, that it is a reward server with the token "
                "that this one has for it, and was sent no token. Start both with one RM_OPT_TOKEN, or both without "
                "it on one machine, this one last; and name the address that it listens at."
            )

    async def aclose(self) -> None:
        """Close all connections to it."""
        await self._asking.aclose()
        await self.client.aclose()
