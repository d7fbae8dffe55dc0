"""The likelihood of ranks: Plackett-Luce with ties, of which Bradley-Terry is the case of two answers.

A ranking is read from the top: first the best answer, or several that tie for it, is chosen from all; then the next
from those that are left; and so on. A set T of t answers is chosen from S with probability

    P(T | S) = delta_t exp(mean of u over T) / Z(S),    Z(S) = sum_{k=1..D} delta_k e_k(exp(u / k) over S)

where u are utilities in logits, e_k is the elementary symmetric polynomial of degree k (the sum over all sets of k
answers), delta_1 = 1 and the other delta_k, learned, say how readily k answers are called equal. D = 1, no ties, is
Plackett-Luce; two answers are Davidson's model of ties, and with D = 1 Bradley-Terry: softplus(-(u_1 - u_2)).

Sources: Plackett 1975; Luce 1959; Davidson 1970 (ties of two); Firth, Turner, Kosmidis 2019, arXiv:1909.07123 (ties of
more, "Davidson-Luce").
"""

import torch
from torch import Tensor

NONE = -1e30
"""Logarithm of what is not there. Not -inf, whose gradient under logaddexp is NaN."""


def ranking_log_likelihood(
    utilities: Tensor, ranks: Tensor, log_tie: Tensor, *, first_only: Tensor, label_smoothing: float = 0.0
) -> Tensor:
    """Log-likelihood of N rankings of up to K answers.

    Args:
        utilities: (N, K) in logits, the answers of each ranking sorted best first, then padding.
        ranks: (N, K) long, from 1, not falling; equal ranks are ties; 0 is padding.
        log_tie: (D - 1,) logarithms of delta_2 .. delta_D; no tie is larger than D.
        first_only: (N,) bool: of the ranking only the first choice counts, and it was one of single answers.
        label_smoothing: eps; with probability eps a choice is taken for one among the answers that are left, evenly.
            For two answers that is (1 - eps/2) and eps/2.

    Returns:
        (N,) nats, 0 or less without smoothing.
    """
    present = ranks > 0  # (N, K)
    starts = present & (ranks != torch.nn.functional.pad(ranks[:, :-1], (1, 0)))  # (N, K) a choice is made here
    starts = starts & ~(first_only[:, None] & (ranks > 1))
    places = torch.arange(ranks.shape[1], device=ranks.device)
    behind = present[:, None, :] & (places >= places[:, None])  # (N, K, K) left when the choice at a place is made
    # (N, K) log sum of exp over what is left
    from_here = utilities[:, None, :].masked_fill(~behind, NONE).logsumexp(2)
    totals = from_here
    if len(log_tie):
        totals = torch.where(first_only[:, None], from_here, _log_totals(utilities, present, log_tie))
    same = (ranks[:, :, None] == ranks[:, None, :]) & present[:, :, None]  # (N, K, K)
    size = same.sum(2)  # (N, K) answers that tie with this one
    chosen = (same * utilities[:, None, :]).sum(2) / size.clamp(min=1)  # (N, K) mean utility of them
    readiness = torch.cat([utilities.new_zeros(1), log_tie])  # (D,) log delta_k
    chosen = chosen + readiness[(size.clamp(min=1) - 1).clamp(max=len(log_tie))]
    said = chosen - totals
    if label_smoothing:
        mean_left = (behind * utilities[:, None, :]).sum(2) / behind.sum(2).clamp(min=1)
        said = (1 - label_smoothing) * said + label_smoothing * (mean_left - totals)
    return torch.where(starts, said, 0.0).sum(1)


def _log_totals(utilities: Tensor, present: Tensor, log_tie: Tensor) -> Tensor:
    """Log of Z, for each answer with all behind it: (N, K).

    Row k - 1 of `sums` holds log e_0 .. e_D of exp(u / k), to which an answer is added at a time, the last one first.
    """
    number, largest = len(utilities), len(log_tie) + 1
    sums = utilities.new_full((number, largest, largest + 1), NONE)
    sums[:, :, 0] = 0.0
    orders = torch.arange(1, largest + 1, device=utilities.device)  # k
    readiness = torch.cat([utilities.new_zeros(1), log_tie])  # (D,)
    totals = []
    for place in range(utilities.shape[1] - 1, -1, -1):
        with_it = sums[:, :, :-1] + (utilities[:, place, None] / orders)[:, :, None]  # (N, D, D)
        added = torch.cat([sums[:, :, :1], torch.logaddexp(sums[:, :, 1:], with_it)], dim=2)
        sums = torch.where(present[:, place, None, None], added, sums)
        own = sums[:, orders - 1, orders]  # (N, D) log e_k of exp(u / k)
        totals.append((own + readiness).logsumexp(1))
    return torch.stack(totals[::-1], dim=1)
