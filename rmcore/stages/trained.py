"""The reward model that stages after a training measure."""

from pathlib import Path

from rmcore.config.model import WeightDtype
from rmcore.config.pipeline import PipelineConfig
from rmcore.models.reward_model import BradleyTerryRM


def load_trained(settings: PipelineConfig, folder: Path, dtype: WeightDtype = "float32") -> BradleyTerryRM:
    """Load a checkpoint of the stage train as the settings of a stage say.

    Raises:
        ModelError, ConfigError: see `BradleyTerryRM.from_pretrained`.
    """
    return BradleyTerryRM.from_pretrained(
        folder,
        device=settings.device,
        trust_remote_code=settings.model.trust_remote_code,
        render_fn=settings.model.render_fn,
        dtype=dtype,
    )
