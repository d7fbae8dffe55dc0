"""Several reward models asked at once: their mean, how much they disagree, and a reward that is lower where they do.

Members are checkpoints (other seeds, other data). Disagreement tells most where a policy leaves the data that the
members were trained on: there nothing made them agree. It does not tell where all of them are wrong together, as about
a shortcut that all have learned.

Bradley-Terry fixes neither a reward's offset nor how it compares between models, and a longer training gives larger
rewards. So on held-out data each member is centred by its mean and divided by its standard deviation within prompts
(`calibration_of`): shifting or stretching a member changes nothing then.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rmcore.config.model import WeightDtype
from rmcore.core.arrays import FloatArray
from rmcore.core.errors import ConfigError, DataError, ModelError
from rmcore.core.progress import Report, counting_on, silent
from rmcore.data.pair import PreferencePair, Prompt, as_rows, prompt_key
from rmcore.data.rendering import TokenizedSide
from rmcore.ensembles.features import features, head_of
from rmcore.ensembles.score import readable_pairs
from rmcore.models.reward_model import BradleyTerryRM


@dataclass(eq=False)
class SharedBackbone:
    """One backbone with the heads of its m members."""

    rm: BradleyTerryRM
    names: list[str] = field(default_factory=list)
    heads: list[FloatArray] = field(default_factory=list)
    """m times (D,)"""
    biases: list[float] = field(default_factory=list)
    betas: list[float] = field(default_factory=list)
    """Scale of each member's margins: P(first preferred) = sigmoid(beta * margin)."""

    def rewards(self, sides: Sequence[TokenizedSide], report: Report) -> FloatArray:
        """Rewards of N sides by each member, from one pass: (m, N)."""
        states = features(self.rm, sides, report=report).astype(np.float64)
        return np.stack(self.heads) @ states.T + np.array(self.biases)[:, None]


class Members:
    """M reward models in order, held as few backbones as there are different ones."""

    def __init__(self) -> None:
        self.backbones: list[SharedBackbone] = []
        self._order: list[tuple[int, int]] = []

    def add(self, rm: BradleyTerryRM, name: str) -> None:
        """Take one more member. Of one whose backbone is there already only the head is kept.

        Raises:
            ModelError: see `rmcore.ensembles.features.head_of`.
        """
        head = head_of(rm)
        shared = next((backbone for backbone in self.backbones if _same_but_head(backbone.rm, rm)), None)
        if shared is None:
            shared = SharedBackbone(rm)
            self.backbones.append(shared)
        shared.names.append(name)
        shared.heads.append(head.weight.detach()[0].double().cpu().numpy())
        shared.biases.append(0.0 if head.bias is None else float(head.bias.detach()[0].double()))
        shared.betas.append(rm.beta)
        self._order.append((self.backbones.index(shared), len(shared.names) - 1))

    def __len__(self) -> int:
        return len(self._order)

    @property
    def names(self) -> list[str]:
        """Names of the M members, for messages."""
        return [self.backbones[which].names[number] for which, number in self._order]

    def readable(self, pairs: Sequence[PreferencePair]) -> list[PreferencePair]:
        """The pairs that every member can read; the others are counted and said on stderr.

        Raises:
            DataError: there are pairs, and none can be read.
        """
        kept = list(pairs)
        for shared in self.backbones:
            kept = readable_pairs(shared.rm, kept)
        return kept

    def rewards(self, prompts: Sequence[Prompt], responses: Sequence[str], *, report: Report = silent) -> FloatArray:
        """Raw rewards of N responses by each member: (M, N), in logits.

        Args:
            prompts: (N,)
            responses: (N,)
            report: told of the sides done, over all backbones.

        Raises:
            DataError: a response cannot be read; `readable` leaves such pairs out.
            ModelError: a reward is not finite; the message names the member.
            ValueError: the lists differ in length.
        """
        requests = list(zip(prompts, responses, strict=True))
        by_backbone = []
        for number, shared in enumerate(self.backbones):
            sides = shared.rm.renderer.tokenize_sides(requests)
            counted = counting_on(report, number, len(self.backbones))
            by_backbone.append(shared.rewards(sides, counted) if sides else np.zeros((len(shared.names), 0)))
        rewards = np.stack([by_backbone[which][number] for which, number in self._order])
        for name, row in zip(self.names, rewards, strict=True):
            bad = int((~np.isfinite(row)).sum())
            if bad:
                raise ModelError(
                    f"{bad} of {len(row)} rewards of member {name} are not finite: it diverged, or its weights are "
                    "damaged. Leave it out, or train it again."
                )
        return rewards


