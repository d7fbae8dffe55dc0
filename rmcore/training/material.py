"""The material of a training: pairs, or all that was observed with the likelihood of it, which is put on the model.

Which likelihood that is follows from the settings and a survey of the observations (`make_design`). In training it is a
part of the model, so optimizer, clipping, sharding and resuming take it along. A checkpoint is the plain reward model
as ever; next to its weights are `likelihood.json` (what the likelihood is, what it learned) and, with several
attributes, `attributes/`.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rmcore.config.train import TrainConfig
from rmcore.core.errors import ConfigError, DataError, ModelError
from rmcore.core.files import write_json
from rmcore.core.progress import Report, silent
from rmcore.data.observation import Kind
from rmcore.data.rendering import Renderer, TokenizedPair
from rmcore.data.survey import Survey, better_weights, survey
from rmcore.data.tokenized import Pairs, Tokenized, open_tokenized, write_tokenized
from rmcore.data.tokenized_observations import (
    Observations,
    ReadObservations,
    TokenizedObservation,
    open_observations_tokenized,
    write_observations_tokenized,
)
from rmcore.models.attributes import add_attributes, folded, plain_heads, save_attributes
from rmcore.models.observation_batching import ObservationLabels
from rmcore.models.packing.forward import outputs_of
from rmcore.models.packing.layout import Rows
from rmcore.models.precision import precision_context
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.training.likelihood import Design, Likelihood, likelihood_from, state_of
from rmcore.training.optimizers import LIKELIHOOD_PREFIX
from rmcore.training.step import Forward

LIKELIHOOD_FILE = "likelihood.json"
NAME = LIKELIHOOD_PREFIX.removesuffix(".")


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


class Attached:
    """The likelihood as a part of the model in training; see `rmcore.models.reward_model.TrainingOnlyModule`."""

    def __init__(self, design: Design) -> None:
        self.design = design

    def plain_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Leave the likelihood out, and make several attributes one reward."""
        return folded({name: value for name, value in state.items() if not name.startswith(LIKELIHOOD_PREFIX)})

    def plain_form(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside the block `model` has the modules of the plain model."""
        return plain_heads(model)

    def save(self, state: Mapping[str, Tensor], folder: Path) -> None:
        """Write `likelihood.json` and, with several attributes, their rows."""
        likelihood = Likelihood(self.design)
        own = {name: value for name, value in state.items() if name.startswith(LIKELIHOOD_PREFIX)}
        likelihood.load_state_dict({name.removeprefix(LIKELIHOOD_PREFIX): value for name, value in own.items()})
        write_json(folder / LIKELIHOOD_FILE, state_of(likelihood))
        if self.design.combination:
            save_attributes(state, [scale.attribute for scale in self.design.scales], folder)


def attach(rm: BradleyTerryRM, design: Design) -> None:
    """Make the likelihood of a design a part of `rm`, in place, before it is trained or sharded.

    Raises:
        ModelError: there are several attributes, and its head has no linear layer that could have a row for each.
    """
    if design.combination:
        add_attributes(rm.model, design.combination)
    rm.model.add_module(NAME, Likelihood(design).to(rm.device))
    rm.companion = Attached(design)


def make_observation_forward(rm: BradleyTerryRM, precision: str, device: torch.device) -> Forward:
    """The whole computation of one micro-batch of observations as one function."""
    likelihood = rm.model.get_submodule(NAME)

    def forward(rows: Rows, labels: ObservationLabels) -> tuple[Tensor, Tensor]:
        with precision_context(precision, device):
            outputs = outputs_of(rm.model, rows)  # (S, 1) or (S, 1 + A)
        # Outside autocast: the likelihood is computed in float32 whatever the model's precision.
        loss, margins = likelihood(outputs, labels)
        return loss, margins

    return forward


def read_likelihood(folder: Path) -> Likelihood | None:
    """The likelihood that the checkpoint in `folder` was trained with; None where it was trained on pairs alone.

    Raises:
        ModelError: the record is damaged.
    """
    path = folder / LIKELIHOOD_FILE
    if not path.is_file():
        return None
    try:
        return likelihood_from(json.loads(path.read_text()))
    except (ValueError, TypeError, KeyError, RuntimeError, AttributeError) as error:
        raise ModelError(
            f"{path} is damaged ({error}), so held-out judgements cannot be scored; restore it from the folder the "
            "model was trained into."
        ) from error


@dataclass(frozen=True, slots=True)
class Material:
    """Pairs with the Bradley-Terry loss; or, where there is a `design`, observations with that likelihood."""

    train: Pairs | Observations
    design: Design | None = None

    @classmethod
    def choose(
        cls,
        config: TrainConfig,
        pairs: Pairs,
        observations: Observations | None,
        attribute_weights: Mapping[str, float] | None,
    ) -> "Material":
        """Take what the settings want of the training pairs and, where the data say more, all observations.

        Raises:
            ConfigError, DataError: see `rmcore.training.material.make_design`.
        """
        if observations is None:
            return cls(pairs)
        if config.objective == "auto":
            return cls(observations, make_design(config, observations, attribute_weights))
        if not len(pairs):
            raise DataError(
                f"{len(observations)} observations to train on imply no strict pair, and train.objective=pairs "
                "trains on nothing else. Leave it out."
            )
        return cls(pairs)

    def attach_to(self, rm: BradleyTerryRM) -> None:
        """Put the likelihood on the model, where there is one."""
        if self.design is not None:
            attach(rm, self.design)

    def settings(self) -> dict[str, Any]:
        """Give what of it a training shares with the one that it resumes, besides the tokens."""
        return {} if self.design is None else {"likelihood": asdict(self.design)}

    def write(
        self,
        renderer: Renderer,
        folder: Path,
        config: TrainConfig,
        *,
        share: tuple[int, int] = (0, 1),
        report: Report = silent,
    ) -> None:
        """Tokenize this process's share into `folder`; see `rmcore.data.tokenized.write_tokenized`."""
        rest: Any = {"over_length": config.over_length, "share": share, "report": report}
        train: Any = self.train
        if self.design is None:
            write_tokenized(renderer, train, folder, **rest)
        else:
            write_observations_tokenized(renderer, train, folder, self.design.coding, **rest)

    def open(self, folder: Path, *, parts: int = 1) -> Tokenized | ReadObservations:
        """Open what `parts` processes have written.

        Raises:
            DataError: nothing is left that could be trained on.
        """
        if self.design is None:
            return open_tokenized(folder, len(self.train), parts=parts)
        return open_observations_tokenized(folder, len(self.train), parts=parts)


def tokens_of(read: Tokenized | ReadObservations) -> Sequence[TokenizedPair] | Sequence[TokenizedObservation]:
    """The tokenized pairs or observations."""
    return read.pairs if isinstance(read, Tokenized) else read.observations
