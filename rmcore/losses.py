"""The Bradley-Terry loss, as sums.

A mean per micro-batch weights pairs unequally once micro-batches differ in size (a lone pair in a 1 + 5 split gets
three times its share). So everything here is a sum over pairs; the trainer divides once, by the pairs of the step.
"""

import torch
from torch import Tensor
from torch.nn import functional


def split_rewards(rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Cut the rewards of one micro-batch into its chosen and rejected sides.

    Args:
        rewards: (R,) or (R, 1) rewards of R = 2P rows, the P chosen rows first.

    Returns:
        Two (P,) tensors in float32 or wider.

    Raises:
        ValueError: R is odd, or the model gave more than one number a row.
    """
    if rewards.ndim == 2 and rewards.shape[1] == 1:
        rewards = rewards[:, 0]
    if rewards.ndim != 1:
        raise ValueError(
            f"split_rewards got rewards of shape {tuple(rewards.shape)}, not one number a row: "
            "a reward model has exactly one label."
        )
    if len(rewards) % 2:
        raise ValueError(
            f"split_rewards got {len(rewards)} rewards, an odd number: a pair was cut in two. "
            "Build micro-batches with rmcore.batching.pack_pairs, which never separates a pair."
        )
    if rewards.dtype in (torch.float16, torch.bfloat16):
        rewards = rewards.float()
    half = len(rewards) // 2
    return rewards[:half], rewards[half:]


def bradley_terry_loss_sum(
    reward_chosen: Tensor, reward_rejected: Tensor, *, beta: float = 1.0, label_smoothing: float = 0.0
) -> Tensor:
    """Summed Bradley-Terry negative log-likelihood of P preference pairs.

    sum_p (1 - eps/2) softplus(-beta m_p) + (eps/2) softplus(beta m_p),  m_p = reward_chosen[p] - reward_rejected[p]

    Args:
        reward_chosen: (P,) rewards of the chosen sides, in logits: a margin of 1.0 multiplies the preference odds by e.
        reward_rejected: (P,) rewards of the rejected sides.
        beta: scale of the margin.
        label_smoothing: eps; the chosen side's target becomes 1 - eps/2.

    Returns:
        0-d sum in nats, float32 or wider. Divide by the pairs of the whole step, not of this micro-batch.

    Raises:
        ValueError: lengths differ, or an argument is (P, 1), which would broadcast silently to P x P.

    Source:
        Bradley & Terry 1952; Ouyang et al. 2022, arXiv:2203.02155, equation 1. Smoothing: Szegedy et al. 2016,
        arXiv:1512.00567, for two classes.
    """
    if reward_chosen.ndim != 1 or reward_chosen.shape != reward_rejected.shape:
        raise ValueError(
            f"reward_chosen is {tuple(reward_chosen.shape)} and reward_rejected {tuple(reward_rejected.shape)}; "
            "both must be (P,), one reward a side."
        )
    margin = beta * (reward_chosen - reward_rejected)
    smoothed = label_smoothing / 2
    loss = (1 - smoothed) * functional.softplus(-margin)
    if smoothed:
        loss = loss + smoothed * functional.softplus(margin)
    return loss.sum()


def reward_penalty_sum(reward_chosen: Tensor, reward_rejected: Tensor) -> Tensor:
    """Sum over pairs of the mean squared reward of the two sides, (r_c^2 + r_r^2) / 2.

    Added, with a small weight, to the loss. Bradley-Terry leaves a constant per prompt free; this holds rewards near
    zero without a preference for either side.
    """
    return ((reward_chosen.square() + reward_rejected.square()) / 2).sum()
