"""Rewards of rollouts: what a policy did, step by step, becomes one input each, and the reward goes into its `meta`.

A rollout is scored as one dialogue that its steps make up. With prompts p and completions c of three steps:

    user p1 · assistant c1 · user p2 · assistant c2 · user p3   is the prompt, and   c3   the response

So a step's prompt holds only what is new since the step before, such as the environment's answer, and not the whole
dialogue once more. A prompt of several messages replaces its user turn as it is.
"""

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field, field_validator

from rmcore.core.errors import RequestError
from rmcore.data.pair import Message, plain_prompt, prompt_text
from rmcore.serving.client import OverLength, RewardClient
from rmcore.serving.types import ChatMessage, PromptResponse, Wire


class Step(Wire):
    """One turn of a policy. A prompt of messages takes mappings of role and content, and the platform's `Message`.

    Raises:
        pydantic.ValidationError: a field is missing, unknown or of another type (a ValueError).
    """

    prompt: str | tuple[ChatMessage, ...] = Field(description="What is new since the step before.")
    completion: str = Field(description="What the policy wrote; may be empty.")

    @field_validator("prompt", mode="before")
    @classmethod
    def _read_messages(cls, prompt: Any) -> Any:
        """Messages of preference data are named tuples, which are no mapping."""
        if isinstance(prompt, str) or not isinstance(prompt, Sequence):
            return prompt
        return tuple(turn.record() if isinstance(turn, Message) else turn for turn in prompt)


@dataclass(frozen=True, slots=True)
class Rollout:
    """The steps of a policy in one episode."""

    steps: Sequence[Step]
    """At least one, oldest first."""
    meta: MutableMapping[str, Any] = field(default_factory=dict)
    """Facts about the rollout; the scorer writes into it."""


class RewardModelScorer:
    """Scores rollouts through a client, which sends batches of its `batch_size` at the same time.

    Args:
        client: where the reward model answers.
        score_key: name of the reward in a rollout's `meta`.
        use_chat_template: send messages, which the server renders as the checkpoint was trained. False sends one text
            that is rendered here: `Prompt: p1`, `Response: c1`, `Prompt: p2` ... as paragraphs, which for one step is
            the platform's plain format. Only a checkpoint that was trained on such text gives it a meaningful reward.
        render_fn: gives the text of a rollout, which is then sent in place of messages, as in training where a
            render_fn takes precedence over the chat template.
        normalize: give sigmoid(beta * reward), in (0, 1), with the checkpoint's beta, in place of the reward in logits.
        over_length: whether a rollout longer than the model reads is refused, or cut and marked in `meta`.

    Example:
        >>> scorer = RewardModelScorer(client)  # doctest: +SKIP
        >>> rollout = Rollout([Step(prompt="2 + 2?", completion="4")])  # doctest: +SKIP
        >>> scorer.score([rollout]), rollout.meta  # doctest: +SKIP
        ([1.5], {'rm_score': 1.5, 'rm_score_version': 1})
    """

    def __init__(
        self,
        client: RewardClient,
        *,
        score_key: str = "rm_score",
        use_chat_template: bool = True,
        render_fn: Callable[[Rollout], str] | None = None,
        normalize: bool = False,
        over_length: OverLength = "refuse",
    ) -> None:
        self._client = client
        self._score_key = score_key
        self._render = render_fn if render_fn or use_chat_template else as_paragraphs
        self._normalize = normalize
        self._over_length = over_length

    def score(self, rollouts: Sequence[Rollout], *, policy_version: int | None = None) -> list[float]:
        """Score rollouts, all by one version of the weights, and write into each one's `meta` what it got.

            {score_key}           the reward, a float: logits, or a probability where `normalize`
            {score_key}_version   the weight version that gave it
            {score_key}_num_cut   tokens that were left out; only with over_length="cut"

        A call that fails writes nothing. From an event loop: `await asyncio.to_thread(scorer.score, rollouts)`.

        Args:
            rollouts: an empty list is answered without a call.
            policy_version: which policy wrote the rollouts; for the server's logs.

        Returns:
            The rewards in the order of the rollouts.

        Raises:
            RequestError: a rollout has no steps, or its rendering is no text, or the server refused it. The N of
                `inputs.N` in the message is the rollout's place in the list, from 0.
            NotReadyError, ServingError: as in `RewardClient.score`.
        """
        if not rollouts:
            return []
        inputs = [self._input(index, rollout) for index, rollout in enumerate(rollouts)]
        answer = self._client.score(
            inputs, normalize=self._normalize, over_length=self._over_length, policy_version=policy_version
        )
        for rollout, reward, num_cut in zip(rollouts, answer.rewards, answer.num_cut, strict=True):
            written: dict[str, Any] = {self._score_key: reward, f"{self._score_key}_version": answer.weight_version}
            if self._over_length == "cut":
                written[f"{self._score_key}_num_cut"] = num_cut
            rollout.meta.update(written)
        return list(answer.rewards)

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the server answers again; see `RewardClient.wait_ready`.

        Raises:
            ServingError: it was not ready in time.
        """
        self._client.wait_ready(timeout_s)

    def _input(self, index: int, rollout: Rollout) -> str | PromptResponse:
        if not rollout.steps:
            raise RequestError(f"rollout {index} of the list has no steps: there is nothing to score. Leave it out.")
        if self._render is None:
            return as_dialogue(rollout)
        text = self._render(rollout)
        if not isinstance(text, str):
            raise RequestError(
                f"render_fn returned {type(text).__name__} for rollout {index} of the list: the text of the whole "
                "rollout is expected. Let it return a str."
            )
        return text


def as_dialogue(rollout: Rollout) -> PromptResponse:
    """All turns before the last completion as the prompt, and that completion as the response."""
    turns: list[ChatMessage] = []
    for step in rollout.steps:
        turns += [*_turns(step), ChatMessage(role="assistant", content=step.completion)]
    turns.pop()
    prompt = plain_prompt(tuple(turn.message() for turn in turns))
    response = rollout.steps[-1].completion
    return PromptResponse(prompt=prompt if isinstance(prompt, str) else tuple(turns), response=response)


def as_paragraphs(rollout: Rollout) -> str:
    """`Prompt: ...` and `Response: ...` of each step, with an empty line between."""
    paragraphs = []
    for step in rollout.steps:
        prompt = prompt_text(tuple(turn.message() for turn in _turns(step)))
        paragraphs += [f"Prompt: {prompt}", f"Response: {step.completion}"]
    return "\n\n".join(paragraphs)


def _turns(step: Step) -> tuple[ChatMessage, ...]:
    return (ChatMessage(role="user", content=step.prompt),) if isinstance(step.prompt, str) else step.prompt
