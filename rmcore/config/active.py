"""Settings of the study of what active learning saves."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rmcore.config.base import Settings

AcquisitionName = Literal["random", "entropy", "variance", "bald", "d-optimal"]


class CheckConfig(Settings):
    """Full fine-tuning at a few label counts, to see whether what heads show carries over."""

    acquisitions: tuple[Literal["random", "entropy", "d-optimal"], ...] = ("random", "entropy")
    """Acquisition functions to compare, random first; none that needs disagreement, as one training is one member."""
    num_seeds: int = Field(default=3, ge=1, le=20)
    """Paired repetitions, the first ones of the study."""
    labels: tuple[Annotated[int, Field(ge=2)], ...] = (100, 200, 400)
    """Label counts at which a new model is trained, rising."""
    pool_pairs: int = Field(default=1000, ge=2)
    """Unlabelled pairs to choose from; each round passes them through the model."""
    test_pairs: int = Field(default=500, ge=10)
    """Test pairs of each seed, at most."""

    @model_validator(mode="after")
    def _counts_rise(self) -> Self:
        if len(self.labels) < 2 or sorted(set(self.labels)) != list(self.labels):
            raise ValueError(f"labels: {list(self.labels)} does not rise; name two label counts or more, each larger")
        if self.labels[-1] - self.labels[0] > self.pool_pairs:
            raise ValueError(f"labels: {self.labels[-1] - self.labels[0]} are chosen of pool_pairs={self.pool_pairs}")
        if (
            self.acquisitions[:1] != ("random",)
            or len(set(self.acquisitions)) != len(self.acquisitions)
            or len(self.acquisitions) < 2
        ):
            raise ValueError(
                f"acquisitions: {list(self.acquisitions)}; name random first, then what it is compared with"
            )
        return self


class ActiveConfig(Settings):
    """Label-efficiency curves of acquisition functions: heads on a frozen backbone, retrained at every label count."""

    acquisitions: tuple[AcquisitionName, ...] = ("random", "entropy", "variance", "bald", "d-optimal")
    """Acquisition functions to compare; random has to be among them."""
    num_seeds: int = Field(default=10, ge=1, le=200)
    """Paired repetitions, each with its own pool, seed set, test prompts and labels; below 10 nothing is claimed."""
    noise: tuple[Annotated[float, Field(ge=0, lt=0.5)], ...] = (0.0, 0.1, 0.25)
    """Shares of labels that are turned around; test pairs keep theirs."""
    test_share: float = Field(default=0.25, gt=0, lt=0.9)
    """Share of the prompts that each seed tests on."""
    seed_pairs: int = Field(default=50, ge=2)
    """Pairs labelled at random before anything is chosen."""
    validation_pairs: int = Field(default=50, ge=0)
    """Labelled pairs that choose the heads' penalty in each round; they count as labels. 0: a fixed penalty."""
    pool_pairs: int = Field(default=3000, ge=2)
    """Unlabelled pairs to choose from, at most."""
    growth: float = Field(default=1.3, gt=1, le=4)
    """Labels after a round over labels before it."""
    max_labels: int | None = Field(default=None, ge=4)
    """Where labelling ends. Left out: with the whole pool, so that every target is reached."""
    num_members: int = Field(default=4, ge=2, le=64)
    """Bootstrap heads whose disagreement `variance` and `bald` look at."""
    max_per_prompt: int | None = Field(default=None, ge=1)
    """At most so many pairs of one prompt in a round."""
    targets: tuple[Annotated[float, Field(gt=0, le=1)], ...] = (0.5, 0.7, 0.8, 0.9)
    """Target accuracies, as shares of the way from the seed set's to that of the whole pool's labels."""
    claimed_saving: float = Field(default=0.4, ge=0, lt=1)
    """Saving that is claimed for every acquisition function, at the first noise level."""
    claimed_target: float = 0.8
    """The target at which it is claimed; one of `targets`."""

    check: CheckConfig | None = None
    """Full fine-tuning as a check; left out: none. Trains with the run's own `train` settings."""

    @model_validator(mode="after")
    def _can_be_compared(self) -> Self:
        for name, values in (("acquisitions", self.acquisitions), ("noise", self.noise), ("targets", self.targets)):
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name}: {list(values)} is empty or repeats a value; name each once")
        if "random" not in self.acquisitions:
            raise ValueError("acquisitions: savings are against random choice; add random")
        if self.claimed_target not in self.targets:
            raise ValueError(f"claimed_target: {self.claimed_target} is none of the targets {list(self.targets)}")
        return self
