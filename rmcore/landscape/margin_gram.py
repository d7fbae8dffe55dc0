"""Inner products of all pairs' margin gradients, without ever holding all gradients.

J has one row a pair, the gradient of its margin: 512 rows of a 22 M model take 46 GB. So a block of rows is held, and
the rows of all later pairs are computed in small chunks and multiplied with it; each pair of blocks comes once, by
symmetry. A row is the gradient of one pair's margin alone: gradients of a batch are sums over its pairs.

The matrix of the input embedding is the widest part of a row, and zero but for the tokens of the pair. Those few rows
of it are kept for all pairs at once (`TokenGradients`), so they count for nothing in a held row.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from rmcore.core.errors import CurvatureError
from rmcore.core.progress import Report, silent
from rmcore.landscape.autograd import gradient_of
from rmcore.landscape.operators import PairCurvature
from rmcore.landscape.pair_rows import Rows, margins
from rmcore.landscape.parameters import measuring, parameter_blocks
from rmcore.landscape.vectors import inner_products
from rmcore.training.memory import free_bytes

MEMORY_SHARE = 0.5
"""Share of the free memory that is taken where nothing else is said."""
CHUNK_ROWS = 16
"""Rows multiplied at once with the held ones: each product reads all held rows."""
FIRST_DERIVATIVE_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Nothing is differentiated twice here: kernels that allow one derivative take about 8 % less time on a CPU."""
LOOKUP_TOLERANCE = 1e-5
"""Two float32 sums of the same terms in another order differ by rounding only, about 1e-7."""


class MarginGram(NamedTuple):
    """The inner products and margins that the spectrum is made of.

    blocks: {block: (n, n) float64 on the CPU}, inner products of the margin gradients within each block of parameters.
    margins: (n,) float64 on the CPU, logits, without temperature.
    num_gradients: margin gradients computed; more than n where the rows do not fit into memory together.
    """

    blocks: dict[str, Tensor]
    margins: Tensor
    num_gradients: int


