"""The commands that need no orchestrator; `rm-opt` mounts them besides its own."""

from rmcore.cli.help import Listed, lazy_app
from rmcore.core.capabilities import commands

TRAINING = {
    "data": Listed("rmcore.cli.data:app", "Look at preference data, convert it, and choose what to label next."),
    "train": Listed("rmcore.cli.train:train", "Train a reward model on preference pairs."),
    "evaluate": Listed(
        "rmcore.cli.measure:evaluate",
        "Measure a reward model on pairs: accuracy, calibration, margins, with intervals.",
    ),
    **{name: Listed(*one) for name, one in commands("Train and measure").items()},
    "diff": Listed(
        "rmcore.cli.measure:diff", "Compare two reward models on the same pairs: difference, interval, sign-flip test."
    ),
    "export": Listed(
        "rmcore.cli.export:export", "Write a checkpoint as one plain Hugging Face folder with its model card."
    ),
}
POLICIES = {
    "readiness": Listed(
        "rmcore.cli.measure:readiness_app", "Judge whether a policy may be optimised against a reward model."
    ),
    **{name: Listed(*one) for name, one in commands("Policies").items()},
}
SERVICES = {name: Listed(*one) for name, one in commands("Services").items()}
app = lazy_app({"Train and measure": TRAINING, "Policies": POLICIES, "Services": SERVICES})


@app.callback()
def root() -> None:
    """Train and measure reward models."""
