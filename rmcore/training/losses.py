"""The pair loss: Bradley-Terry with smoothing, target margins and penalties, as sums.

A mean per micro-batch weights pairs unequally once micro-batches differ in size (a lone pair in a 1 + 5 split gets
three times its share). So every function here returns a sum over pairs, and the trainer divides it once, by the number
of pairs of the whole step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rmcore.config.train import TrainConfig

TARGET_MARGIN_CAP = 3.0
"""Largest margin that annotations require, in logits. AlpacaEval's reach 26, a size that no gap in rewards should have;
at 3 a pair is right 95 times in 100."""


def split_rewards(rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Split the rewards of one micro-batch into those of the chosen and of the rejected sides.

    Args:
        rewards: (R,) or (R, 1) rewards of R = 2P rows, the P chosen rows first.

    Returns:
        Two (P,) tensors in float32 or wider.

    Raises:
        ValueError: R is odd, or the model returned more than one number per row.
    """
    if rewards.ndim == 2 and rewards.shape[1] == 1:
        rewards = rewards[:, 0]  # (R, 1) -> (R,)
    if rewards.ndim != 1:
        raise ValueError(
            f"split_rewards got rewards of shape {tuple(rewards.shape)}, not one number per row: "
            "a reward model has exactly one label."
        )
    if len(rewards) % 2:
        raise ValueError(
            f"split_rewards got {len(rewards)} rewards, an odd number: a pair was cut in two. "
            "Build micro-batches with rmcore.models.batching.pack_pairs, which never separates a pair."
        )
    # bfloat16 has 8 significant bits: margins would be rounded again, and a sum over many pairs would stop growing.
    if rewards.dtype in (torch.float16, torch.bfloat16):
        rewards = rewards.float()
    half = len(rewards) // 2
    return rewards[:half], rewards[half:]  # (P,), (P,)


def bradley_terry_loss_sum(
    reward_chosen: Tensor,
    reward_rejected: Tensor,
    *,
    beta: float = 1.0,
    label_smoothing: float = 0.0,
    target_margins: Tensor | None = None,
) -> Tensor:
    """Return the summed Bradley-Terry negative log-likelihood of P preference pairs.

    sum_p (1 - eps/2) softplus(-beta x_p) + (eps/2) softplus(beta x_p),
    x_p = reward_chosen[p] - reward_rejected[p] - target_margins[p]

    Args:
        reward_chosen: (P,) rewards of the chosen sides, in logits: a margin of 1.0 multiplies the preference odds by e.
        reward_rejected: (P,) rewards of the rejected sides.
        beta: scale of the margin.
        label_smoothing: eps; the chosen side's target becomes 1 - eps/2.
        target_margins: (P,) required margins, in logits; None requires none.

    Returns:
        0-d sum in nats, float32 or wider. Divide by the pairs of the whole step, not of this micro-batch.

    Raises:
        ValueError: lengths differ, or an argument is (P, 1), which would broadcast silently to P x P.

    Source:
        Bradley & Terry 1952; Ouyang et al. 2022, arXiv:2203.02155, equation 1. Smoothing: Szegedy et al. 2016,
        arXiv:1512.00567, for two classes. Target margins: Touvron et al. 2023, arXiv:2307.09288, equation 2.
    """
    if reward_chosen.ndim != 1 or reward_chosen.shape != reward_rejected.shape:
        raise ValueError(
            f"reward_chosen is {tuple(reward_chosen.shape)} and reward_rejected {tuple(reward_rejected.shape)}; "
            "both must be (P,), one reward per side."
        )
    margin = reward_chosen - reward_rejected  # (P,)
    if target_margins is not None:
        if target_margins.shape != margin.shape:
            raise ValueError(
                f"target_margins is {tuple(target_margins.shape)} for {len(margin)} pairs; it must be (P,), one number "
                "per pair, NaN where none was annotated."
            )
        margin = margin - target_margins  # before beta: both are in logits, and beta scales their difference
    margin = beta * margin
    smoothed = label_smoothing / 2
    # softplus(-m) is -log sigmoid(m) without the overflow of exp and without log(0) at large |m|.
    loss = (1 - smoothed) * functional.softplus(-margin)  # (P,)
    if smoothed:
        loss = loss + smoothed * functional.softplus(margin)
    return loss.sum()


