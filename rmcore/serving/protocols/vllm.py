"""vLLM's POST /classify and /pooling and GET /v1/models, of a model with one label: the reward is the raw logit.

Read from vLLM 0.32 (`entrypoints/pooling/`). verl's reward loop sends it (`reward_loop.py`, `compute_score_disrm`): a
text that the reward model's template rendered, without its BOS, which vLLM's tokenizer adds again.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any
from uuid import uuid4

from fastapi import Request, Response
from pydantic import Field, StrictInt

from rmcore.core.errors import RequestError
from rmcore.serving.protocols.desk import Desk, Foreign, Route
from rmcore.serving.protocols.rendered import Reading, Rendered

DEFAULTS: dict[str, tuple[Any, ...]] = {
    "truncate_prompt_tokens": (None,),
    "padding": (None, "do_not_pad"),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "add_generation_prompt": (None, False),
    "continue_final_message": (None, False),
    "mm_processor_kwargs": (None, {}),
    "media_io_kwargs": (None, {}),
    "dimensions": (None,),
    "encoding_format": (None, "float"),
    "task": (None, "classify"),
    "normalize": (),
}
"""Fields that change vLLM's answer and are not supported here, with the values that change nothing."""
HARMLESS = {"user", "request_id", "priority", "cache_salt", "truncation_side", "embed_dtype", "endianness"}


class Pooled(Foreign):
    """A request for rewards, of texts, token ids or messages."""

    model: str | None = None
    input: str | tuple[str, ...] | tuple[StrictInt, ...] | tuple[tuple[StrictInt, ...], ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = Field(default=None, description="In place of input: one dialogue.")
    tools: tuple[dict[str, Any], ...] | None = None
    add_special_tokens: bool | None = None
    use_activation: bool | None = None
    activation: bool | None = Field(default=None, description="Its name before vLLM 0.11.2, which verl 0.7 sends.")

    def checked(self) -> list[str]:
        """Warnings about what is not read.

        Raises:
            RequestError: a field would change the answer in a way that this server has not.
        """
        extra = self.model_extra or {}
        for name, harmless in DEFAULTS.items():
            if name in extra and extra[name] not in harmless:
                raise RequestError(f"{name}: this server does not support it; leave it out.", field=name)
        if (self.input is None) == (self.messages is None):
            raise RequestError("input: give either input or messages.", field="input")
        return self.unread(HARMLESS | DEFAULTS.keys())

    def listed(self) -> Sequence[Any]:
        """The texts or token ids, of which `input` may be one; the dialogue."""
        given: Any = (self.messages,) if self.input is None else self.input
        return (given,) if isinstance(given, str) or (given and isinstance(given[0], int)) else given

    def readings(self, rendered: Rendered) -> Sequence[Reading]:
        """The inputs in their order."""
        if self.messages is not None:
            return [Reading({"messages": self.messages, "tools": self.tools})]
        adds_bos = self.add_special_tokens is not False
        return [
            rendered.text(row, adds_bos=adds_bos) if isinstance(row, str) else rendered.ids(row)
            for row in self.listed()
        ]


def routes(desk: Desk) -> list[Route]:
    """The three of vLLM's routes that are answered."""
    return [
        ("POST", "/classify", partial(_rewards, desk, "classify", _classified)),
        ("POST", "/pooling", partial(_rewards, desk, "pool", _pooled)),
        ("GET", "/v1/models", partial(_models, desk, round(time.time()))),
    ]


async def _rewards(desk: Desk, prefix: str, form: Any, request: Request) -> Response:
    async with desk.read(request, Pooled) as body:
        warnings = body.checked()
        model = desk.served.checkpoint
        if body.model not in (None, model):
            warnings.append(f"the model {body.model[:200]!r} was requested, and {model!r} is served")
        normalize = bool(body.activation if body.use_activation is None else body.use_activation)
        answer, said, headers = await desk.score(
            len(body.listed()), partial(body.readings, desk.rendered), normalize=normalize
        )
    num_tokens = sum(answer.num_tokens)
    content = {
        "id": f"{prefix}-{uuid4().hex}",
        "object": "list",
        "created": round(time.time()),
        "model": model,
        "data": [form(index, reward) for index, reward in enumerate(answer.rewards)],
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0},
        "warnings": [*warnings, *said],
    }
    return desk.answer(request, content, headers, [*warnings, *said])


def _classified(index: int, reward: float) -> dict[str, Any]:
    return {"index": index, "label": None, "probs": [reward], "num_classes": 1}


def _pooled(index: int, reward: float) -> dict[str, Any]:
    return {"index": index, "object": "pooling", "data": [reward]}


async def _models(desk: Desk, created: int, request: Request) -> Response:
    model = desk.served.checkpoint
    card = {"id": model, "object": "model", "created": created, "owned_by": "rm-opt", "root": model, "parent": None}
    content = {"object": "list", "data": [card | {"max_model_len": desk.max_seq_len, "permission": []}]}
    return desk.answer(request, content, {}, [])
