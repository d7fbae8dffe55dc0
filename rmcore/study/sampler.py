"""Optuna's TPE sampler without a random state of its own: what is drawn depends on study, trial and history alone."""

import hashlib
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from optuna.distributions import BaseDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState

if TYPE_CHECKING:
    from optuna.study import Study

STARTUP_TRIALS = 8
"""Trials that are drawn at random before the model of good values has a say; the defaults are the first of them."""


class ReproducibleSampler(BaseSampler):
    """Draws for each trial with a sampler of its own, seeded by (study seed, trial number).

    A sampler that draws on from where it was would give a resumed study other trials than an uninterrupted one.

    Args:
        seed: of the study.
        parallel: whether several trials run at once, so that what runs must be kept away from.
        random: draw at random instead, for comparison.
    """

    def __init__(self, seed: int, *, parallel: bool = False, random: bool = False) -> None:
        self.seed, self.parallel, self.random = seed, parallel, random

    def _of(self, trial: FrozenTrial, name: str = "") -> BaseSampler:
        text = f"{self.seed} {trial.number} {name}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
        if self.random:
            return RandomSampler(seed=seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)  # multivariate and group are old, and called so still
            return TPESampler(
                seed=seed,
                n_startup_trials=STARTUP_TRIALS,
                multivariate=True,
                group=True,
                constant_liar=self.parallel,
            )

    def infer_relative_search_space(self, study: "Study", trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Find the settings that are drawn together: those that earlier trials have in common."""
        return self._of(trial).infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: "Study", trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Draw those settings."""
        sampler = self._of(trial)
        sampler.infer_relative_search_space(study, trial)  # by which it knows the groups that it draws from
        return sampler.sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: "Study", trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Draw a setting that no earlier trials have in common, by itself."""
        return self._of(trial, param_name).sample_independent(study, trial, param_name, param_distribution)

    def after_trial(
        self, study: "Study", trial: FrozenTrial, state: TrialState, values: Sequence[float] | None
    ) -> None:
        """Nothing is remembered beside the trials."""
