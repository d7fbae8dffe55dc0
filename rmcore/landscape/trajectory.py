"""Curvature along the trajectory: the spectrum's two ends and the trace at every evaluation of a training.

A largest eigenvalue that rises says that the learning rate is near its limit: for plain gradient descent it hovers at
2 / lr (Cohen et al. 2021, arXiv:2103.00065). One that falls says nothing by itself: it falls merely because margins
grow, so the size of the margins is recorded next to it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rmcore.core.errors import ConfigError
from rmcore.landscape.analyzer import HessianAnalyzer
from rmcore.landscape.sample import CurvatureSample, draw_positions
from rmcore.training.callbacks import Callback, Evaluation, calibration


@dataclass(frozen=True, slots=True)
class CurvatureCallback:
    """Curvature of the mean loss of a fixed sample of the validation pairs, over all trained parameters.

    Pairs, start vector and probes are drawn by `seed` alone, so that from one evaluation to the next only the model
    changes. Weights, gradients, modes, `requires_grad` and every random state are left as they were: a training with
    it ends in the same bits as one without.

    One evaluation takes lanczos_steps + trace_probes + 1 Hessian products, each about three gradients of the sample:
    with the defaults (8, 8 and 4) as long as some 40 to 60 gradients of 8 pairs. Measured on `tiny`, 8 AlpacaEval pairs
    of 128 tokens: after 30 training steps lambda_max 23.43 +- 0.01 (30 Lanczos steps: the same) and lambda_min -5.2 +-
    1.1 (-5.785); at initialisation 171.1 +- 6.2 (171.5) and -197.0 +- 5.9 (-197.2). Eight steps do not resolve the bulk
    (the effective rank comes out four times too large), so nothing is given that needs it. Few probes show a trend
    because they are the same each time; the standard error of a single trace, itself from four numbers, is rough.

    Attributes:
        num_pairs: size of the sample; all validation pairs where there are fewer.
        lanczos_steps: products for the two ends, at least 2; their basis takes as many times the trained parameters.
        trace_probes: products for the trace, at least 2.
        seed: of the sample and the random vectors.
    """

    num_pairs: int = 8
    lanczos_steps: int = 8
    trace_probes: int = 4
    seed: int = 0

    def __call__(self, evaluation: Evaluation) -> Mapping[str, float]:
        """Measure at the present weights.

        Returns:
            hessian/lambda_max, hessian/lambda_min: the ends, in nats per squared unit of the parameters, each with
                `_residual`: a true eigenvalue lies at most that far away.
            hessian/trace and hessian/trace_standard_error: Hutchinson's estimate.
            hessian/margin_scale: root mean square of the sample's margins, in logits.

        Raises:
            CurvatureError: weights narrower than float32, an operation without second derivative, or a product that is
                not finite.
            ConfigError: lanczos_steps or trace_probes is too small.
        """
        drawn = draw_positions(len(evaluation.pairs), self.num_pairs, self.seed)
        sample = CurvatureSample([evaluation.pairs[i] for i in drawn], [""] * len(drawn), evaluation.rm.pad_id)
        spectrum = HessianAnalyzer(evaluation.rm).compute_spectrum(
            sample.batches, top_k=1, num_steps=self.lanczos_steps, trace_probes=self.trace_probes, seed=self.seed
        )
        rewards = evaluation.rewards[drawn].astype(np.float64)
        return {
            "hessian/lambda_max": spectrum.eigenvalues[0],
            "hessian/lambda_max_residual": spectrum.residuals[0],
            "hessian/lambda_min": spectrum.eigenvalues[-1],
            "hessian/lambda_min_residual": spectrum.residuals[-1],
            "hessian/trace": spectrum.trace_estimate,
            "hessian/trace_standard_error": spectrum.trace_standard_error,
            "hessian/margin_scale": float(np.sqrt(np.mean((rewards[:, 0] - rewards[:, 1]) ** 2))),
        }


def make_callbacks(names: Sequence[str], *, seed: int) -> list[Callback]:
    """The callbacks of `TrainConfig.callbacks`, in that order.

    Raises:
        ConfigError: an unknown name.
    """
    known: dict[str, Callback] = {"calibration": calibration, "curvature": CurvatureCallback(seed=seed)}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"callbacks={', '.join(unknown)} is unknown; choose among {', '.join(known)}.")
    return [known[name] for name in names]
