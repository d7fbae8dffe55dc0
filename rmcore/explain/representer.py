"""The margin of a pair as a sum over training pairs, exactly: representer points of the reward head (Yeh et al. 2018).

At the optimum h of a head fitted on frozen features, sum_i l'_i x_i + l2 S^2 h = 0 with the differences x of features
and their scales S, so every margin is

    h x_t = sum_i (-l'_i / l2) x_t S^-2 x_i.                                         (arXiv 1811.09720, equation 3)

That is a statement about the refitted head. A model that was trained whole has another head, and features that its
training pairs have made: how far the two agree on held-out pairs is measured, so that a reader knows what the sum says
of their model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rmcore.core.arrays import FloatArray
from rmcore.core.errors import DataError
from rmcore.core.progress import Report, silent
from rmcore.data.pair import PreferencePair
from rmcore.ensembles.features import head_of, pair_features
from rmcore.ensembles.linear_probes import fit_head
from rmcore.explain.influence import FEWEST_HELD_OUT
from rmcore.explain.linearized import MarginLoss, correlation
from rmcore.models.reward_model import BradleyTerryRM

PENALTIES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Penalties of the head that are tried, as multiples of `fit_head`'s own."""


@dataclass(frozen=True)
class Representers:
    """Terms of N training pairs in the margins of T targets, under a head refitted on those pairs.

    Attributes:
        effect: (T, N) logits; the term of each training pair in the target's margin. Positive: it speaks for the
            chosen side. A row adds up to `margins`.
        margins: (T,) logits; of the refitted head.
        model_margins: (T,) logits; of the model itself.
        train_margins: (N,) logits; the same of the training pairs.
        held_out_correlation: of the refitted head's margins of held-out pairs with the model's own. Near 1: the sum is
            about this model.
        held_out_error: mean squared difference of the two, as a share of the mean square of the model's own margins;
            the penalty is the one of those tried that makes it smallest.
        num_held_out: pairs that the last two are over.
        l2: the penalty.
    """

    effect: FloatArray
    margins: FloatArray
    model_margins: FloatArray
    train_margins: FloatArray
    held_out_correlation: float
    held_out_error: float
    num_held_out: int
    l2: float


def representers(
    rm: BradleyTerryRM,
    train: Sequence[PreferencePair],
    targets: Sequence[PreferencePair],
    held_out: Sequence[PreferencePair],
    *,
    label_smoothing: float = 0.0,
    report: Report = silent,
) -> Representers:
    """Decompose the margins of the targets under a head refitted on the features of the training pairs.

    Costs one pass through the backbone for every pair.

    Args:
        rm: the trained model; left as it was found.
        train: N pairs it was trained on.
        targets: T pairs whose margins are decomposed.
        held_out: pairs it was not trained on, on which the refitted head is compared with the model.
        label_smoothing: eps of the training's loss; its beta is the model's.
        report: told of the sides done.

    Raises:
        DataError: there is no training pair or target, too few held-out pairs, or a pair cannot be read.
        ModelError: rewards are not linear in the features, or the fit did not converge.
    """
    if not train or not targets or len(held_out) < FEWEST_HELD_OUT:
        raise DataError(
            f"got {len(train)} training pairs, {len(targets)} targets and {len(held_out)} held-out pairs: a margin is "
            f"decomposed over the first, and takes {FEWEST_HELD_OUT} of the third at least to compare the refitted "
            "head with the model. Give pairs of each kind."
        )
    chosen, rejected = pair_features(rm, [*train, *held_out, *targets], report=report)
    differences = chosen - rejected  # (N + V + T, D)
    model = differences @ head_of(rm).weight.detach().double().cpu().numpy()[0]
    own, held = slice(len(train)), slice(len(train), len(train) + len(held_out))
    others = slice(len(train) + len(held_out), None)
    square = float(model[held] @ model[held])
    tried = []
    for multiple in PENALTIES:
        l2 = multiple * differences.shape[1]
        # The head of beta x is that of the margins h x inside softplus(-beta h x).
        head = fit_head(rm.beta * differences[own], l2=l2, label_smoothing=label_smoothing)
        left = differences[held] @ head - model[held]
        tried.append((float(left @ left) / square if square > 0 else np.nan, l2, head))
    error, l2, head = min(tried, key=lambda one: one[0])
    return Representers(
        effect=terms(differences[own], differences[others], head, l2, MarginLoss(rm.beta, label_smoothing)),
        margins=differences[others] @ head,
        model_margins=model[others],
        train_margins=model[own],
        held_out_correlation=correlation(differences[held] @ head, model[held]),
        held_out_error=error,
        num_held_out=len(held_out),
        l2=l2,
    )


def terms(train: FloatArray, targets: FloatArray, head: FloatArray, l2: float, loss: MarginLoss) -> FloatArray:
    """The term of each training pair in each target's margin, (T, N) logits, at the optimum of `fit_head`.

    Args:
        train: (N, D) differences of the features of the training pairs.
        targets: (T, D) of the targets.
        head: (D,) fitted on beta times `train`.
        l2: its penalty.
        loss: of a pair.
    """
    scale = np.sqrt(np.square(loss.beta * train).mean(axis=0))  # (D,) as `fit_head` standardises
    scale[scale == 0] = 1.0
    return (targets / scale**2) @ train.T * (-loss.slope(train @ head) / l2)
