"""One likelihood of all kinds of observations, as a sum of nats, with what it has to learn besides the model.

Of a side the model says a reward r and, where attributes are graded, o_1 .. o_A with r = sum_a c_a o_a. Then

    ranks     utilities beta r: `ranking_log_likelihood`
    grades    eta = o_a (with one attribute: eta = s r, s learned where there are ranks to fix the scale):
              `grade_log_likelihood`

Ranks of an observation are one term, every grade is one; each counts by its weight, and a step divides by the sum of
weights once. Pairs alone need nothing of this and never come here: `rmcore.training.losses`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from pydantic import ConfigDict, TypeAdapter
from torch import Tensor, nn
from torch.nn import functional

from rmcore.data.survey import Link, Scale
from rmcore.data.tokenized_observations import Coding
from rmcore.models.observation_batching import ObservationLabels

NONE = -1e30
"""Logarithm of what is not there. Not -inf, whose gradient under logaddexp is NaN."""
FAR = 1e4
"""A threshold that no grade is beyond."""


def ranking_log_likelihood(
    utilities: Tensor, ranks: Tensor, log_tie: Tensor, *, first_only: Tensor, label_smoothing: float = 0.0
) -> Tensor:
    """Log-likelihood of N rankings of up to K answers: Plackett-Luce with ties, of two answers Bradley-Terry.

    A ranking is read from the top: first the best answer, or several that tie for it, is chosen from all; then the next
    from those that are left; and so on. A set T of t answers is chosen from S with probability

        P(T | S) = delta_t exp(mean of u over T) / Z(S),    Z(S) = sum_{k=1..D} delta_k e_k(exp(u / k) over S)

    where e_k is the elementary symmetric polynomial of degree k (the sum over all sets of k answers), delta_1 = 1 and
    the other delta_k, learned, say how readily k answers are called equal. D = 1, no ties, is Plackett-Luce; two
    answers are Davidson's model of ties, and with D = 1 Bradley-Terry: softplus(-(u_1 - u_2)).

    Args:
        utilities: (N, K) in logits, the answers of each ranking sorted best first, then padding.
        ranks: (N, K) long, from 1, not falling; equal ranks are ties; 0 is padding.
        log_tie: (D - 1,) logarithms of delta_2 .. delta_D; no tie is larger than D.
        first_only: (N,) bool: of the ranking only the first choice counts, and it was one of single answers.
        label_smoothing: eps; with probability eps a choice is taken for one among the answers that are left, evenly.
            For two answers that is (1 - eps/2) and eps/2.

    Returns:
        (N,) nats, 0 or less without smoothing.

    Sources: Plackett 1975; Luce 1959; Davidson 1970 (ties of two); Firth, Turner, Kosmidis 2019, arXiv:1909.07123 (ties
    of more, "Davidson-Luce").
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


def thresholds(raw: Tensor) -> Tensor:
    """Turn T free numbers into T rising thresholds: the first, then logarithms of the gaps."""
    return torch.cat([raw[:1], raw[:1] + raw[1:].exp().cumsum(0)])


def free_thresholds(values: Tensor) -> Tensor:
    """Turn T rising thresholds into the T free numbers that `thresholds` makes them of."""
    return torch.cat([values[:1], values.diff().log()])


def grade_log_likelihood(eta: Tensor, codes: Tensor, rising: Tensor, log_sigma: Tensor, link: Link) -> Tensor:
    """Log-likelihood of M grades of one attribute, in nats; a density for real ones.

        binary     P(y = 1) = sigmoid(eta - theta)
        ordinal    P(y <= l) = sigmoid(theta_l - eta), theta_0 < theta_1 < ...: the cumulative link (McCullagh 1980)
        real       y ~ Normal(eta - theta, sigma^2), y standardised over the training grades

    Args:
        eta: (M,) what the model says.
        codes: (M,) see `rmcore.data.survey.Scale.code`.
        rising: (T,) thresholds.
        log_sigma: (1,) logarithm of the standard deviation of real grades.
        link: of the attribute.

    Returns:
        (M,)
    """
    if link == "real":
        residual = (codes - eta + rising) / log_sigma.exp()
        return -0.5 * residual.square() - log_sigma - 0.5 * math.log(2 * math.pi)
    edges = torch.cat([rising.new_full((1,), -FAR), rising, rising.new_full((1,), FAR)])  # (L + 1,)
    level = codes.long()
    below, above = edges[level], edges[level + 1]  # (M,)
    # sigmoid(a) - sigmoid(b) = sigmoid(a) sigmoid(-b) (1 - exp(b - a)), without the cancellation of the difference.
    gap = torch.log(-torch.expm1(below - above))
    return functional.logsigmoid(above - eta) + functional.logsigmoid(eta - below) + gap


