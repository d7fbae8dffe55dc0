"""Messages between a reward server and its clients: requests, answers, versions. JSON in both directions.

All models are frozen and refuse unknown fields, so a misspelt setting is an error and never a silent default.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from rmcore.data.pair import Message
from rmcore.data.readers.turns import message_of

MAX_ROWS = 4096
"""Most inputs of one request."""


class Wire(BaseModel):
    """A frozen model without room for unknown fields or for numbers that are not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class PoolingType(StrEnum):
    """Which token's hidden state the reward head reads."""

    LAST = "last"
    """The last real token: causal models."""
    CLS = "cls"
    """The first token: encoders."""


class RewardModelTrainingMode(StrEnum):
    """Which tensors a training changes, and so which must travel when its weights are published."""

    FULL = "full"
    """All."""
    HEAD_ONLY = "head_only"
    """The reward head's; see `rmcore.models.layers`."""
    LORA = "lora"
    """The adapted layers', with the adapters added in, and the reward head's."""


class ChatMessage(Wire):
    """One turn of a dialogue, with whatever else it has for the chat template: tool_calls, tool_call_id, name ...

    What the template does not show of it is refused by the server.
    """

    model_config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)

    role: str = Field(min_length=1, description="Who speaks: system, user, assistant, or what the template knows.")
    content: str | tuple[dict[str, Any], ...] | None = Field(
        description="What is said; may be empty. Also a list of parts of the type text; null where a tool is called."
    )

    def message(self) -> Message:
        """The turn as preference data have it.

        Raises:
            DataError: it has no text, or a part that is none.
        """
        turn = self.model_dump()
        return message_of(turn | {"content": list(turn["content"])} if isinstance(turn["content"], tuple) else turn)


Tools = Annotated[tuple[dict[str, Any], ...] | None, Field(exclude_if=lambda tools: tools is None)]


class PromptResponse(Wire):
    """A response and what it answers. The server renders both as the checkpoint was trained."""

    prompt: str | tuple[ChatMessage, ...] = Field(description="A user's text, or the dialogue before the response.")
    response: str | ChatMessage = Field(
        description="What is to be rewarded: a text, which may be empty, or an assistant's message with tool calls."
    )
    tools: Tools = Field(default=None, description="What the answer may call, as chat templates take it.")


class Dialogue(Wire):
    """Messages that end with the assistant's, and the tools that may be called in them."""

    messages: "Messages" = Field(description="The last one is to be rewarded.")
    tools: Tools = Field(default=None, description="What may be called, as chat templates take it.")


def _kind_of(value: Any) -> str | None:
    """Which of the five forms an input has, so that an error names the field of that form."""
    if isinstance(value, str):
        return "text"
    if isinstance(value, Dialogue) or (isinstance(value, Mapping) and "messages" in value):
        return "dialogue"
    if isinstance(value, Mapping | PromptResponse):
        return "pair"
    if isinstance(value, Sequence) and value:
        return "token_ids" if isinstance(value[0], int) else "messages"
    return None


def _ending_with_an_answer(turns: tuple[ChatMessage, ...]) -> tuple[ChatMessage, ...]:
    if turns[-1].role != "assistant":
        raise PydanticCustomError(
            "no_final_assistant_turn",
            "the last message has the role {role} and would be scored as an answer; end with the assistant's message",
            {"role": repr(turns[-1].role)[:40]},
        )
    return turns


Text = Annotated[str, Field(min_length=1)]
TokenIds = Annotated[tuple[Annotated[int, Field(ge=0, strict=True)], ...], Field(min_length=1)]
Messages = Annotated[tuple[ChatMessage, ...], Field(min_length=2), AfterValidator(_ending_with_an_answer)]
ScoringInput = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[Messages, Tag("messages")]
    | Annotated[TokenIds, Tag("token_ids")]
    | Annotated[PromptResponse, Tag("pair")]
    | Annotated[Dialogue, Tag("dialogue")],
    Discriminator(_kind_of),
]
"""One thing to score: a text that is rendered already, messages that end with the assistant's, also with tools next to
them, token ids with all special tokens, or a prompt with a response."""


class ScoringRequest(Wire):
    """Inputs that are scored together, by one version of the weights.

    Example:
        >>> ScoringRequest.from_list([{"prompt": "2 + 2?", "response": "4"}]).inputs[0].response
        '4'
    """

    inputs: tuple[ScoringInput, ...] = Field(max_length=MAX_ROWS, description="What to score; empty gives no reward.")
    normalize: bool = Field(
        default=False,
        description="Give sigmoid(beta * reward), in (0, 1), in place of the reward in logits: the chance of being "
        "preferred to a response of reward 0. beta is the checkpoint's.",
    )
    over_length: Literal["refuse", "cut"] = Field(
        default="refuse", description="What happens to an input longer than the model reads; `num_cut` tells the cuts."
    )
    policy_version: int | None = Field(
        default=None, ge=0, description="Which policy wrote the inputs; given back unchanged, for logs."
    )

    @classmethod
    def from_list(cls, inputs: Sequence[Any], **settings: Any) -> Self:
        """A request for inputs of any of the five forms.

        Raises:
            pydantic.ValidationError: an input has none of them (a ValueError).
        """
        rows = (inputs,) if isinstance(inputs, str | Mapping) else tuple(inputs)  # one, not its characters or its keys
        return cls.model_validate({"inputs": rows} | settings)


