"""The registered reward model as MLflow loads it: code and a checkpoint folder, no pickle.

MLflow runs this file when a model is logged and again when it is loaded ("model from code"). torch is imported by the
first prediction, so that logging stays light.
"""

from typing import Any

import pandas as pd
from mlflow.models import set_model
from mlflow.pyfunc import PythonModel, PythonModelContext


class RewardModelFromCheckpoint(PythonModel):
    """Rewards, in logits, of (prompt, response) rows."""

    def __init__(self) -> None:
        self._model: Any = None

    def predict(
        self, context: PythonModelContext, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> pd.DataFrame:
        """Reward of each row.

        Args:
            context: names the checkpoint folder, `context.artifacts["checkpoint"]`.
            model_input: frame of R rows with string columns `prompt` and `response`.
            params: unused; part of MLflow's interface.

        Returns:
            Frame of R rows with the float64 column `reward`.
        """
        if self._model is None:
            from rmcore.models.reward_model import BradleyTerryRM

            self._model = BradleyTerryRM.from_pretrained(context.artifacts["checkpoint"])
        rewards = self._model.score(model_input["prompt"].tolist(), model_input["response"].tolist())
        return model_input.assign(reward=rewards.astype("float64"))[["reward"]]


set_model(RewardModelFromCheckpoint())
