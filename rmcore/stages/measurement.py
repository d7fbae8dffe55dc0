"""The stage of a capability that measures the trained reward model on held-out pairs, made of one function.

    @measurement(numbers=lambda record: {"eval/test_novelty": record["novelty"]})
    def measure(rm, pairs, settings: NoveltyConfig, *, seed: int, report: Report) -> dict[str, Any]:

So `measure` of `rmcore/novelty/stage.py` gives the record of the stage `novelty`. It imports torch inside.
"""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import create_model

from rmcore.config.model import WeightDtype
from rmcore.core.files import write_json
from rmcore.core.progress import Report
from rmcore.core.tracking import Tracker
from rmcore.stages.stage import Measuring, stage

if TYPE_CHECKING:
    from rmcore.models.reward_model import BradleyTerryRM

Measure = TypeVar("Measure", bound=Callable[..., dict[str, Any]])
Numbers = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def load_trained(settings: Measuring, dtype: WeightDtype = "float32") -> "BradleyTerryRM":
    """Load the best checkpoint of the training that a stage measures.

    Raises:
        ModelError, ConfigError: see `BradleyTerryRM.from_pretrained`.
    """
    from rmcore.models.reward_model import BradleyTerryRM

    return BradleyTerryRM.from_pretrained(
        settings.trained.folder / "best",
        device=settings.device,
        trust_remote_code=settings.trust_remote_code,
        render_fn=settings.render_fn,
        dtype=dtype,
    )


class Measurement(Measuring):
    """Arguments of such a stage: its section, too, under the stage's name."""

    seed: int
    measure: ClassVar[Callable[..., dict[str, Any]]]
    """Gives the record, JSON-ready, of a reward model, pairs, the section, `seed` and `report`."""
    numbers: ClassVar[Numbers]
    passes: ClassVar[Callable[[Any], float | None]]

    @classmethod
    def training_passes(cls, settings: Any) -> float | None:
        """Return over how many pairs a training passes in the time that it takes; None: that is known afterwards."""
        return cls.passes(settings)

    @classmethod
    def write(cls, record: Mapping[str, Any], out: Path) -> None:
        """Write a record, its numbers for trackers, and its figures."""
        from rmcore.reporting.figures.style import save
        from rmcore.reporting.html.blocks import capabilities_shown

        write_json(out / cls.outcome[0], record)
        write_json(out / "summary.json", {"metrics": cls.numbers(record)})
        figures = next((one.figures for one in capabilities_shown() if one.stage == cls.name), {})
        for name, figure in figures.items():
            save(figure(record), out / "figures" / f"{name}.png")

    def run(self, out: Path, tracker: Tracker, report: Report) -> None:
        """Measure the best checkpoint on the test pairs."""
        from rmcore.data.table import read_pairs

        rm, pairs = load_trained(self), read_pairs(self.prepared.folder / "test.parquet")
        self.write(self.measure(rm, pairs, getattr(self, self.name), seed=self.seed, report=report), out)


def measurement(
    name: str = "",
    *,
    file: str = "",
    numbers: Numbers = lambda record: {},
    passes: Callable[[Any], float | None] = lambda settings: None,
    in_mlflow: bool = False,
) -> Callable[[Measure], Measure]:
    """Make the stage of a function.

    Args:
        name: of the stage and its section; left out: that of the folder.
        file: of the record; left out: NAME.json.
        numbers: gives those of a record that trackers show, by their names.
        passes: see `Stage.training_passes`.
        in_mlflow: see `Stage`.
    """

    def declare(measure: Measure) -> Measure:
        own = name or measure.__module__.split(".")[1]
        fields: Any = {own: (inspect.signature(measure).parameters["settings"].annotation, ...)}
        cls = create_model(own, __base__=Measurement, __module__=measure.__module__, **fields)
        cls.measure, cls.numbers, cls.passes = staticmethod(measure), staticmethod(numbers), staticmethod(passes)
        stage(own, outcome=(file or f"{own}.json",), in_mlflow=in_mlflow)(cls)
        return measure

    return declare
