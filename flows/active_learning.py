"""What choosing labels saves: the claims are frozen, then every seed runs, then they are judged. Order only."""

from typing import Any

from tasks.home import configure_environment, home

configure_environment()  # before Prefect and MLflow read their settings

# ruff: noqa: E402
from prefect import flow

from experiments.presets import PRESETS
from flows.policy import finish, run_chain
from rmcore.active.analysis import claims_of
from rmcore.config import ActiveConfig, PipelineConfig
from rmcore.errors import ConfigError
from rmcore.report.active import active_markdown
from rmcore.stages.results import read_json
from rmcore.study.registration import register

STUDY = ("prepare", "features", "active")


@flow(name="active-learning", flow_run_name="{config.study}-seed{config.seed}-active", validate_parameters=True)
def active_learning(config: PipelineConfig = PRESETS["active"]) -> dict[str, Any]:
    """Compare acquisition functions with random choice on labelled pairs, hiding labels until they are asked for.

    What is claimed is written down with hash and time before the first seed runs.

    Args:
        config: pairs, the backbone whose features the heads read, and in active the size of the study.

    Returns:
        {"results": curves, savings, claims with verdicts, the registration; "figures": paths by name, "folder",
        "executed", "mlflow_url"}.

    Raises:
        ConfigError: the config has no study.
    """
    study = require_active(config)
    registration = register(home() / "registrations" / f"active-{config.study}", _frozen(config, study))
    chain = run_chain(config, STUDY if study.check is None else (*STUDY, "active_check"), kind="active")
    results = read_json(chain.refs["active"], "active.json") | {"registration": registration}
    if study.check is not None:
        results["check"] = read_json(chain.refs["active_check"], "check.json")
    markdown = active_markdown(results)
    chain.folder.mkdir(parents=True, exist_ok=True)
    (chain.folder / "summary.md").write_text(markdown, encoding="utf-8")
    return finish(chain, results, markdown)


def require_active(config: PipelineConfig) -> ActiveConfig:
    """The study's settings.

    Raises:
        ConfigError: the config has none.
    """
    if config.active is None:
        raise ConfigError("there is no study in this config; start from preset active.")
    return config.active


def _frozen(config: PipelineConfig, study: ActiveConfig) -> dict[str, Any]:
    """What decides the verdicts."""
    return {
        "claims": [{"name": claim.name, "claim": claim.text} for claim in claims_of(study)],
        "seed": config.seed,
        "data": config.data.model_dump(mode="json"),
        "model": config.model.model_dump(mode="json"),
        "study": study.model_dump(mode="json"),
    }
