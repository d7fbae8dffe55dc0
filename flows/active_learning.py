"""The study of labels saved by choosing them: claims are frozen, every seed runs, claims are judged. Order only."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.home import configure_environment, home

configure_environment()  # before Prefect and MLflow read their settings

# ruff: noqa: E402
from flows.automations import tell_study
from flows.chain import Telling, run_chain
from flows.form import Form, configured_flow, presets_for
from flows.pipeline import REPORT_FILE
from rmcore.active.efficiency import claims_of
from rmcore.config.active import ActiveConfig
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.files import write_text
from rmcore.core.store import ArtifactRef
from rmcore.reporting.html.active import active_markdown
from rmcore.reporting.html.active_page import write_active_report
from rmcore.stages.requirements import required_active
from rmcore.stages.results import figures, read_json
from rmcore.study.registration import register
from tasks.sharing import write_once

STUDY = ("prepare", "features", "active")


FORM = Form(
    "active",
    {
        "data": "data.source",
        "limit": "data.limit",
        "model": "model.name",
        "num_seeds": "active.num_seeds",
        "seed_pairs": "active.seed_pairs",
        "seed": "seed",
        "study": "study",
    },
    ("data", "model", "active"),
    presets_for("active study"),
)
PICTURE = """
prepare ──> features ─┬─> active ──> report, claims with verdicts
                      └─> active_check, where active.check is set
"""


@configured_flow("active-learning", FORM, PICTURE, "-active")
def active_learning(config: PipelineConfig) -> dict[str, Any]:
    """Compare acquisition functions with random choice on labelled pairs, hiding labels until they are asked for.

    What is claimed is written down with hash and time before the first seed runs.

    Args:
        config: pairs, the backbone whose features the heads read, and in active the size of the study.

    Returns:
        {"results": curves, savings, claims with verdicts, the registration; "report": HTML file, "figures": paths by
        name, "folder", "executed", "mlflow_url"}.

    Raises:
        ConfigError: the config has no study.
    """
    study = required_active(config)
    registration = register(home() / "registrations" / f"active-{config.study}", _frozen(config, study), write_once())

    def found(refs: Mapping[str, ArtifactRef]) -> dict[str, Any]:
        checked = {} if study.check is None else {"check": read_json(refs["active_check"], "check.json")}
        return read_json(refs["active"], "active.json") | {"registration": registration} | checked

    def write(refs: Mapping[str, ArtifactRef], folder: Path) -> Path:
        results, settings = found(refs), config.model_dump(mode="json")
        write_text(folder / "summary.md", active_markdown(results), durable=False)
        return write_active_report(results, figures(refs), folder / REPORT_FILE, config=settings)

    stages = STUDY if study.check is None else (*STUDY, "active_check")
    telling = Telling(found, active_markdown, lambda results: str(results["headline"]), write)
    chain = run_chain(config, stages, telling, kind="active")
    tell_study(f"active-{config.study}", chain.claims(), str(chain.results["headline"]), chain.report)
    return chain.outcome()


def _frozen(config: PipelineConfig, study: ActiveConfig) -> dict[str, Any]:
    """Gather what decides the verdicts."""
    return {
        "claims": [{"name": claim.name, "claim": claim.text} for claim in claims_of(study)],
        "seed": config.seed,
        "data": config.data.model_dump(mode="json"),
        "model": config.model.model_dump(mode="json"),
        "study": study.model_dump(mode="json"),
    }
