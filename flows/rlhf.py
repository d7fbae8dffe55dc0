"""From preferences to a policy: reward model, readiness, GRPO against it, and what the true reward says. Order only."""

from typing import Any, Literal

from tasks.home import configure_environment

configure_environment()  # before Prefect and MLflow read their settings

# ruff: noqa: E402
from prefect.artifacts import create_markdown_artifact

from experiments.presets import PRESETS
from flows.chain import Presentation, run_chain
from flows.form import Form, configured_flow, presets_for
from flows.pipeline import run_name_of, run_pipeline
from flows.requirements import require_run
from rmcore.config.model import FROM_POLICY
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.errors import ConfigError
from rmcore.reporting.html.blocks import markdown
from rmcore.reporting.html.rlhf import CAPTIONS, rlhf_block
from rmcore.stages.order import drawn, labelled_stages, pipeline_stages, required
from rmcore.stages.results import read_json
from rmcore.stages.stages import OPTIONAL

Mode = Literal["full", "rm", "policy"]


FORM = Form(
    "rlhf",
    {
        "data": "data.source",
        "model": "model.name",
        "policy": "policy.name",
        "rm_steps": "train.steps",
        "policy_steps": "rlhf.steps",
        "policy_lr": "rlhf.learning_rate",
        "kl_beta": "rlhf.kl_beta",
        "judge": "policy.judge",
        "seed": "seed",
        "study": "study",
    },
    ("data", "model", "train", "evaluate", *OPTIONAL, "readiness", "policy", "rlhf"),
    presets_for("rlhf"),
)
DRAWN = PRESETS["rlhf"]


@configured_flow("rlhf", FORM, drawn(pipeline_stages(DRAWN), DRAWN), "-rlhf")
def rlhf(config: PipelineConfig, mode: Mode = "full", checkpoint: str | None = None) -> dict[str, Any]:
    """Train a reward model on preferences and a policy against it, and show whether the true reward rose too.

    Args:
        config: data, reward model, policy, and in rlhf the training of the policy.
        mode: full: the reward model, its readiness, then the policy. rm: the reward model alone. policy: the policy
            alone, against `checkpoint`.
        checkpoint: a reward model that is there already, for mode policy: a checkpoint folder.

    Returns:
        As the flow `pipeline`; in mode policy {"results": the training's record, "figures", "folder", "executed",
        "mlflow_url"}.

    Raises:
        ConfigError: the mode and what is given do not fit, or something that the config names is not there.
    """
    if (mode == "policy") != (checkpoint is not None):
        raise ConfigError(
            f"mode={mode} and checkpoint={checkpoint}: mode policy trains against a reward model that is there, so it "
            "needs a checkpoint; the other modes train one of their own."
        )
    run_name = run_name_of(config, "rlhf")
    if mode == "rm":
        started_from = config.policy if config.model.name == FROM_POLICY else None
        without = config.model_copy(update={"rlhf": None, "policy": started_from})
        return run_pipeline(without, labelled_stages(without), kind="rlhf", run_name=run_name)
    required(config.rlhf, "rlhf")
    require_run(config)
    if mode == "full":
        outcome = run_pipeline(config, pipeline_stages(config), kind="rlhf", run_name=run_name)
        create_markdown_artifact(markdown(rlhf_block(outcome["results"]["rlhf"])), "policy", "Policy")
        return outcome
    view = Presentation(
        lambda refs: read_json(refs["grpo"], "rlhf.json"),
        rlhf_block,
        lambda record: str(record["verdict"]["headline"]),
        CAPTIONS,
    )
    return run_chain(config, ["grpo"], view, kind="rlhf", checkpoint=checkpoint)
