"""Several reward models asked at once: their mean, how much they disagree, and a reward that is lower where they do.

Members are checkpoints (other seeds, other data). Disagreement tells most where a policy leaves the data that the
members were trained on: there nothing made them agree. It does not tell where all of them are wrong together, as about
a shortcut that all have learned.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rmcore.config.model import WeightDtype
from rmcore.core.arrays import FloatArray
from rmcore.core.errors import ConfigError
from rmcore.core.progress import Report, silent
from rmcore.data.pair import Prompt, as_rows
from rmcore.ensembles.agreement import Calibration, calibration_of, disagreement
from rmcore.ensembles.members import Members
from rmcore.models.reward_model import BradleyTerryRM


@dataclass(frozen=True, slots=True, eq=False)
class EnsemblePrediction:
    """Rewards of N responses by M members.

    Rewards are in each member's logits before `RewardModelEnsemble.calibrate`, afterwards in standard deviations within
    prompts.
    """

    mean_reward: FloatArray
    """(N,)"""
    std_reward: FloatArray
    """(N,) disagreement: standard deviation over the members, divided by M, not M - 1."""
    individual_rewards: FloatArray
    """(M, N)"""
    is_high_uncertainty: npt.NDArray[np.bool_] | None
    """(N,) whether std_reward exceeds the threshold; None where there is none."""


class RewardModelEnsemble:
    """M reward models as one.

    Example:
        >>> ensemble = RewardModelEnsemble.from_checkpoints(["a/best", "b/best", "c/best"])       # doctest: +SKIP
        >>> ensemble.calibrate(held_out_prompts, held_out_responses)                              # doctest: +SKIP
        >>> ensemble.predict(["What is 2 + 2?"], ["4"]).std_reward                                # doctest: +SKIP
        array([0.21])

    Args:
        models: members in order. Those with one and the same backbone are scored in one pass.
        uncertainty_threshold: disagreement above which a response counts as uncertain, in logits; the default is the
            tutorial's, and `calibrate` replaces it by one that held-out data justify. None: no threshold.

    Raises:
        ConfigError: there are no models.
        ModelError: a model's rewards are not linear in anything; see `rmcore.ensembles.features.head_of`.
    """

    def __init__(self, models: Sequence[BradleyTerryRM], uncertainty_threshold: float | None = 0.5) -> None:
        members = Members()
        for number, model in enumerate(models):
            members.add(model, str(number))
        self._set_up(members, uncertainty_threshold)

    def _set_up(self, members: Members, threshold: float | None) -> None:
        if len(members) == 0:
            raise ConfigError("an ensemble of no models has no rewards; pass at least one, two for disagreement.")
        self.members = members
        self.calibration: Calibration | None = None
        self._threshold = threshold

    @classmethod
    def from_checkpoints(
        cls,
        checkpoints: Sequence[str | Path],
        *,
        device: str = "auto",
        render_fn: str | None = None,
        dtype: WeightDtype = "float32",
        uncertainty_threshold: float | None = None,
    ) -> "RewardModelEnsemble":
        """Load one member a checkpoint; a backbone that is there already, bit for bit, is not kept twice.

        With `dtype="bfloat16"` backbones take half the memory, and rewards are rounded; the heads are exact.

        Raises:
            ModelError, ConfigError: see `BradleyTerryRM.from_pretrained`.
        """
        members = Members()
        for checkpoint in checkpoints:
            rm = BradleyTerryRM.from_pretrained(checkpoint, device=device, render_fn=render_fn, dtype=dtype)
            members.add(rm, str(checkpoint))
        ensemble = cls.__new__(cls)
        ensemble._set_up(members, uncertainty_threshold)
        return ensemble

    def __len__(self) -> int:
        """M."""
        return len(self.members)

    @property
    def uncertainty_threshold(self) -> float | None:
        """Disagreement above which a response counts as uncertain, in the unit of the rewards."""
        return self._threshold if self.calibration is None else self.calibration.threshold

    def individual_rewards(
        self, prompts: Sequence[Prompt], responses: Sequence[str], *, report: Report = silent
    ) -> FloatArray:
        """Rewards of N responses by each member, (M, N), in the unit of `EnsemblePrediction`.

        Raises:
            ModelError: a reward is not finite; the message names the member.
        """
        raw = self.members.rewards(*as_rows(prompts, responses), report=report)
        return raw if self.calibration is None else self.calibration.apply(raw)

    def predict(
        self, prompts: Sequence[Prompt], responses: Sequence[str], *, report: Report = silent
    ) -> EnsemblePrediction:
        """Mean and disagreement of the members on N responses.

        Raises:
            ConfigError: there is one member only.
            ModelError: see `individual_rewards`.
        """
        self._need_several()
        rewards = self.individual_rewards(prompts, responses, report=report)
        spread, threshold = disagreement(rewards), self.uncertainty_threshold
        high = None if threshold is None else spread > threshold
        return EnsemblePrediction(rewards.mean(axis=0), spread, rewards, high)

    def score(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> FloatArray:
        """Return the mean of the members' rewards of N responses, (N,).

        Raises:
            ModelError: see `individual_rewards`.
        """
        return np.asarray(self.individual_rewards(prompts, responses).mean(axis=0))

    def detect_ood(self, prompts: Sequence[Prompt], responses: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Whether the members disagree more on a response than the threshold allows: (N,).

        Raises:
            ConfigError: there is no threshold, or one member only.
            ModelError: see `individual_rewards`.
        """
        self._need_several()
        if self.uncertainty_threshold is None:
            raise ConfigError(
                "this ensemble has no threshold, so it is not known which disagreement is usual; call calibrate with "
                "held-out prompts and responses first, or set uncertainty_threshold."
            )
        found = self.predict(prompts, responses).is_high_uncertainty
        assert found is not None  # noqa: S101 - there is a threshold
        return found

    def calibrate(
        self, prompts: Sequence[Prompt], responses: Sequence[str], share: float = 0.95, *, report: Report = silent
    ) -> EnsemblePrediction:
        """Bring the members to one offset and scale, and set the threshold, from N held-out responses.

        No member may have been trained on them, and they should be like those that are to count as usual. See
        `rmcore.ensembles.agreement` for what is computed and what it promises.

        Args:
            prompts: (N,) several responses a prompt, such as both sides of pairs.
            responses: (N,)
            share: of responses like these that are not flagged.
            report: told of the sides done.

        Returns:
            What the calibrated ensemble says of these responses.

        Raises:
            ConfigError: there is one member only, or too few responses for the share.
            DataError, ModelError: see `rmcore.ensembles.agreement.calibration_of`.
        """
        self._need_several()
        prompts, responses = as_rows(prompts, responses)
        raw = self.members.rewards(prompts, responses, report=report)
        self.calibration = calibration_of(raw, prompts, share, self.members.names)
        rewards = self.calibration.apply(raw)
        spread = disagreement(rewards)
        return EnsemblePrediction(rewards.mean(axis=0), spread, rewards, spread > self.calibration.threshold)

    def _need_several(self) -> None:
        if len(self) < 2:
            raise ConfigError("one model cannot disagree with itself; make the ensemble of at least two.")
