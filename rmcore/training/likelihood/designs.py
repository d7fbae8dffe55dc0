"""Which likelihood a training needs: from its settings and a survey of its observations."""

from collections.abc import Mapping

from rmcore.config.train import TrainConfig
from rmcore.core.errors import ConfigError, DataError
from rmcore.data.observation import Kind
from rmcore.data.survey import Survey, better_weights, survey
from rmcore.data.tokenized_observations import Observations
from rmcore.training.likelihood.observed import Design


def make_design(
    config: TrainConfig, observations: Observations, attribute_weights: Mapping[str, float] | None
) -> Design:
    """Make the likelihood of these observations.

    Raises:
        ConfigError: a setting is about pairs only, or about something that the observations do not have.
        DataError: the observations say nothing that could be learned.
    """
    found = survey(observations)
    _refuse_settings_of_pairs(config, found)
    _refuse_nothing_to_learn(found)
    weights = better_weights([scale.attribute for scale in found.scales], attribute_weights)
    return Design(
        tie_odds=found.tie_odds,
        scales=found.scales,
        combination=_combination(found, weights),
        has_choices=found.has_choices,
        beta=config.beta,
        label_smoothing=config.label_smoothing,
        reward_penalty=config.regularization_lambda,
        margin_penalty=config.margin_regularization,
        centering=config.centering,
    )


def _refuse_settings_of_pairs(config: TrainConfig, found: Survey) -> None:
    unused = {
        "train.target_margin_scale": config.target_margin_scale is not None,
        "train.batching=plain": config.batching == "plain",
    }
    for name, is_set in unused.items():
        if is_set:
            raise ConfigError(
                f"{name} is made for strict pairs that count once each, and the training data are {_shown(found)}. "
                "Leave it out, or train on the implied pairs alone: train.objective=pairs."
            )


def _shown(found: Survey) -> str:
    kinds = ", ".join(f"{count} of kind {kind}" for kind, count in found.kinds.items())
    return f"{kinds}, {found.num_weighted} with a weight" if found.num_weighted else kinds


def _refuse_nothing_to_learn(found: Survey) -> None:
    if found.scales or any(found.kinds.get(kind, 0) for kind in (Kind.PAIR, Kind.RANKING, Kind.BEST)):
        return
    if found.single_valued:
        raise DataError(
            f"every grade of {', '.join(found.single_valued)} in the training data is the same, and nothing is ranked: "
            "no answer is better than another. Give grades that differ."
        )
    raise DataError(
        f"all {sum(found.kinds.values())} training observations are ties: no answer is better than another, so there "
        "is nothing to learn but that. Give judgements that differ."
    )


def _combination(found: Survey, weights: Mapping[str, float]) -> tuple[float, ...]:
    if len(found.scales) < 2:
        return ()
    if not any(weights.values()):
        named = ", ".join(scale.attribute for scale in found.scales)
        raise ConfigError(
            f"data.attribute_weights gives none of {named} a weight, so the reward would be 0 for every "
            "answer: weight at least one of them."
        )
    return tuple(weights.get(scale.attribute, 0.0) for scale in found.scales)
