"""A reward model on public benchmarks and sets of one's own, started from a form. Order only."""

from collections.abc import Mapping
from typing import Any

from tasks.home import configure_environment

configure_environment()  # before Prefect and MLflow read their settings

# ruff: noqa: E402
from flows.chain import Presentation, run_chain
from flows.form import Form, configured_flow, presets_for
from flows.requirements import require_capabilities
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.store import ArtifactRef
from rmcore.stages.order import drawn
from rmcore.stages.results import read_json
from rmcore.suites.blocks import SHOWN, title
from rmcore.suites.settings import BenchmarkConfig

DRAWN = PipelineConfig(benchmark=BenchmarkConfig(suites=("all",)))


@configured_flow(
    "benchmark",
    Form(
        "demo",
        {
            "suites": "benchmark.suites",
            "data": "data.source",
            "model": "model.name",
            "steps": "train.steps",
            "seed": "seed",
            "study": "study",
        },
        ("data", "model", "train", "benchmark"),
        presets_for("run"),
        require_capabilities,
    ),
    drawn(["benchmark"], DRAWN),
    "-benchmark",
)
def benchmark(config: PipelineConfig, checkpoint: str | None = None) -> dict[str, Any]:
    """Score a reward model on the benchmarks that are named, each by its own rule, and compare them with its training.

    Args:
        config: the benchmarks, and data, model and training of the reward model; with a checkpoint of one that is there
            already, its training pairs.
        checkpoint: a reward model that is there already, in place of a training: a checkpoint folder.

    Returns:
        {"results": see rmcore.suites.record.benchmark_record, "figures": paths by name, "folder", "report": HTML file,
        "executed", "mlflow_url"}.

    Raises:
        ConfigError: no benchmark is named, or there is none of that name.
    """

    def found(refs: Mapping[str, ArtifactRef]) -> dict[str, Any]:
        return read_json(refs["benchmark"], "benchmark.json")

    view = Presentation(found, SHOWN.block, lambda results: title(results["suites"]), SHOWN.captions)
    return run_chain(config, ["benchmark"], view, kind="benchmark", checkpoint=checkpoint)
