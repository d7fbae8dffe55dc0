"""The comparison of optimizers from Python: what `rm-opt compare` does, as an object."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.library import Chosen, load_experiment, restrict
from experiments.schema import Experiment
from experiments.shipped import with_control
from experiments.sizes import Size
from flows.cli_experiment import run_matrix
from rmcore.core.errors import ConfigError

SIZE: Size = "smoke"
"""Whose settings hold for what is not named here: batch size, evaluation, curvature."""


class OptimizerComparison:
    """Optimizers on one model and one set of pairs, each at its own learning rate, over several seeds.

    AdamW, which the registered hypotheses compare with, is always among them. Cells that were computed before are not
    computed again.

    Example:
        >>> comparison = OptimizerComparison("minilm", "pairs.parquet", ["muon", "sgd"], num_seeds=3, epochs=1)
        >>> results = comparison.run_experiment()                             # doctest: +SKIP
        >>> print(comparison.generate_report())                               # doctest: +SKIP

    Args:
        model_name: a folder, a hub name, `tiny`, `minilm`, `deberta` or `llama`.
        data_path: preference pairs, a share of whose prompts is held out; None: the synthetic benchmark.
        optimizers: adam, adamw, sgd, muon, lion.
        num_seeds: replicates of each; an interval needs at least two.
        epochs: passes over the training pairs.

    Raises:
        ConfigError: there is no such optimizer.
        pydantic.ValidationError: a number cannot be used; names the field.
    """

    def __init__(
        self,
        model_name: str = "tiny",
        data_path: str | Path | None = None,
        optimizers: Sequence[str] = ("adam", "muon", "sgd"),
        num_seeds: int = 3,
        epochs: float = 1.0,
    ) -> None:
        self._chosen: Chosen = {
            "arms": with_control(optimizers),
            "seeds": num_seeds,
            "model": model_name,
            "data": None if data_path is None else str(data_path),
            "epochs": epochs,
        }
        self.declared: Experiment = restrict(load_experiment("optimizers", SIZE), **self._chosen)
        """Arms, hypotheses and what all arms share."""
        self.outcome: dict[str, Any] | None = None

    def run_experiment(self) -> dict[str, Any]:
        """Run what is missing: metrics of every arm with intervals over seeds, hypotheses with verdicts, cells.

        Raises:
            TrainingError: cells failed; `generate_report` has the others.
        """
        self.outcome = run_matrix("optimizers", SIZE, self._chosen)
        if self.outcome["failed"]:
            from flows.experiment import FailedCellsError

            raise FailedCellsError(self.outcome)
        results: dict[str, Any] = self.outcome["results"]
        return results

    def generate_report(self) -> Path:
        """The report of what was run: one self-contained HTML file, with figures and a summary next to it.

        Raises:
            ConfigError: nothing was run yet.
        """
        if self.outcome is None:
            raise ConfigError("there is nothing to report yet; call run_experiment first.")
        return Path(self.outcome["report"])
