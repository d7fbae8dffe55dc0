"""The material of a training: pairs, or all that was observed together with the likelihood of it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rmcore.config.train import TrainConfig
from rmcore.core.errors import DataError
from rmcore.core.progress import Report, silent
from rmcore.data.rendering import Renderer, TokenizedPair
from rmcore.data.tokenized import Pairs, Tokenized, open_tokenized, write_tokenized
from rmcore.data.tokenized_observations import (
    Observations,
    ReadObservations,
    TokenizedObservation,
    open_observations_tokenized,
    write_observations_tokenized,
)
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.training.likelihood.attached import attach
from rmcore.training.likelihood.designs import make_design
from rmcore.training.likelihood.observed import Design


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
            ConfigError, DataError: see `rmcore.training.likelihood.designs.make_design`.
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
