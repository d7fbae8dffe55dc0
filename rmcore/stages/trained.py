"""The reward model that stages after a training measure."""

from rmcore.config.model import WeightDtype
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.stages.stage import Measuring


def load_trained(settings: Measuring, dtype: WeightDtype = "float32") -> BradleyTerryRM:
    """Load the best checkpoint of the training that a stage measures.

    Raises:
        ModelError, ConfigError: see `BradleyTerryRM.from_pretrained`.
    """
    return BradleyTerryRM.from_pretrained(
        settings.trained.folder / "best",
        device=settings.device,
        trust_remote_code=settings.trust_remote_code,
        render_fn=settings.render_fn,
        dtype=dtype,
    )
