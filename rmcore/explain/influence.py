"""Influence of training pairs on the margins of other pairs: what each of them has done to the model's opinion.

Gauss-Newton form of the influence function (Koh and Liang 2017, arXiv 1703.04730; Martens 2020, arXiv 1412.1193): the
model is replaced by its linearisation at its weights, so that leaving a pair out of the training is one linear
equation, over pairs and not over weights (see `linearized`). Retrainings agree closely where the head alone is trained
to its optimum, partly where SGD trains all weights, and hardly where AdamW does, nor would they with the training
simulated step by step: benchmarks/RESULTS.md, Influence of training pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rmcore.core.arrays import FloatArray
from rmcore.core.errors import DataError
from rmcore.core.progress import Report, silent
from rmcore.data.pair import PreferencePair
from rmcore.explain.linearized import MarginLoss, choose_damping, left_out_together, resolvent
from rmcore.explain.sketch import sketched_gram
from rmcore.landscape.operators import LossGaussNewton
from rmcore.landscape.parameters import ParameterSubset
from rmcore.models.batching import pad_pairs
from rmcore.models.reward_model import BradleyTerryRM

FEWEST_HELD_OUT = 20
"""Held-out pairs below which a damping would be chosen by chance."""


@dataclass(frozen=True)
class Influences:
    """Effects of N training pairs on the margins of T targets.

    Attributes:
        effect: (T, N) logits; change of the target's margin that the presence of the training pair made, to first
            order. Positive: it helped the margin, so leaving it out lowers that by as much.
        margins: (T,) logits; the model's own margins of the targets.
        train_margins: (N,) logits; its margins of the training pairs.
        damping: lambda, in nats per squared unit of the parameters.
        held_out_correlation: of the margins that the linearised model, trained on the same pairs with this damping,
            gives held-out pairs with the model's own. The lower, the less the effects are about this model; a value
            near 1 is necessary for them and not sufficient.
        held_out_error: mean squared difference of the two, as a share of the mean square of the model's own margins;
            the damping is the one of those tried that makes it smallest.
        num_held_out: pairs that the last two are over.
        parameters: which parameters the model was linearised in.
        num_parameters: how many.
    """

    effect: FloatArray
    margins: FloatArray
    train_margins: FloatArray
    damping: float
    held_out_correlation: float
    held_out_error: float
    num_held_out: int
    parameters: ParameterSubset
    num_parameters: int
    _slope: FloatArray  # (N,) l'
    _curvature: FloatArray  # (N,) l''
    _response: FloatArray  # (T, N) g_t H^-1 J^T / n
    _kernel: FloatArray  # (N, N) J J^T
    _loss: MarginLoss

    def without(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> FloatArray:
        """Predicted change of the targets' margins if these training pairs are left out together: (T,) logits.

        One Newton step of the loss without them, at which their curvature is missing, too: exact for a quadratic loss,
        where the sum of `effect` over them is only the first order. The divisor of the mean loss stays as it was.

        Args:
            indices: positions of training pairs, each once.

        Raises:
            DataError: one comes twice or is none of the training pairs.
        """
        chosen = np.asarray(indices, dtype=np.int64)
        if len(np.unique(chosen)) != len(chosen) or ((chosen < 0) | (chosen >= len(self._slope))).any():
            raise DataError(
                f"positions of training pairs are different numbers from 0 to {len(self._slope) - 1}; got "
                f"{chosen.tolist()[:10]}. Give each pair that is left out once."
            )
        response = resolvent(self._kernel, self._kernel[chosen], self.train_margins, self.damping, self._loss)
        own = response[:, chosen]  # (R, R) of J H^-1 J^T / n
        return left_out_together(self._response[:, chosen], own, self._slope[chosen], self._curvature[chosen])


def influences(
    rm: BradleyTerryRM,
    train: Sequence[PreferencePair],
    targets: Sequence[PreferencePair],
    held_out: Sequence[PreferencePair],
    *,
    parameters: ParameterSubset = "all",
    label_smoothing: float = 0.0,
    memory_bytes: int | None = None,
    report: Report = silent,
) -> Influences:
    """Influence of each training pair on the margin of each target.

    Every pair costs one gradient, and every two pairs an inner product of their sketches.

    Args:
        rm: the trained model; left as it was found.
        train: N pairs it was trained on.
        targets: T pairs whose margins are to be explained.
        held_out: pairs it was not trained on, by which the damping is chosen; validation pairs will do.
        parameters: what the model is linearised in; all are the parameters that training changed.
        label_smoothing: eps of the training's loss; its beta is the model's.
        memory_bytes: see `rmcore.explain.sketch.sketched_gram`; None takes half of what is free.
        report: called after each gradient.

    Raises:
        DataError: there is no training pair or target, too few held-out pairs, or a pair cannot be read.
        CurvatureError: a margin or gradient is not finite, no training pair has a gradient, or the memory does not
            hold their sketches.
        ModelError, ConfigError: see `rmcore.landscape.operators.PairCurvature`.

    Example:
        >>> found = influences(rm, train, test[:5], validation)  # doctest: +SKIP
        >>> found.effect[0].argsort()[:3]  # the three pairs that lowered the first margin most  # doctest: +SKIP
    """
    if not train or not targets or len(held_out) < FEWEST_HELD_OUT:
        raise DataError(
            f"got {len(train)} training pairs, {len(targets)} targets and {len(held_out)} held-out pairs: influence is "
            f"that of the first on the second, and takes {FEWEST_HELD_OUT} of the third at least to choose its "
            "damping. Give pairs of each kind."
        )
    pairs = rm.renderer.tokenize_pairs([*train, *held_out, *targets])
    rows = [pad_pairs([pair], pad_id=rm.pad_id) for pair in pairs]
    operator = LossGaussNewton(rm, rows, parameters=parameters)
    gram = sketched_gram(operator, memory_bytes=memory_bytes, report=report)
    products = gram.products.numpy()
    margins = gram.margins.numpy()
    own, held = slice(len(train)), slice(len(train), len(train) + len(held_out))
    others = slice(len(train) + len(held_out), None)
    kernel, loss = products[own, own], MarginLoss(rm.beta, label_smoothing)
    best = choose_damping(kernel, products[held, own], margins[held], loss)[0]
    response = resolvent(kernel, products[others, own], margins[own], best.damping, loss)
    slope = loss.slope(margins[own])
    return Influences(
        effect=-response * slope,
        margins=margins[others],
        train_margins=margins[own],
        damping=best.damping,
        held_out_correlation=best.correlation,
        held_out_error=best.error,
        num_held_out=len(held_out),
        parameters=parameters,
        num_parameters=operator.num_parameters,
        _slope=slope,
        _curvature=loss.curvature(margins[own]),
        _response=response,
        _kernel=kernel,
        _loss=loss,
    )
