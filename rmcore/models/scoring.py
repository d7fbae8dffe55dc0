"""Rewards of tokenized sides: packed where the model can be, else padded; on a GPU compiled where it is worth it."""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rmcore.core.errors import ModelError
from rmcore.core.progress import Report, silent
from rmcore.data.rendering import Renderer, TokenizedSide
from rmcore.models.batching import distinct_sides, scoring_chunks
from rmcore.models.layers import transformer_layers
from rmcore.models.packing.forward import find_packing, outputs_of
from rmcore.models.packing.layout import Packing, Rows, pack_sides, pad_rows
from rmcore.models.precision import InFloat32, Precision, float32_head, precision_context

if TYPE_CHECKING:
    from rmcore.models.compiling import CompiledLayers

Item = TypeVar("Item")
Made = TypeVar("Made")
SCORING_TOKEN_BUDGET = {"cpu": 8192, "cuda": 65536}
"""Computed tokens per batch when scoring without gradients, by device type."""
COMPILED_WORK = 1e12
"""Tokens times layers times hidden units from which scoring on a GPU compiles the layers first. Compiling saves the
memory traffic of element-wise operations, an estimated 0.14 ms for a side of 200 tokens at 0.5 B
(benchmarks/results/gpu.md), and takes an assumed 30 s: level at 9e11."""
AHEAD = 2
"""Batches that are ready for a GPU, or being made, while another is in use."""


class SplitWeights(Protocol):
    """Float32 weights of which `BradleyTerryRM.model` has the bfloat16 halves, while it is trained."""

    def whole_weights(self, model: torch.nn.Module) -> dict[str, Tensor]:
        """Give them by name, on the CPU."""
        ...

    def exact(self, tensor: Tensor) -> Tensor:
        """Give those that a tensor is the halves of; else the tensor."""
        ...

    def widen(self) -> None:
        """Put them in the place of their halves."""
        ...


