"""One likelihood of all kinds of observations, as a sum of nats, with what it has to learn besides the model.

Of a side the model says a reward r and, where attributes are graded, o_1 .. o_A with r = sum_a c_a o_a. Then

    ranks     utilities beta r: `choices`
    grades    eta = o_a (with one attribute: eta = s r, s learned where there are ranks to fix the scale): `grades`

Ranks of an observation are one term, every grade is one; each counts by its weight, and a step divides by the sum of
weights once. Pairs alone need nothing of this and never come here: `rmcore.training.losses`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from pydantic import ConfigDict, TypeAdapter
from torch import Tensor, nn

from rmcore.data.survey import Scale
from rmcore.data.tokenized_observations import Coding
from rmcore.models.observation_batching import ObservationLabels
from rmcore.training.likelihood.choices import ranking_log_likelihood
from rmcore.training.likelihood.grades import free_thresholds, grade_log_likelihood, thresholds


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
        cuts: for each attribute its free thresholds, see `grades.free_thresholds`.
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