class RowPlan(NamedTuple):
    """How many rows are held, and how many are multiplied with them at once."""

    held: int
    chunk: int

    @classmethod
    def fitting(cls, num_pairs: int, row_bytes: int, memory_bytes: int) -> "RowPlan":
        """The plan with most held rows. A chunk takes at most an eighth of the room.

        Raises:
            CurvatureError: not even two rows fit.
        """
        room = max(memory_bytes, 0) // row_bytes
        if room >= num_pairs:
            return cls(num_pairs, CHUNK_ROWS)
        if room < 2:
            raise CurvatureError(
                f"{memory_bytes / 2**20:,.0f} MiB are left for margin gradients of {row_bytes / 2**20:,.1f} MiB each, "
                "and two have to fit beside the embedding gradients and the result. Raise memory_bytes, take fewer "
                "pairs, or a smaller set of parameters (a layer, 'head')."
            )
        chunk = max(1, min(CHUNK_ROWS, room // 8))
        return cls(room - chunk, chunk)

    def num_gradients(self, num_pairs: int) -> int:
        """Margin gradients in all: every pair once for each block of held rows that does not come after it."""
        return sum(num_pairs - start for start in range(0, num_pairs, self.held))


def margin_gram(operator: PairCurvature, *, memory_bytes: int | None = None, report: Report = silent) -> MarginGram:
    """Inner products of the gradients of all margins of `operator`, by block of parameters.

    Args:
        operator: model, pairs and parameters; its matrix is not used.
        memory_bytes: for rows, embedding gradients and results on the model's device; None takes half of what is free.
            The model and the activations of one pair come on top. Less memory means more gradients, see `RowPlan`.
        report: called after each margin gradient.

    Raises:
        CurvatureError: a margin or a product is not finite, or two rows do not fit into the memory.
        ModelError: the model does not give one number a row.
    """
    with measuring(operator.module, operator.parameters), sdpa_kernel(FIRST_DERIVATIVE_KERNELS):
        rows = MarginRows(operator)
        num_pairs = len(rows.pairs)
        room = int(MEMORY_SHARE * free_bytes(operator.device)) if memory_bytes is None else memory_bytes
        room -= 8 * num_pairs**2 * len(rows.blocks) + (rows.tokens.num_bytes if rows.tokens else 0)
        plan = RowPlan.fitting(num_pairs, rows.row_bytes, room)
        grams = _multiply(rows, plan, report)
        if rows.tokens is not None:
            grams[rows.token_block] += rows.tokens.gram(num_pairs)
    for block, gram in grams.items():
        grams[block] = (gram.tril() + gram.tril(-1).T).cpu()
    if not all(bool(torch.isfinite(gram).all()) for gram in grams.values()):
        raise CurvatureError(
            f"the margin gradients of {num_pairs} pairs have NaN or infinite entries: weights overflow. Evaluate the "
            "checkpoint first; go back to an earlier one, or use float64."
        )
    return MarginGram(grams, rows.margins.cpu(), plan.num_gradients(num_pairs))


def _multiply(rows: "MarginRows", plan: RowPlan, report: Report) -> dict[str, Tensor]:
    """Lower triangles of the Gram matrices of the dense columns, (n, n) float64 each."""
    num_pairs, done = len(rows.pairs), 0
    new = partial(torch.zeros, (num_pairs, num_pairs), dtype=torch.float64, device=rows.device)
    grams = {name: new() for name in rows.blocks}
    num_rows = min(plan.held + plan.chunk, num_pairs)
    store = torch.empty((num_rows, rows.num_columns), dtype=rows.dtype, device=rows.device)
    for start in range(0, num_pairs, plan.held):
        stop = min(start + plan.held, num_pairs)
        chunks = [(first, min(first + plan.chunk, stop)) for first in range(start, stop, plan.chunk)]
        chunks += [(first, min(first + plan.chunk, num_pairs)) for first in range(stop, num_pairs, plan.chunk)]
        for first, last in chunks:
            place = first - start if first < stop else plan.held
            chunk = store[place : place + last - first]
            for offset, row in enumerate(chunk):
                rows.write(first + offset, row)
                done += 1
                report(done, plan.num_gradients(num_pairs), "margin gradients")
            held = store[: min(last, stop) - start]
            for name, (begin, end) in rows.blocks.items():
                products = inner_products(chunk[:, begin:end], held[:, begin:end])
                grams[name][first:last, start : start + len(held)] = products
    return grams


class MarginRows:
    """The rows of J, computed one at a time; use it inside `measuring`.

    Attributes:
        pairs: n pairs of two rows each, without columns that are padding in both.
        margins: (n,) float64, filled by `write`.
        blocks: {block: (first, last)} columns of each block of parameters in a dense row.
        num_columns: of a dense row.
        row_bytes: bytes of one.
        tokens: the gradients of the embedding matrix, where only lookups depend on it; else None, and it is dense.
    """

    def __init__(self, operator: PairCurvature) -> None:
        self.module, self.device, self.dtype = operator.module, operator.device, operator.dtype
        self.pairs = [pair for rows in operator.micro_batches for pair in single_pairs(rows)]
        self.margins = torch.full((len(self.pairs),), torch.nan, dtype=torch.float64, device=self.device)
        named = dict(zip(operator.names, operator.parameters, strict=True))
        self._embedding = self._lookup_only(operator)
        self.tokens: TokenGradients | None = None
        self.token_block = ""
        self._dense: list[nn.Parameter] = []
        self.blocks: dict[str, tuple[int, int]] = {}
        self.num_columns = 0
        for block, names in parameter_blocks(named).items():
            first = self.num_columns
            for name in names:
                if self._embedding is not None and named[name] is self._embedding.weight:
                    self.token_block = block
                    self.tokens = TokenGradients(self.pairs, self._embedding)
                else:
                    self._dense.append(named[name])
                    self.num_columns += named[name].numel()
            self.blocks[block] = (first, self.num_columns)
        self.row_bytes = max(1, self.num_columns) * torch.finfo(self.dtype).bits // 8

    def write(self, index: int, row: Tensor) -> None:
        """Write the dense columns of pair `index` to `row`; the first time also its embedding gradient and margin."""
        first_time = bool(self.margins[index].isnan())
        with _lookups(self._embedding if first_time else None) as outputs:
            margin = self._margin(index)
        parts = gradient_of([margin], [*self._dense, *outputs])
        if self._dense:
            torch.cat([part.reshape(-1) for part in parts[: len(self._dense)]], out=row)
        if first_time:
            self.margins[index] = margin.detach()[0]
            if self.tokens is not None:
                self.tokens.write(index, self.pairs[index], parts[-1])

    def _margin(self, index: int) -> Tensor:
        margin = margins(self.module, self.pairs[index], self.device)
        if not bool(torch.isfinite(margin).all()):
            raise CurvatureError(
                f"the margin of pair {index} is {float(margin.detach()):.3g}: there is no curvature at these weights. "
                "Evaluate the checkpoint first; if its rewards are not finite, go back to an earlier one."
            )
        return margin

    def _lookup_only(self, operator: PairCurvature) -> nn.Embedding | None:
        """The input embedding, if its matrix is selected and the margin depends on it by looking up input_ids alone.

        Tied weights, rescaled gradients and the like would lose something. So on the first pair the whole gradient of
        the matrix is compared with the one made from the gradient of what was looked up.
        """
        embedding = _input_embedding(self.module)
        if embedding is None or not any(embedding.weight is parameter for parameter in operator.parameters):
            return None
        with _lookups(embedding) as outputs:
            margin = self._margin(0)
        pair = self.pairs[0]
        if len(outputs) != 1 or outputs[0].shape[:-1] != pair.input_ids.shape:
            return None
        whole, looked_up = gradient_of([margin], [embedding.weight, outputs[0]])
        tokens = TokenGradients([pair], embedding)
        tokens.write(0, pair, looked_up)
        left = whole.index_add(0, tokens.tokens, -tokens.rows)
        return embedding if left.norm() <= LOOKUP_TOLERANCE * whole.norm() else None


class TokenGradients:
    """Gradients of the embedding matrix for all pairs: of each only the rows of its own tokens, as others are zero."""

    def __init__(self, pairs: list[Rows], embedding: nn.Embedding) -> None:
        weight = embedding.weight
        self._padding_idx = embedding.padding_idx
        distinct = [pair.input_ids.unique() for pair in pairs]
        self.tokens = torch.cat(distinct).to(weight.device)  # (S,) S distinct tokens of each pair, summed over pairs
        self.rows = weight.new_zeros((len(self.tokens), weight.shape[1]))  # (S, D)
        ends = torch.tensor([len(found) for found in distinct]).cumsum(0).tolist()
        self.spans = list(zip([0, *ends[:-1]], ends, strict=True))

    @property
    def num_bytes(self) -> int:
        """Memory they take."""
        return self.rows.nbytes + self.tokens.nbytes

    def write(self, index: int, pair: Rows, looked_up: Tensor) -> None:
        """Set the gradient of pair `index` from that of what its tokens looked up, (2, L, D)."""
        own = slice(*self.spans[index])
        at = torch.searchsorted(self.tokens[own], pair.input_ids.reshape(-1).to(self.tokens.device))
        self.rows[own].index_add_(0, at, looked_up.reshape(len(at), -1))
        if self._padding_idx is not None:  # torch gives this row no gradient
            self.rows[own][self.tokens[own] == self._padding_idx] = 0

    def gram(self, num_pairs: int) -> Tensor:
        """Inner products, (n, n) float64: token by token, among the pairs that hold it."""
        gram = torch.zeros((num_pairs, num_pairs), dtype=torch.float64, device=self.rows.device)
        lengths = torch.tensor([last - first for first, last in self.spans])
        owners = torch.arange(num_pairs).repeat_interleave(lengths).to(self.rows.device)
        order = self.tokens.argsort(stable=True)
        _, counts = self.tokens[order].unique_consecutive(return_counts=True)
        for positions in order.split(counts.tolist()):
            part, who = self.rows[positions], owners[positions]
            gram[who[:, None], who] += (part @ part.T).double()
        return gram


def single_pairs(rows: Rows) -> Iterator[Rows]:
    """The pairs of a micro-batch one by one, without the last columns that are padding on both sides."""
    ids, mask = (torch.stack(tensor.chunk(2), dim=1) for tensor in rows)  # (P, 2, L)
    places = torch.arange(1, mask.shape[-1] + 1, device=mask.device)
    for pair_ids, pair_mask in zip(ids, mask, strict=True):
        length = max(1, int((pair_mask.any(0) * places).max()))
        yield Rows(pair_ids[:, :length], pair_mask[:, :length])


def _input_embedding(module: nn.Module) -> nn.Embedding | None:
    find = getattr(module, "get_input_embeddings", None)
    try:
        embedding = find() if find is not None else None
    except NotImplementedError:  # Hugging Face: the architecture does not say which one it is
        return None
    return embedding if isinstance(embedding, nn.Embedding) else None


@contextmanager
def _lookups(embedding: nn.Embedding | None) -> Iterator[list[Tensor]]:
    """Collect the embedding's outputs inside the block, as the tensors that the graph goes through."""
    outputs: list[Tensor] = []
    if embedding is None:
        yield outputs
        return
    handle = embedding.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    try:
        yield outputs
    finally:
        handle.remove()