class SideScorer:
    """The part of a reward model that computes: the model itself, and how it computes rows of tokens."""

    model: Any
    tokenizer: PreTrainedTokenizerBase
    renderer: Renderer

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase, renderer: Renderer) -> None:
        self.model, self.tokenizer, self.renderer = model, tokenizer, renderer
        self.allow_packing = True
        """Whether rows are packed where the model can be; off: always padded."""
        self.compiled: CompiledLayers | None = None
        """Compiled layers that scoring uses: those of the training, during it; on a GPU, made for `COMPILED_WORK`."""
        self.split: SplitWeights | None = None
        """See `SplitWeights`; None: the model itself holds the float32 weights."""
        self._narrowed: list[torch.nn.Linear] = []
        self._packing: dict[tuple[Precision, str], Packing | None] = {}

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    @property
    def pad_id(self) -> int:
        """Token id of padding."""
        return int(self.tokenizer.pad_token_id)

    def packing(self, precision: Precision = "fp32") -> Packing | None:
        """How rows are packed in this precision; None where they are padded, which is said once with the reason."""
        if not self.allow_packing:
            return None
        place = (precision, self.device.type)
        if place not in self._packing:
            try:
                with self._in_float32(precision):
                    found = find_packing(
                        self.model,
                        longest_side=self.renderer.rendering.max_seq_len,
                        precision=precision,
                        pad_id=self.pad_id,
                    )
            except ModelError as refusal:
                print(f"note: sides are padded, not packed: {refusal}.", file=sys.stderr)
                found = None
            self._packing[place] = found
        return self._packing[place]

    def score_sides(
        self,
        sides: Sequence[TokenizedSide],
        *,
        token_budget: int | None = None,
        precision: Precision = "fp32",
        report: Report = silent,
    ) -> np.ndarray:
        """Rewards of N tokenized sides: (N,) float32, in the order of `sides`.

        Inside, sides with a common prefix are computed together where the model allows it, so N answers to one prompt
        cost one prompt. `token_budget` is per batch; default: `SCORING_TOKEN_BUDGET`. `report` is called with the
        number of sides done; on a GPU, with the number submitted to it.
        """
        return self.score_outputs(sides, token_budget=token_budget, precision=precision, report=report)[:, 0]

    @torch.inference_mode()
    def score_outputs(
        self,
        sides: Sequence[TokenizedSide],
        *,
        token_budget: int | None = None,
        precision: Precision = "fp32",
        report: Report = silent,
    ) -> np.ndarray:
        """All that the head says of N tokenized sides: (N, 1), or (N, 1 + A) with A attributes; the reward first."""
        different, which = distinct_sides(sides)  # D sides, and (N,) which of them each one is
        if not different:
            return np.zeros((0, 1), dtype=np.float32)
        times = np.bincount(which, minlength=len(different))
        on_gpu = self.device.type == "cuda"
        budget = token_budget or SCORING_TOKEN_BUDGET[self.device.type]
        chunks = self.scoring_chunks(different, token_budget=budget, precision=precision)
        packing = self.packing(precision)
        if on_gpu and packing is not None:
            self._compile_for(sum(len(side.ids) for side in different))

        def make_rows(chunk: Sequence[Sequence[int]]) -> Rows:
            rows = self._rows_of(different, chunk, packing)
            return rows.pin_memory() if on_gpu else rows

        was_training = self.model.training
        self.model.eval()
        found: list[Tensor] = []
        done = 0
        # On a GPU, no result is awaited before all batches are queued.
        for chunk, rows in zip(chunks, (made_ahead if on_gpu else map)(make_rows, chunks), strict=True):
            found.append(self._compute(rows, precision))
            done += int(times[[index for group in chunk for index in group]].sum())
            report(done, len(sides), "sides")
        self.model.train(was_training)
        outputs = np.zeros((len(different), found[0].shape[1]), dtype=np.float32)
        outputs[[index for chunk in chunks for group in chunk for index in group]] = torch.cat(found).cpu().numpy()
        return outputs[which]  # (D, 1) -> (N, 1)

    def scoring_chunks(
        self, sides: Sequence[TokenizedSide], *, token_budget: int, precision: Precision
    ) -> list[list[list[int]]]:
        """Positions of N sides as batches of groups; see `rmcore.models.batching.scoring_chunks`."""
        ids = [side.ids for side in sides]
        return scoring_chunks(ids, token_budget=token_budget, packing=self.packing(precision))

    @torch.no_grad()  # not inference_mode: sharded weights cannot be inference tensors
    def score_chunk(
        self, sides: Sequence[TokenizedSide], chunk: Sequence[Sequence[int]], *, precision: Precision = "fp32"
    ) -> Tensor:
        """Rewards of the sides of one batch of groups, in its order: float32 on the model's device.

        The caller sets evaluation mode.
        """
        return self._compute(self._rows_of(sides, chunk, self.packing(precision)), precision)[:, 0]

    def _rows_of(self, sides: Sequence[TokenizedSide], chunk: Sequence[Sequence[int]], packing: Packing | None) -> Rows:
        ids = [sides[index].ids for group in chunk for index in group]
        if packing is None:
            return pad_rows(ids, pad_id=self.pad_id)
        if packing.reads_last and self.compiled is not None and self.compiled.works:
            packing = replace(packing, reads_last=False)  # compiled layers compute all tokens
        places = iter(range(len(ids)))  # `ids` are in the order of the groups, so places count up through them
        return pack_sides(ids, [[next(places) for _ in group] for group in chunk], packing)

    def _compile_for(self, num_tokens: int) -> None:
        """Have the layers compiled if so many tokens are worth it."""
        work = num_tokens * len(transformer_layers(self.model)) * self.model.config.get_text_config().hidden_size
        if self.compiled is None and work >= COMPILED_WORK:
            from rmcore.models.compiling import CompiledLayers  # whose import takes a second

            self.compiled = CompiledLayers(self.model)

    def _compute(self, rows: Rows, precision: Precision) -> Tensor:
        """All that the head says of rows, on the model's device."""
        in_float32 = self._in_float32(precision)
        compiled = self.compiled if isinstance(in_float32, nullcontext) else None  # which intercepts each operation

        def outputs() -> Tensor:
            with (
                in_float32,
                precision_context(precision, self.device),
                float32_head(self.model) if precision == "bf16" else nullcontext(),
            ):
                return outputs_of(self.model, rows.to(self.device)).float()

        return outputs() if compiled is None else compiled.run(outputs)

    def _in_float32(self, precision: Precision) -> AbstractContextManager[Any]:
        """Make the block compute in float32 where weights are held in bfloat16 and fp32 is requested."""
        if precision == "fp32" and self.split is not None:
            return InFloat32(self.split.exact)
        return InFloat32() if precision == "fp32" and self._narrowed else nullcontext()


def made_ahead(make: Callable[[Item], Made], items: Iterable[Item]) -> Iterator[Made]:
    """Yield `make` of each item, in their order. One thread makes the next ones; what it raises is raised here."""
    waiting: deque[Future[Made]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as thread:
        try:
            for item in items:
                waiting.append(thread.submit(make, item))
                if len(waiting) > AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:  # the caller has stopped, or one has failed
                future.cancel()
