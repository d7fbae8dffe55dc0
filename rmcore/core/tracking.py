"""Where a stage reports to while it runs: JSON lines in its own artifact, and trackers of other programs.

Readers elsewhere (MLflow) take the lines from there, live or later. So a tracker outage never stops a training, and a
cached artifact can fill a fresh run. TensorBoard's and wandb's packages are imported when they are used.
"""

import importlib.util
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

from rmcore.core.errors import ConfigError

METRICS_FILE = "metrics.jsonl"


class Tracker(Protocol):
    """Receives numbers by step. Metric names have exactly one slash, for example `train/loss`."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Record `values` at optimizer step `step`."""


class NullTracker:
    """Forgets everything."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Do nothing."""


class MemoryTracker:
    """Keeps every row as (step, values), for tests and notebooks."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Append one row."""
        self.rows.append((step, dict(values)))


class JsonlTracker:
    """Appends one JSON object a call, `{"step": 10, "metrics": {"train/loss": 0.69}}`, flushed so it can be followed.

    Non-finite numbers become null: JSON has no NaN.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Append one line."""
        finite = {name: (float(value) if math.isfinite(value) else None) for name, value in values.items()}
        self._file.write(json.dumps({"step": step, "metrics": finite}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


LoggerName = Literal["tensorboard", "wandb"]
TENSORBOARD, WANDB = "tensorboard", "wandb"


class TensorboardTracker:
    """Writes TensorBoard's event files into a folder, which is that of one run."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Write one scalar a name."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WandbTracker:
    """Logs to one run of Weights & Biases, as WANDB_MODE and the other variables of wandb say.

    Raises:
        ConfigError: wandb did not open a run: nobody is logged in, or its server does not answer.
    """

    def __init__(self, project: str, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(project=project, name=name, dir=str(folder), config=dict(config))
        except wandb.errors.Error as error:
            raise ConfigError(
                f"wandb opened no run ({error}). Log in with `wandb login`, or set WANDB_MODE=offline: what is logged "
                f"then is in {folder}, and `wandb sync` sends it."
            ) from error

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Log one row."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class OtherLogger:
    """A logger whose failure ends nothing: the first one is said on stderr, and rows that follow are still given."""

    def __init__(self, name: str, logger: "TensorboardTracker | WandbTracker") -> None:
        self._name = name
        self._logger = logger
        self._has_failed = False

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Give one row."""
        with self._continuing(f"at step {step}"):
            self._logger.metrics(step, values)

    def close(self) -> None:
        """Close the logger."""
        with self._continuing("as it was closed"):
            self._logger.close()

    @contextmanager
    def _continuing(self, when: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, hours of computation must not end for it
            if not self._has_failed:
                print(
                    f"warning: logger {self._name} failed {when} ({type(error).__name__}: {error}). The run continues, "
                    f"and rows from there on may be missing in {self._name}; {METRICS_FILE} has all of them.",
                    file=sys.stderr,
                )
            self._has_failed = True


class ManyTrackers:
    """Gives each row to each of several trackers."""

    def __init__(self, trackers: Iterable[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Give one row to all."""
        for tracker in self._trackers:
            tracker.metrics(step, values)


def require_loggers(names: Sequence[str]) -> None:
    """Refuse loggers whose package is not installed, before hours are spent.

    Raises:
        ConfigError: naming the command that installs it.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"logger {name} needs the package {name}, which is not installed here: pip install {name}. Without it, "
                "leave the logger out: MLflow and metrics.jsonl have every number."
            )


@contextmanager
def open_loggers(
    names: Sequence[str], *, study: str, run: str, folder: Path, config: Mapping[str, Any]
) -> Iterator[Tracker]:
    """Trackers of these names as one, closed after the block; see `OtherLogger` for what one of them raises there.

    Args:
        names: see LoggerName.
        study: of the run: wandb's project.
        run: name of the run.
        folder: where both keep their files, in a folder each.
        config: the settings, flat.

    Raises:
        ConfigError: a package is not installed, or wandb opens no run.
    """
    require_loggers(names)
    with ExitStack() as opened:
        trackers = list[Tracker]()
        for name in dict.fromkeys(names):
            place = folder / name
            made = TensorboardTracker(place) if name == TENSORBOARD else WandbTracker(study, run, place, config)
            guarded = OtherLogger(name, made)
            opened.callback(guarded.close)
            trackers.append(guarded)
        yield ManyTrackers(trackers)


def give_lines(lines: Iterable[bytes], tracker: Tracker) -> None:
    """Give rows of a `metrics.jsonl` to a tracker; what was not finite there is left out."""
    for line in lines:
        row = json.loads(line)
        values = {name: value for name, value in row["metrics"].items() if value is not None and math.isfinite(value)}
        tracker.metrics(row["step"], values)