class ScoringResponse(Wire):
    """Rewards in the order of the inputs, all by the weights of `weight_version`."""

    rewards: tuple[float, ...] = Field(description="Logits; probabilities where `normalized`.")
    num_tokens: tuple[int, ...] = Field(description="Tokens that were read, special ones included.")
    num_cut: tuple[int, ...] = Field(description="Tokens that were left out to respect the model's limit.")
    normalized: bool = Field(description="Whether the sigmoid was applied.")
    weight_version: int = Field(ge=1, description="Rises by one with each update of the weights.")
    checkpoint_digest: str = Field(description="sha256 over the files of these weights.")
    policy_version: int | None = Field(default=None, description="As in the request.")

    @property
    def source(self) -> tuple[int, str]:
        """Identify the weights: a restarted server counts versions again, perhaps of other ones."""
        return self.weight_version, self.checkpoint_digest


ServerState = Literal["starting", "ready", "updating", "restarting", "broken", "stopping"]


class Health(Wire):
    """Identity of the server, and whether it answers now."""

    kind: Literal["reward_model"] = "reward_model"
    ready: bool = Field(description="Whether a request is answered now. While weights are exchanged it waits instead.")
    state: ServerState = Field(description="Why not, in one word.")
    reason: str | None = Field(default=None, description="Why not, in a sentence.")
    weight_version: int | None = Field(default=None, description="Of the weights that are served.")
    num_restarts: int = Field(default=0, ge=0, description="Times that vLLM was started again.")
    pooling: PoolingType = Field(description="Which token the head reads.")
    max_seq_len: int = Field(description="Longest input in tokens.")
    format: Literal["chat", "plain", "custom"] = Field(description="How prompts and responses are rendered.")


class VersionInfo(Wire):
    """Which weights are served, and where the next ones are to be put."""

    weight_version: int = Field(ge=1, description="1 for the checkpoint that the server was started with.")
    checkpoint_digest: str = Field(description="sha256 over the files of these weights.")
    checkpoint: str = Field(description="The checkpoint that the server was started with.")
    mode: RewardModelTrainingMode = Field(description="Of the last update; full at first.")
    dtype: Literal["float32", "bfloat16"] = Field(description="What the server computes in.")
    weights_folder: str = Field(description="Folder that updates are published through; on the server's machine.")
    layout_folder: str = Field(description="The folder that is served: names, shapes and types of all tensors.")


class RewardProbe(Wire):
    """Inputs with the rewards that the publisher's own model gives them: what the server must reproduce."""

    token_ids: tuple[TokenIds, ...] = Field(min_length=1, description="Inputs, special tokens included.")
    rewards: tuple[float, ...] = Field(min_length=1, description="Logits, one an input.")
    tolerance: float = Field(gt=0, description="Largest absolute difference that is rounding, in logits.")

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if len(self.token_ids) != len(self.rewards):
            raise ValueError(f"{len(self.token_ids)} inputs and {len(self.rewards)} rewards; give one reward an input")
        return self


class WeightUpdate(Wire):
    """A request to serve other weights."""

    folder: str = Field(min_length=1, description="Name of the update's folder below the server's weights folder.")
    digest: str = Field(min_length=64, max_length=64, description="sha256 that the update's manifest has.")
    mode: RewardModelTrainingMode = Field(description="Which tensors the folder holds.")
    probe: RewardProbe = Field(description="What the new weights must reproduce before they answer anyone.")


class Refusal(Wire):
    """The body of every answer that is not a success."""

    error: str = Field(description="Kind: invalid, unauthorized, too_large, busy, not_ready, conflict, failed.")
    message: str = Field(description="What was seen, what it means, what to do.")
    field: str | None = Field(default=None, description="The offending field, such as inputs.3.response.")


def first_error(error: ValidationError) -> tuple[str, str]:
    """The first field that is wrong, such as inputs.3.response (`body` for the whole), and why."""
    details = error.errors(include_url=False, include_context=False, include_input=False)
    same_input = [detail for detail in details if detail["loc"][:2] == details[0]["loc"][:2]]
    deepest = max(same_input, key=lambda detail: len(detail["loc"]))  # of all forms, the one that was meant
    place = deepest["loc"]
    if place[:1] == ("inputs",):
        place = place[:2] + place[3:]  # the third is the form's name and no field
    names = [str(part) for part in place if part not in ("str", "ChatMessage") and not str(part).startswith("tuple[")]
    is_none = deepest["type"] == "union_tag_not_found"
    why = "it is none of a text, messages, token ids, or a prompt with a response" if is_none else deepest["msg"]
    return ".".join(names) or "body", why
