"""The reward model that stages after a training measure."""

from pathlib import Path

from rmcore.config.model import WeightDtype
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.stages.settings import CheckpointSettings


def load_trained(settings: CheckpointSettings, folder: Path, dtype: WeightDtype = "float32") -> BradleyTerryRM:
    """Load a checkpoint of the stage train as a stage's settings say.

    Raises:
        ModelError, ConfigError: see `BradleyTerryRM.from_pretrained`.
    """
    return BradleyTerryRM.from_pretrained(
        folder,
        device=settings.device,
        trust_remote_code=settings.trust_remote_code,
        render_fn=settings.render_fn,
        dtype=dtype,
    )
