"""Measurements of a reward model by capabilities, started from a form. Order only."""

from collections.abc import Mapping
from typing import Any

from tasks.home import configure_environment

configure_environment()  # before Prefect and MLflow read their settings

# ruff: noqa: E402
from flows.chain import Presentation, run_chain
from flows.form import Form, configured_flow, presets_for
from flows.requirements import require_capabilities
from rmcore.config.pipeline import GROUPS, PipelineConfig
from rmcore.core.errors import ConfigError
from rmcore.core.store import ArtifactRef
from rmcore.reporting.html.blocks import Block, capabilities_shown
from rmcore.stages.order import drawn
from rmcore.stages.results import read_json
from rmcore.stages.stages import OPTIONAL, STAGES

FIELDS = {f"{name}_{field}": f"{name}.{field}" for name in OPTIONAL for field in list(GROUPS[name].model_fields)[:1]}
"""The first setting of each."""


@configured_flow(
    "measure",
    Form(
        "demo",
        {
            **FIELDS,
            "data": "data.source",
            "model": "model.name",
            "steps": "train.steps",
            "seed": "seed",
            "study": "study",
        },
        ("data", "model", "train", *OPTIONAL),
        presets_for("run"),
        require_capabilities,
    ),
    drawn(OPTIONAL, PipelineConfig()),
    "-measured",
)
def measure(config: PipelineConfig, checkpoint: str | None = None) -> dict[str, Any]:
    """Measure a reward model in each way of which something is set; it is trained first, or there already.

    Args:
        config: what is measured, and data, model and training of the reward model; with a checkpoint of one that is
            there already, its training pairs.
        checkpoint: a reward model that is there already, in place of a training: a checkpoint folder.

    Returns:
        {"results": the records by stage, "figures": paths by name, "folder", "report": HTML file, "executed",
        "mlflow_url"}.

    Raises:
        ConfigError: nothing is to be measured, or something that the settings name is not there.
    """
    names = [name for name in OPTIONAL if getattr(config, name) is not None]
    if not names:
        raise ConfigError(f"nothing is to be measured: set something of {', '.join(OPTIONAL)}.")
    shown = [one for one in capabilities_shown() if one.stage in names]

    def found(refs: Mapping[str, ArtifactRef]) -> dict[str, Any]:
        return {name: read_json(refs[name], STAGES[name].outcome[0]) for name in names}

    def block(results: Mapping[str, Any]) -> Block:
        return Block("Measurements of a reward model", parts=[one.block(results[one.stage]) for one in shown])

    def headline(results: Mapping[str, Any]) -> str:
        return " ".join(one.block(results[one.stage]).text[0] for one in shown)

    captions = {name: text for one in shown for name, text in one.captions.items()}
    return run_chain(
        config, names, Presentation(found, block, headline, captions), kind="measure", checkpoint=checkpoint
    )
