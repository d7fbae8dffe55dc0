"""The likelihood of observations of all kinds: equal to the pair loss, however it is cut, and what it learns."""

from dataclasses import replace

import pytest
import torch

from rmcore.config.train import TrainConfig
from rmcore.core.errors import ConfigError, DataError
from rmcore.data.observation import Observation
from rmcore.data.rendering import TokenizedSide
from rmcore.data.tokenized_observations import TokenizedObservation
from rmcore.models.observation_batching import label
from rmcore.training.likelihood import Likelihood, likelihood_from, state_of
from rmcore.training.losses import make_bradley_terry
from rmcore.training.material import make_design

KINDS = ("pair", "tie", "ranking", "best", "attributes")
EVERYTHING = {
    "label_smoothing": 0.1, "regularization_lambda": 0.02, "margin_regularization": 0.03, "centering": 0.05,
    "beta": 0.7,
}  # fmt: skip


def coded(observations, design) -> list[TokenizedObservation]:
    """The observations without their texts' tokens, which the likelihood does not see."""
    return [design.coding.judge(one, [TokenizedSide([1], 0)] * len(one.answers)) for one in observations]


def outputs_for(observations, design, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    number = sum(len(one.sides) for one in observations)
    attributes = torch.randn(number, max(1, len(design.combination)), generator=generator, dtype=torch.float64)
    if not design.combination:
        return attributes
    return torch.cat([attributes @ torch.tensor(design.combination, dtype=torch.float64)[:, None], attributes], 1)


def test_pairs_have_the_loss_of_pairs(observations_of) -> None:
    """With all penalties and smoothing, in value and gradient."""
    observations = [replace(one, weight=1.0) for one in observations_of(7, kinds=("pair",))]
    config = TrainConfig(**EVERYTHING)
    design = make_design(config, observations, None)
    tokenized = coded(observations, design)
    outputs = outputs_for(tokenized, design).requires_grad_()
    loss, margins = Likelihood(design).double()(outputs, label(tokenized))
    sides = outputs[:, 0].reshape(-1, 2)
    expected = make_bradley_terry(config)(sides[:, 0], sides[:, 1])
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(margins, (sides[:, 0] - sides[:, 1]).detach())
    found, wanted = (torch.autograd.grad(one, outputs, retain_graph=True)[0] for one in (loss, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_any_cut_into_micro_batches_sums_to_the_same(observations_of) -> None:
    observations = observations_of(40, kinds=KINDS)
    design = make_design(TrainConfig(**EVERYTHING), observations, None)
    tokenized = coded(observations, design)
    likelihood = Likelihood(design).double()
    outputs = outputs_for(tokenized, design)
    whole, margins = likelihood(outputs, label(tokenized))
    gradient = torch.autograd.grad(whole, likelihood.parameters(), allow_unused=True)
    parts, seen, start = [], [], 0
    for cut in (range(0, 1), range(1, 12), range(12, 40)):
        some = [tokenized[at] for at in cut]
        end = start + sum(len(one.sides) for one in some)
        loss, own = likelihood(outputs[start:end], label(some))
        parts.append(loss)
        seen.append(own)
        start = end
    torch.testing.assert_close(sum(parts), whole, rtol=1e-12, atol=1e-12)
    assert sorted(torch.cat(seen).tolist()) == pytest.approx(sorted(margins.tolist()))
    again = torch.autograd.grad(sum(parts), likelihood.parameters(), allow_unused=True)
    for one, other in zip(gradient, again, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_a_weight_of_two_is_the_observation_twice(observations_of) -> None:
    observations = observations_of(10, kinds=KINDS)
    design = make_design(TrainConfig(**EVERYTHING), observations, None)
    likelihood = Likelihood(design).double().eval()
    for one in coded(observations, design):
        twice = [replace(one, weight=1.0)] * 2
        outputs = outputs_for(twice[:1], design)
        doubled, _ = likelihood(outputs, label([replace(one, weight=2.0)]))
        repeated, _ = likelihood(torch.cat([outputs, outputs]), label(twice))
        torch.testing.assert_close(doubled, repeated, rtol=1e-12, atol=1e-12)


def test_a_record_comes_back(observations_of) -> None:
    design = make_design(TrainConfig(), observations_of(40, kinds=KINDS), {"helpfulness": 1.0, "safe": 0.5})
    likelihood = Likelihood(design)
    with torch.no_grad():
        for parameter in likelihood.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    read = likelihood_from(state_of(likelihood))
    assert read.design == design
    for (name, one), (other_name, other) in zip(likelihood.named_parameters(), read.named_parameters(), strict=True):
        assert name == other_name
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    record = state_of(likelihood)
    with pytest.raises(ValueError, match="offest"):
        likelihood_from(record | {"design": record["design"] | {"offest": True}})


def graded(value: float, attribute: str = "overall") -> Observation:
    return Observation(f"prompt {value}", ("one", "two"), grades={attribute: (value, value)})


@pytest.mark.parametrize(
    ("settings", "kinds", "error", "said"),
    [
        ({}, ("tie",), DataError, "all 8 training observations are ties"),
        ({"target_margin_scale": 1.0}, ("ranking",), ConfigError, "target_margin_scale"),
    ],
)
def test_what_cannot_be_learned_is_named(observations_of, settings, kinds, error, said) -> None:
    with pytest.raises(error, match=said):
        make_design(TrainConfig(**settings), observations_of(8, kinds=kinds), None)


def test_grades_of_one_value_are_named() -> None:
    with pytest.raises(DataError, match="every grade of overall"):
        make_design(TrainConfig(), [graded(3.0), graded(3.0)], None)


def test_weights_of_no_attribute_are_refused(observations_of) -> None:
    with pytest.raises(ConfigError, match="gives none of"):
        make_design(TrainConfig(), observations_of(8, kinds=("attributes",)), {"humour": 1.0})