def _same_but_head(a: BradleyTerryRM, b: BradleyTerryRM) -> bool:
    """Whether both read text alike and all their tensors but the head's last layer are equal bit for bit."""
    if a.renderer.rendering != b.renderer.rendering or _text_rules(a) != _text_rules(b):
        return False
    if _architecture(a) != _architecture(b):
        return False
    ours, theirs = _tensors_but_head(a), _tensors_but_head(b)
    return ours.keys() == theirs.keys() and all(
        tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name].to(tensor.device))
        for name, tensor in ours.items()
    )


def _text_rules(rm: BradleyTerryRM) -> tuple[Any, ...]:
    """Gather what makes tokens of a text, to compare two models by: the tokenizer's rules, its template, its pad."""
    tokenizer = rm.tokenizer
    # A slow tokenizer has no text form of its rules; then only the very same object counts as equal.
    rules = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else id(tokenizer)
    return (rules, tokenizer.chat_template, tokenizer.pad_token_id)


def _architecture(rm: BradleyTerryRM) -> dict[str, Any]:
    """The class and the configuration, which decide what is made of the weights, without where they came from."""
    plain: Any = rm.model.get_base_model() if rm.has_adapters else rm.model
    config = plain.config.to_dict()
    known = {key: value for key, value in config.items() if not key.startswith("_") and key != "transformers_version"}
    return {"class": type(plain).__name__, **known}


def _tensors_but_head(rm: BradleyTerryRM) -> dict[str, Tensor]:
    model: nn.Module = rm.model
    of_head = {tensor.data_ptr() for tensor in head_of(rm).parameters()}
    return {name: tensor for name, tensor in model.state_dict().items() if tensor.data_ptr() not in of_head}


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """Offset and scale of M members, and the threshold of their disagreement, from held-out responses.

    offsets, scales: (M,) mean reward, and standard deviation within prompts, of each member's rewards, in its logits.
    threshold: disagreement above which a response counts as unlike the held-out ones, in standard deviations within
        prompts.
    """

    offsets: FloatArray
    scales: FloatArray
    threshold: float = math.inf

    def apply(self, rewards: FloatArray) -> FloatArray:
        """Rewards (M, N) of the members in standard deviations within prompts."""
        return (rewards - self.offsets[:, None]) / self.scales[:, None]


def calibration_of(rewards: FloatArray, prompts: Sequence[Prompt], share: float, names: Sequence[str]) -> Calibration:
    """Fit a `Calibration` to raw rewards (M, N) of responses to N prompts.

    The threshold is the ceil((N + 1) share)-th smallest disagreement, as in split conformal prediction: of new
    responses exchangeable with these at most 1 - share exceed it on average, whatever the distribution. Two things
    make that approximate. Offsets and scales, 2 M numbers, are fitted on the same responses. Responses to one prompt
    are not exchangeable with those to another, so the share varies between samples as for fewer responses than N.

    Raises:
        ConfigError: share is not between 0 and 1, or there are too few responses for it.
        DataError: no prompt has two responses, so nothing varies within prompts.
        ModelError: a member gives all responses to a prompt the same reward; the message names it.
    Source:
        Vovk, Gammerman and Shafer 2005, Algorithmic learning in a random world; Angelopoulos and Bates 2021,
        arXiv:2107.07511, section 1.
    """
    num = rewards.shape[1]
    rank = conformal_rank(num, share)
    ids = np.array([prompt_key(prompt) for prompt in prompts])
    different, prompt = np.unique(ids, return_inverse=True)
    if num == len(different):
        raise DataError(
            f"{num} responses to as many prompts: no prompt has two, so nobody knows how much rewards vary within a "
            "prompt. Calibrate on pairs, or on several responses to each prompt."
        )
    scales = np.array([_spread_within(row, prompt) for row in rewards])
    for name, scale, row in zip(names, scales, rewards, strict=True):
        if scale <= 1e-9 * (1 + np.abs(row).max()):
            raise ModelError(
                f"member {name} gives all responses to a prompt the same reward, so its scale is zero; leave it out."
            )
    calibration = Calibration(rewards.mean(axis=1), scales)
    spread = np.sort(disagreement(calibration.apply(rewards)))
    return replace(calibration, threshold=float(spread[rank - 1]))


