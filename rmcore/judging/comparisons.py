"""Utilities of answers from comparisons of two, and which two to compare next.

The answers of a prompt have utilities u in logits. An answer that is shown first wins over the second one, ties with
it, or loses by Davidson's model of ties with an effect of the order (Davidson and Beaver 1977), which is the likelihood
that rankings are trained with (`rmcore.training.likelihood`): with d = u_first - u_second + gamma,

    P(first) : P(tie) : P(second) = exp(d / 2) : delta : exp(-d / 2)

gamma and delta are shared by all prompts, utilities have a Normal(0, PRIOR_SD^2) prior. The log-probability is linear
in d up to the normalisation, so one comparison carries the Fisher information Var(s) about d, where s is 1, 1/2 or 0.
The next pair of a prompt is the one whose answer is expected to tell most, log(1 + Var(s) Var(d)) by the Laplace
approximation of the posterior.

Sources: Davidson and Beaver 1977, Biometrics 33(4); expected information: Lindley 1956, MacKay 1992.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from rmcore.core.arrays import FloatArray, IntArray
from rmcore.training.likelihood import ranking_log_likelihood

PRIOR_SD = 2.0
"""Logits; answers of one prompt that differ by two of them are told apart in 94 % of comparisons."""
EFFECT_SD = 1.0
"""Prior deviation of the effect of the order and of log delta, in logits."""
COMPARISONS_EACH = 3
"""Comparisons an answer, at most; each answer is part of twice as many."""


@dataclass
class Comparisons:
    """Comparisons of the answers of P prompts, and what follows from them.

    sizes: answers of each prompt; an answer is named by its prompt and its place.
    """

    sizes: Sequence[int]
    _rows: list[tuple[int, int, int, float]] = field(default_factory=list)
    """(prompt, place shown first, place shown second, score of the first: 1, 0.5 for a tie, 0)."""
    _asked: set[tuple[int, int, int]] = field(default_factory=set)
    """Those of them that were read, and those that were not."""

    def add(self, prompt: int, first: int, second: int, score: float) -> None:
        """Take a comparison: the score of the answer that was shown first; NaN if the reply could not be read."""
        self._asked.add((prompt, first, second))
        if not np.isnan(score):
            self._rows.append((prompt, first, second, score))

    def is_compared(self, prompt: int, place: int) -> bool:
        """Whether any comparison says something of an answer."""
        return any(row[0] == prompt and place in row[1:3] for row in self._rows)

    def fit(self) -> tuple[list[FloatArray], float, float]:
        """The most probable utilities of each prompt's answers, (K,) each, gamma, and log delta.

        Utilities of a prompt have mean 0: comparisons say nothing of the level.
        """
        offsets = np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)
        utilities = torch.zeros(int(offsets[-1]), dtype=torch.float64, requires_grad=True)
        effects = torch.zeros(2, dtype=torch.float64, requires_grad=True)  # gamma, log delta
        if self._rows:
            prompts, firsts, seconds, scores = (np.array(column) for column in zip(*self._rows, strict=True))
            # Sorted as `ranking_log_likelihood` reads them: the winner first; a tie has two ranks of 1.
            swapped = scores < 0.5
            first, second = torch.from_numpy(offsets[prompts] + firsts), torch.from_numpy(offsets[prompts] + seconds)
            tied = torch.from_numpy(scores == 0.5)
            ranks = torch.stack([torch.ones(len(tied)), torch.where(tied, 1.0, 2.0)], 1).long()  # (N, 2)
            no_first_only = torch.zeros(len(tied), dtype=torch.bool)

            def log_posterior() -> torch.Tensor:
                shown = torch.stack([utilities[first] + effects[0], utilities[second]], 1)  # (N, 2)
                ordered = torch.where(torch.from_numpy(swapped)[:, None], shown.flip(1), shown)
                likelihood = ranking_log_likelihood(ordered, ranks, effects[1:], first_only=no_first_only).sum()
                prior = (utilities**2).sum() / PRIOR_SD**2 + (effects**2).sum() / EFFECT_SD**2
                return likelihood - prior / 2

            _maximise(log_posterior, [utilities, effects])
        gamma, log_tie = effects.tolist()
        return _by_prompt(utilities, offsets), gamma, log_tie

    def next_pairs(self, rng: np.random.Generator) -> list[tuple[int, int, int]]:
        """The most informative pairs (prompt, place shown first, place shown second), each answer in one at most.

        Prompts with all comparisons that they may have (`COMPARISONS_EACH` an answer, and both orders of each pair)
        get none. Which answer is shown first is drawn, unless that order was asked before.
        """
        utilities, gamma, log_tie = self.fit()
        asked: list[set[tuple[int, int]]] = [set() for _ in self.sizes]
        for prompt, first, second in self._asked:
            asked[prompt].add((first, second))
        precision = [np.eye(size) / PRIOR_SD**2 for size in self.sizes]
        for prompt, first, second, _ in self._rows:
            weight = _information(utilities[prompt][first] - utilities[prompt][second] + gamma, log_tie)
            apart = np.zeros(self.sizes[prompt])
            apart[[first, second]] = 1.0, -1.0
            precision[prompt] += weight * np.outer(apart, apart)
        pairs = []
        for prompt, size in enumerate(self.sizes):
            left = COMPARISONS_EACH * size - len(asked[prompt])
            covariance = np.linalg.inv(precision[prompt])
            variance = covariance.diagonal()[:, None] + covariance.diagonal() - 2 * covariance  # (K, K) of differences
            apart = utilities[prompt][:, None] - utilities[prompt]
            information = np.log1p(_information(apart, log_tie) * variance)
            order = np.argsort(-np.triu(information, 1) - 1e-9 * np.triu(rng.random((size, size)), 1), axis=None)
            free = set(range(size))
            for a, b in zip(*np.unravel_index(order, (size, size)), strict=True):
                orders = [order for order in ((int(a), int(b)), (int(b), int(a))) if order not in asked[prompt]]
                if a < b and left > 0 and {int(a), int(b)} <= free and orders:
                    pairs.append((prompt, *orders[int(rng.integers(len(orders)))]))
                    free -= {int(a), int(b)}
                    left -= 1
        return pairs


def _maximise(concave: Callable[[], torch.Tensor], parameters: Sequence[torch.Tensor]) -> None:
    """Move the parameters, in place, to where a concave function of them is largest."""
    optimizer = torch.optim.LBFGS(parameters, max_iter=200, tolerance_grad=1e-6, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        negative = -concave()
        negative.backward()
        return negative

    optimizer.step(loss)


def _by_prompt(utilities: torch.Tensor, offsets: IntArray) -> list[FloatArray]:
    """(K,) utilities of each prompt's answers, with mean 0."""
    pools = np.split(utilities.detach().numpy(), offsets[1:-1])
    return [pool - pool.mean() if len(pool) else pool for pool in pools]


def _information(difference: FloatArray | float, log_tie: float) -> FloatArray:
    """Variance of the score of a comparison, which is its information about the difference of utilities."""
    half = np.asarray(difference, dtype=np.float64) / 2
    top = np.maximum(np.abs(half), log_tie)
    win, lose, tie = np.exp(half - top), np.exp(-half - top), np.exp(log_tie - top)
    total = win + lose + tie
    mean = (win + tie / 2) / total
    return np.asarray((win + tie / 4) / total - mean**2)