def marginal_log_likelihood(codes: Tensor, scale: Scale) -> Tensor:
    """Log-likelihood of M grades for one who knows only how often each is given in training: (M,) nats.

    A standard normal density for real ones.
    """
    if scale.link == "real":
        return -0.5 * codes.square() - 0.5 * math.log(2 * math.pi)
    return codes.new_tensor(scale.shares).log()[codes.long()]


@dataclass(frozen=True)
class Design:
    """Which likelihood a training has: all that is not learned.

    Attributes:
        tie_odds: where log_tie begins, see `rmcore.data.survey.Survey`; one number: no ties.
        scales: of the graded attributes.
        combination: weight of each of them in the reward, where there are two or more; else empty.
        has_choices: whether anything is ranked.
        beta: scale of utilities.
        label_smoothing: of choices.
        reward_penalty: weight of the mean squared reward of an observation.
        margin_penalty: weight of the mean squared margin of ranked answers.
        centering: weight of the squared sum of two rewards of mean size, of ranked answers.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")  # of records

    tie_odds: tuple[float, ...] = (1.0,)
    scales: tuple[Scale, ...] = ()
    combination: tuple[float, ...] = ()
    has_choices: bool = True
    beta: float = 1.0
    label_smoothing: float = 0.0
    reward_penalty: float = 0.0
    margin_penalty: float = 0.0
    centering: float = 0.0

    @property
    def coding(self) -> Coding:
        """How judgements become numbers for it."""
        return Coding(self.scales)


@dataclass(frozen=True)
class Terms:
    """Log-likelihoods of a micro-batch, before weights.

    Attributes:
        choices: (N,) nats, of the ranked observations.
        grades: (M,) nats, of the grades.
    """

    choices: Tensor
    grades: Tensor


class Likelihood(nn.Module):
    """The likelihood of a design, with its parameters.

    Attributes:
        log_tie: (D - 1,) log delta_2 .. delta_D.
        log_scale: (1,) or (0,) log s.
        cuts: for each attribute its free thresholds, see `free_thresholds`.
        log_sigma: (A,) of real grades.
    """

    log_tie: Tensor
    log_scale: Tensor
    log_sigma: Tensor

    def __init__(self, design: Design) -> None:
        super().__init__()
        self.design = design
        self._learn("log_tie", torch.tensor(design.tie_odds[1:]).log())
        self._learn("log_scale", torch.zeros(int(design.has_choices and len(design.scales) == 1)))
        self.cuts = nn.ParameterList(nn.Parameter(_first_cuts(scale)) for scale in design.scales)
        self._learn("log_sigma", torch.zeros(len(design.scales)))

    def _learn(self, name: str, first: Tensor) -> None:
        """Add a parameter; one of no numbers is none, as sharding cannot cut it."""
        if len(first):
            self.register_parameter(name, nn.Parameter(first))
        else:
            self.register_buffer(name, first, persistent=False)

    def forward(self, outputs: Tensor, labels: ObservationLabels) -> tuple[Tensor, Tensor]:
        """Negative log-likelihood, with penalties, and margins to be shown.

        Args:
            outputs: (S, 1) rewards of the sides, or (S, 1 + A) with attributes.
            labels: the judgements.

        Returns:
            0-d weighted sum in nats, float32 or wider: divide by the weights of the step. And (P,) margins of P pairs
            of answers of which one was judged better, better minus worse, by reward or by their attribute.
        """
        if outputs.dtype in (torch.float16, torch.bfloat16):
            outputs = outputs.float()
        terms = self.terms(outputs, labels)
        weights = labels.rank_weights.to(outputs.dtype), labels.grade_weights.to(outputs.dtype)
        loss = -(weights[0] * terms.choices).sum() - (weights[1] * terms.grades).sum()
        # Sharded gradients are reduced over all ranks together, so each parameter has one on every rank, if only 0.
        loss = loss + 0.0 * sum(parameter.sum() for parameter in self.parameters())
        return loss + self._penalties(outputs[:, 0], labels), self._margins(outputs.detach(), labels)

    def terms(self, outputs: Tensor, labels: ObservationLabels) -> Terms:
        """Log-likelihoods by observation and grade; without smoothing where the module is in evaluation mode."""
        return Terms(self._choices(outputs[:, 0], labels), self._grades(outputs, labels))

    def _choices(self, rewards: Tensor, labels: ObservationLabels) -> Tensor:
        if not len(labels.ranks):
            return rewards.new_zeros(0)
        utilities = self.design.beta * rewards  # (S,)
        return ranking_log_likelihood(
            utilities[labels.answers],
            labels.ranks,
            self.log_tie,
            first_only=labels.first_only,
            label_smoothing=self.design.label_smoothing if self.training else 0.0,
        )

    def _grades(self, outputs: Tensor, labels: ObservationLabels) -> Tensor:
        found = outputs.new_zeros(len(labels.codes))
        for number, scale in enumerate(self.design.scales):
            own = torch.nonzero(labels.attributes == number)[:, 0]
            eta = self.eta(outputs, labels.graded[own], number)
            rising, log_sigma = thresholds(self.cuts[number]), self.log_sigma[number, None]
            said = grade_log_likelihood(eta, labels.codes[own].to(eta.dtype), rising, log_sigma, scale.link)
            found = found.index_copy(0, own, said)
        return found

    def eta(self, outputs: Tensor, sides: Tensor, attribute: int) -> Tensor:
        """Take what the model says of an attribute at (M,) places of `outputs`, on the scale of its link: (M,)."""
        said = outputs[sides, self._column(attribute)]
        return self.log_scale.exp() * said if len(self.log_scale) else said

    def _column(self, attribute: int) -> int:
        """Where the outputs have an attribute: behind the reward, or, if it is the only one, the reward itself."""
        return 1 + attribute if self.design.combination else 0

    def _penalties(self, rewards: Tensor, labels: ObservationLabels) -> Tensor:
        design = self.design
        total = rewards.new_zeros(())
        if design.reward_penalty:
            counted = [rewards.new_zeros(0)]
            if len(labels.ranks):
                present = labels.ranks > 0
                squares = (rewards[labels.answers].square() * present).sum(1) / present.sum(1)
                counted.append(labels.rank_weights * squares)
            if len(labels.graded):
                counted.append(labels.grade_weights * rewards[labels.graded].square())
            total = total + design.reward_penalty * torch.cat(counted).sum()
        if len(labels.ranks) and (design.margin_penalty or design.centering):
            present = labels.ranks > 0  # (N, K)
            ranked = rewards[labels.answers] * present
            number, weights = present.sum(1), labels.rank_weights
            mean = ranked.sum(1) / number
            # The mean squared margin over pairs of K answers is 2 K / (K - 1) times their variance.
            variance = ((ranked - mean[:, None] * present).square()).sum(1) / number
            total = total + design.margin_penalty * (weights * 2 * number / (number - 1) * variance).sum()
            total = total + design.centering * (weights * (2 * mean).square()).sum()
        return total

    def _margins(self, outputs: Tensor, labels: ObservationLabels) -> Tensor:
        found = [outputs.new_zeros(0)]
        if len(labels.ranks):
            rewards, ranks = outputs[labels.answers, 0], labels.ranks
            better = (ranks[:, :, None] > 0) & (ranks[:, :, None] < ranks[:, None, :])  # (N, K, K)
            found.append((rewards[:, :, None] - rewards[:, None, :])[better])
        for number in range(len(self.design.scales)):
            own = torch.nonzero(labels.attributes == number)[:, 0]
            eta = outputs[labels.graded[own], self._column(number)]
            codes, prompts = labels.codes[own], labels.prompts[own]
            better = (prompts[:, None] == prompts) & (codes[:, None] > codes)  # (M, M)
            found.append((eta[:, None] - eta)[better])
        return torch.cat(found)


def _first_cuts(scale: Scale) -> Tensor:
    """Thresholds that give each level the share it has in training where the model says 0."""
    if scale.link == "real":
        return torch.zeros(1)
    below = torch.tensor(scale.shares, dtype=torch.float64).cumsum(0)[:-1]
    return free_thresholds(torch.logit(below)).float()


def state_of(likelihood: Likelihood) -> dict[str, Any]:
    """A JSON-ready record of a likelihood: design and parameters."""
    values: dict[str, Sequence[float]] = {
        name: one.detach().cpu().tolist() for name, one in likelihood.named_parameters()
    }
    return {"design": asdict(likelihood.design), "parameters": values}


def likelihood_from(record: Mapping[str, Any]) -> Likelihood:
    """Read a record of `state_of` back, in evaluation mode."""
    likelihood = Likelihood(TypeAdapter(Design).validate_python(record["design"]))
    likelihood.load_state_dict({name: torch.tensor(values) for name, values in record["parameters"].items()})
    return likelihood.eval()
