"""The order of the training pairs under `train.curriculum`."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rmcore.active.curriculum import CurriculumSampler, Schedule, predicted_margins
from rmcore.config.train import TrainConfig
from rmcore.core.errors import DataError
from rmcore.data.rendering import TokenizedPair
from rmcore.data.tokenized import Pairs
from rmcore.ensembles.features import features
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.training.length import planned_steps
from rmcore.training.ranks import Ranks


def curriculum_order(
    rm: BradleyTerryRM,
    settings: TrainConfig,
    kept: Sequence[TokenizedPair],
    pairs: Pairs,
    ranks: Ranks,
    *,
    seed: int,
) -> list[list[int]]:
    """Positions in `kept` of the pairs of each step.

    Args:
        rm: not trained yet.
        settings: of the training, with a curriculum.
        kept: P pairs that are trained on.
        pairs: where they come from.
        ranks: the processes that train together; all get the first one's order.
        seed: of the order, and of the folds that margins are predicted in.

    Raises:
        DataError: a pair has no annotated margin, or all are of one prompt and margins are to be predicted.
    """
    margins = None
    if settings.curriculum_margins == "annotated":
        margins = _annotated(kept)
    elif ranks.is_main:
        prompts = {pair.pair_id: pair.prompt_id for pair in pairs}
        states = features(rm, [side for pair in kept for side in (pair.chosen, pair.rejected)])
        differences = states[::2].astype(np.float64) - states[1::2]
        margins = predicted_margins(differences, [prompts[pair.pair_id] for pair in kept], seed=seed)
    margins = ranks.gather(margins)[0]  # rounding differs between devices, and all must draw alike
    schedule: Schedule = "easy_first" if settings.curriculum == "easy_first" else "hard_first"
    sampler = CurriculumSampler(margins, schedule=schedule, seed=seed)
    return list(sampler.steps(settings.pairs_per_step, planned_steps(settings, len(kept))))


def _annotated(kept: Sequence[TokenizedPair]) -> npt.NDArray[np.float64]:
    missing = [pair.pair_id for pair in kept if pair.target_margin is None]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(kept)} training pairs have no annotated margin, the first is {missing[0]}, so a "
            "curriculum cannot tell how easy they are; name the column with data.margin_column, or set "
            "train.curriculum_margins=predicted."
        )
    return np.array([pair.target_margin for pair in kept], dtype=np.float64)
