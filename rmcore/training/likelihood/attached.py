"""A likelihood put on a reward model for its training, and kept in the checkpoints that the training writes.

In training it is a part of the model, so optimizer, clipping, sharding and resuming take it along. A checkpoint is the
plain reward model as ever; next to its weights lie `likelihood.json` (what the likelihood is, what it learned) and,
with several attributes, `attributes/`.
"""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor, nn

from rmcore.core.errors import ModelError
from rmcore.core.files import write_json
from rmcore.models.attributes import add_attributes, folded, plain_heads, save_attributes
from rmcore.models.observation_batching import ObservationLabels
from rmcore.models.packing.forward import outputs_of
from rmcore.models.packing.rows import Rows
from rmcore.models.precision import precision_context
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.training.likelihood.observed import Design, Likelihood, likelihood_from, state_of
from rmcore.training.optimizers import LIKELIHOOD_PREFIX
from rmcore.training.step import Forward

LIKELIHOOD_FILE = "likelihood.json"
NAME = LIKELIHOOD_PREFIX.removesuffix(".")


class Attached:
    """The likelihood as a part of the model in training; see `rmcore.models.training_parts.TrainingOnlyModule`."""

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