def reward_penalty_sum(reward_chosen: Tensor, reward_rejected: Tensor) -> Tensor:
    """Return the sum over pairs of the mean squared reward of both sides, (r_c^2 + r_r^2) / 2.

    The Bradley-Terry loss does not change when a constant is added to all rewards of a prompt. With a small weight this
    penalty keeps rewards near zero without a preference for either side.
    """
    return ((reward_chosen.square() + reward_rejected.square()) / 2).sum()


@dataclass(frozen=True, slots=True)
class PairLoss:
    """The training loss of P pairs: the Bradley-Terry loss and penalties. A penalty of weight zero is not computed.

    sum_p BT(beta (m_p - mu_p); label_smoothing)
        + regularization_lambda (r_c^2 + r_r^2) / 2 + margin_regularization m_p^2 + centering (r_c + r_r)^2

    with m = r_c - r_r and mu = clamp(target_margin_scale * annotated margin, -cap, cap), 0 where none is annotated.

    Source:
        mu: Touvron et al. 2023, arXiv:2307.09288, equation 2. Centring: Eisenstein et al. 2023, arXiv:2312.09244.
    """

    beta: float = 1.0
    label_smoothing: float = 0.0
    regularization_lambda: float = 0.0
    margin_regularization: float = 0.0
    centering: float = 0.0
    target_margin_scale: float | None = None
    """Required logits per unit of annotated margin; None ignores annotated margins."""
    target_margin_cap: float = TARGET_MARGIN_CAP
    """Largest |mu|, in logits."""

    def __call__(self, reward_chosen: Tensor, reward_rejected: Tensor, target_margins: Tensor | None = None) -> Tensor:
        """Sum the loss over pairs.

        Args:
            reward_chosen: (P,) rewards in logits.
            reward_rejected: (P,) rewards in logits.
            target_margins: (P,) annotated preference strengths in units of the data set, NaN where not annotated. Read
                only if `target_margin_scale` is set.

        Returns:
            0-d sum, float32 or wider; divide by the number of pairs of the whole step.

        Raises:
            ValueError: shapes differ, or `target_margin_scale` is set and no margins are given.
        """
        loss = bradley_terry_loss_sum(
            reward_chosen,
            reward_rejected,
            beta=self.beta,
            label_smoothing=self.label_smoothing,
            target_margins=self._required_margins(target_margins),
        )
        if self.regularization_lambda:
            loss = loss + self.regularization_lambda * reward_penalty_sum(reward_chosen, reward_rejected)
        if self.margin_regularization:
            loss = loss + self.margin_regularization * (reward_chosen - reward_rejected).square().sum()
        if self.centering:
            loss = loss + self.centering * (reward_chosen + reward_rejected).square().sum()
        return loss

    def _required_margins(self, annotated: Tensor | None) -> Tensor | None:
        if self.target_margin_scale is None:
            return None
        if annotated is None:
            raise ValueError(
                f"target_margin_scale={self.target_margin_scale:g} needs annotated margins, and the loss got no "
                "target_margins. Pass them (NaN where a pair has none), or leave the scale out."
            )
        # NaN * 0 is NaN, so missing annotations become 0 before the multiplication.
        scaled = self.target_margin_scale * annotated.nan_to_num(nan=0.0)  # (P,)
        return scaled.clamp(-self.target_margin_cap, self.target_margin_cap)


def make_bradley_terry(config: TrainConfig) -> PairLoss:
    """Return the loss that the settings describe."""
    return PairLoss(
        beta=config.beta,
        label_smoothing=config.label_smoothing,
        regularization_lambda=config.regularization_lambda,
        margin_regularization=config.margin_regularization,
        centering=config.centering,
        target_margin_scale=config.target_margin_scale,
    )
