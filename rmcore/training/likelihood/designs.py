"""Which likelihood a training needs: from its settings and a survey of its observations."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rmcore.config.train import TrainConfig
from rmcore.core.errors import ConfigError, DataError
from rmcore.data.observation import Kind, Observation
from rmcore.data.survey import Scale, Survey, better_weights, survey
from rmcore.data.tokenized import Pairs
from rmcore.data.tokenized_observations import Observations
from rmcore.training.likelihood.observed import Design

FEWEST_JUDGED = 5
"""Judgements from which on an annotator has a reliability of their own; the others share the mean."""


@dataclass(frozen=True, slots=True)
class PairsObserved:
    """Pairs as observations, for a likelihood that has more to say of them than which side is better."""

    pairs: Pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __iter__(self) -> Iterator[Observation]:
        return map(Observation.of_pair, self.pairs)


def training_observations(config: TrainConfig, pairs: Pairs, observations: Observations | None) -> Observations | None:
    """The observations that the likelihood is trained on; None: the loss of pairs does, `rmcore.training.losses`."""
    if config.objective == "pairs":
        return None
    if observations is None and config.reliability:
        return PairsObserved(pairs)
    return observations


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
    combination = _combination(config, found, weights)
    return Design(
        tie_odds=found.tie_odds,
        scales=found.scales,
        combination=combination,
        learns_combination=config.combination == "learned",
        has_choices=found.has_choices,
        annotators=_annotators(found) if config.reliability else {},
        offset=config.grade_offset and _has_offsets(found),
        beta=config.beta,
        label_smoothing=config.label_smoothing,
        reward_penalty=config.regularization_lambda,
        margin_penalty=config.margin_regularization,
        centering=config.centering,
    )


def _refuse_settings_of_pairs(config: TrainConfig, found: Survey) -> None:
    unused = {
        "train.target_margin_scale": config.target_margin_scale is not None,
        "the curvature callback": "curvature" in config.callbacks,
        "train.batching=plain": config.batching == "plain",
    }
    for name, is_set in unused.items():
        if is_set:
            raise ConfigError(
                f"{name} is made for strict pairs that count once each, and the training data are {_shown(found)}"
                f"{_asked(config)}. Leave it out, or train on the implied pairs alone: train.objective=pairs."
            )


def _shown(found: Survey) -> str:
    kinds = ", ".join(f"{count} of kind {kind}" for kind, count in found.kinds.items())
    return f"{kinds}, {found.num_weighted} with a weight" if found.num_weighted else kinds


def _asked(config: TrainConfig) -> str:
    return "; train.reliability is set" if config.reliability else ""


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


def _combination(config: TrainConfig, found: Survey, weights: Mapping[str, float]) -> tuple[float, ...]:
    if config.combination == "learned" and not (found.has_choices and len(found.scales) > 1):
        raise ConfigError(
            "train.combination=learned learns what each attribute weighs in the reward from pairs or rankings, and "
            f"the training data has {'no such judgements' if len(found.scales) > 1 else 'no two graded attributes'}. "
            "Leave it out: the weights are then data.attribute_weights."
        )
    if len(found.scales) < 2:
        return ()
    if not any(weights.values()):
        raise ConfigError(
            f"data.attribute_weights gives none of {_named(found.scales)} a weight, so the reward would be 0 for every "
            "answer: weight at least one of them."
        )
    return tuple(weights.get(scale.attribute, 0.0) for scale in found.scales)


def _named(scales: Sequence[Scale]) -> str:
    return ", ".join(scale.attribute for scale in scales)


def _annotators(found: Survey) -> dict[str, float]:
    known = {name: count for name, count in found.annotators.items() if count >= FEWEST_JUDGED}
    if len(known) < 2:
        raise DataError(
            f"train.reliability asks how reliable each annotator is, and {len(known)} of {len(found.annotators)} named "
            f"in the training data judged {FEWEST_JUDGED} times or more. It needs a column `annotator` and at least "
            "two of them; leave train.reliability out."
        )
    return known


def _has_offsets(found: Survey) -> bool:
    """Whether an offset that grades of one prompt share can be told from the answers.

    Raises:
        DataError: none has two grades of one attribute.
    """
    if not found.num_shared:
        raise DataError(
            "train.grade_offset lets the grades of one prompt share an offset, and in the training data no annotator "
            "graded two answers to a prompt: leave it out."
        )
    return True