def conformal_rank(num: int, share: float) -> int:
    """Which order statistic of `num` scores, from 1, a new exchangeable one stays below with probability >= share.

    Raises:
        ConfigError: share is not between 0 and 1, or `num` scores cannot bound it.
    """
    if not 0 < share < 1:
        raise ConfigError(
            f"share={share}: the share of responses that are not flagged lies between 0 and 1; 0.95 is usual."
        )
    rank = math.ceil((num + 1) * share - 1e-9)  # 20 x 0.95 is 19, whatever its rounding
    if rank > num:
        raise ConfigError(
            f"{num} responses cannot give a threshold that {share:.0%} of new ones stay below; calibrate on at least "
            f"{math.ceil(share / (1 - share) - 1e-9)}, or lower share."
        )
    return rank


def disagreement(rewards: FloatArray) -> FloatArray:
    """Standard deviation over M members, (M, N) -> (N,); the population's, so its square is that of UWO."""
    return rewards.std(axis=0)


def _spread_within(rewards: FloatArray, prompt: npt.NDArray[np.int64]) -> float:
    """Pooled standard deviation within prompts, with one degree of freedom less for each prompt."""
    counts = np.bincount(prompt)
    centred = rewards - (np.bincount(prompt, rewards) / counts)[prompt]
    return math.sqrt(float(centred @ centred) / (len(rewards) - len(counts)))


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
        names: of the members, for messages; their numbers where left out.

    Raises:
        ConfigError: there are no models.
        ModelError: a model's rewards are not linear in anything; see `rmcore.ensembles.features.head_of`.
    """

    def __init__(
        self,
        models: Iterable[BradleyTerryRM],
        uncertainty_threshold: float | None = 0.5,
        *,
        names: Sequence[str] | None = None,
    ) -> None:
        self.members = Members()
        for number, model in enumerate(models):
            self.members.add(model, str(number) if names is None else names[number])
        if len(self.members) == 0:
            raise ConfigError("an ensemble of no models has no rewards; pass at least one, two for disagreement.")
        self.calibration: Calibration | None = None
        self._threshold = uncertainty_threshold

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
        models = (  # one after the other: of those that share a backbone only the first one's is kept
            BradleyTerryRM.from_pretrained(checkpoint, device=device, render_fn=render_fn, dtype=dtype)
            for checkpoint in checkpoints
        )
        return cls(models, uncertainty_threshold, names=[*map(str, checkpoints)])

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
        return self._predicted(self.individual_rewards(prompts, responses, report=report))

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
        return disagreement(self.individual_rewards(prompts, responses)) > self.uncertainty_threshold

    def calibrate(
        self, prompts: Sequence[Prompt], responses: Sequence[str], share: float = 0.95, *, report: Report = silent
    ) -> EnsemblePrediction:
        """Bring the members to one offset and scale, and set the threshold, from N held-out responses.

        No member may have been trained on them, and they should be like those that are to count as usual. See
        `calibration_of` for what is computed and what it promises.

        Args:
            prompts: (N,) several responses a prompt, such as both sides of pairs.
            responses: (N,)
            share: of responses like these that are not flagged.
            report: told of the sides done.

        Returns:
            What the calibrated ensemble says of these responses.

        Raises:
            ConfigError: there is one member only, or too few responses for the share.
            DataError, ModelError: see `calibration_of`.
        """
        self._need_several()
        prompts, responses = as_rows(prompts, responses)
        raw = self.members.rewards(prompts, responses, report=report)
        self.calibration = calibration_of(raw, prompts, share, self.members.names)
        return self._predicted(self.calibration.apply(raw))

    def _predicted(self, rewards: FloatArray) -> EnsemblePrediction:
        spread, threshold = disagreement(rewards), self.uncertainty_threshold
        high = None if threshold is None else spread > threshold
        return EnsemblePrediction(rewards.mean(axis=0), spread, rewards, high)

    def _need_several(self) -> None:
        if len(self) < 2:
            raise ConfigError("one model cannot disagree with itself; make the ensemble of at least two.")
