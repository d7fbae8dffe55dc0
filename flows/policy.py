"""Flows about a policy: best-of-n by a reward model, readiness v2, confirmation, and GRPO against it. Order only."""

from collections.abc import Mapping
from typing import Any, Literal

from tasks.home import configure_environment

configure_environment()  # before Prefect and MLflow read their settings

# ruff: noqa: E402
from prefect.artifacts import create_markdown_artifact

from experiments.presets import PRESETS
from flows.chain import Presentation, run_chain
from flows.form import Form, configured_flow, presets_for
from flows.pipeline import run_name_of, run_pipeline
from flows.requirements import require_judge, require_run
from rmcore.config.model import FROM_POLICY
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.errors import ConfigError
from rmcore.core.store import ArtifactRef
from rmcore.policy.confirmation import require_served_judge, smallest_n
from rmcore.readiness.power import next_rung, reach_of
from rmcore.readiness.verdict import verdict_on_served
from rmcore.reporting.html.blocks import markdown
from rmcore.reporting.html.policy import (
    CAPTIONS,
    best_of_n_block,
    best_of_n_headline,
    confirmation_block,
    readiness_block,
)
from rmcore.reporting.html.rlhf import CAPTIONS as RLHF_CAPTIONS
from rmcore.reporting.html.rlhf import rlhf_block
from rmcore.reporting.runs import KEY_DIGITS
from rmcore.stages.order import drawn, labelled_stages, pipeline_stages, required, required_policy
from rmcore.stages.results import read_json, run_key
from rmcore.stages.stages import OPTIONAL

OF_THE_MODEL = {"data": "data.source", "model": "model.name", "steps": "train.steps", "policy": "policy.name"}
NAMES = {"seed": "seed", "study": "study"}
SERVED = ("data", "model", "train", "policy")
"""Sections of the config that every flow with a policy reads."""
WITH_POLICY = presets_for("run", "rlhf")


@configured_flow(
    "best-of-n",
    Form(
        "policy",
        OF_THE_MODEL | {"samples_per_prompt": "policy.samples_per_prompt", "num_prompts": "policy.num_prompts"} | NAMES,
        SERVED,
        WITH_POLICY,
        required_policy,
    ),
    drawn(["overoptimization"], PRESETS["policy"]),
    "-best-of-n",
)
def best_of_n(config: PipelineConfig, checkpoint: str | None = None) -> dict[str, Any]:
    """Draw samples of a policy, score them by a reward model, and show what choosing the best of n would do.

    Args:
        config: data (whose held-out prompts are answered), the reward model and its training, and the policy.
        checkpoint: a reward model that is there already, in place of a training: a checkpoint folder.

    Returns:
        {"results": {"sampling", "overoptimization"}, "figures": paths by name, "folder", "report": HTML file,
        "executed", "mlflow_url"}.

    Raises:
        ConfigError: the config has no policy.
    """

    def found(refs: Mapping[str, ArtifactRef]) -> dict[str, Any]:
        return {
            "sampling": read_json(refs["samples"], "sampling.json"),
            "overoptimization": read_json(refs["overoptimization"], "overoptimization.json"),
        }

    view = Presentation(found, best_of_n_block, best_of_n_headline, CAPTIONS)
    return run_chain(config, ["overoptimization"], view, kind="best-of-n", checkpoint=checkpoint)


@configured_flow(
    "readiness",
    Form(
        "policy",
        OF_THE_MODEL
        | {"samples": "policy.samples", "judge": "policy.judge", "planned_kl": "readiness.planned_kl"}
        | NAMES,
        (*SERVED, "evaluate", *OPTIONAL, "readiness", "rlhf"),
        WITH_POLICY,
        require_judge,
    ),
    drawn(pipeline_stages(PRESETS["policy"]), PRESETS["policy"]),
    "-readiness",
)
def readiness(config: PipelineConfig, checkpoint: str | None = None) -> dict[str, Any]:
    """Judge whether this policy may be optimised against this reward model, up to the planned KL: readiness v2.

    Args:
        config: data, reward model, policy, and in readiness the plan.
        checkpoint: a reward model that is there already, in place of a training: a checkpoint folder.

    Returns:
        {"results": the judgement, "figures": paths by name, "folder", "report": HTML file, "executed", "mlflow_url"}.

    Raises:
        ConfigError: the config has no policy, or no judge for its samples.
    """
    required_policy(config)

    def judged(refs: Mapping[str, ArtifactRef]) -> dict[str, Any]:
        found = read_json(refs["readiness_v2"], "readiness.json")
        name = f"{run_name_of(config, 'readiness')}-{run_key(refs)[:KEY_DIGITS]}"
        optimized = read_json(refs["overoptimization"], "overoptimization.json")
        reach = reach_of(optimized, config.readiness.planned_optimizer)
        return found | {"next_rung": next_rung(found["verdict"], config, [name], reach=reach)}

    view = Presentation(judged, readiness_block, captions=CAPTIONS)
    return run_chain(config, pipeline_stages(config), view, kind="readiness", checkpoint=checkpoint)


@configured_flow(
    "confirm",
    Form(
        "policy",
        OF_THE_MODEL
        | {"fresh_prompts": "policy.fresh_prompts", "judge": "policy.judge", "people": "policy.people"}
        | {"planned_kl": "readiness.planned_kl"}
        | NAMES,
        (*SERVED, "readiness"),
        WITH_POLICY,
    ),
    drawn(["confirmation"], PRESETS["policy"]),
    "-confirm",
)
def confirm(config: PipelineConfig, checkpoint: str | None = None) -> dict[str, Any]:
    """Serve best-of-n by this reward model on fresh prompts, as far as is planned, and say what was gained: level 4.

    Args:
        config: data, reward model, policy, in readiness the plan, and in policy how many fresh prompts and who judges.
        checkpoint: a reward model that is there already, in place of a training: a checkpoint folder.

    Returns:
        {"results": the stage's record with its verdict of the ladder, "figures", "folder", "report": HTML file,
        "executed", "mlflow_url"}.

    Raises:
        ConfigError: the config has no policy, only samples of one, or no judge of what it answers, or two.
        DataError: the plan goes further than best-of-n does.
        JudgementsWantedError: people have to answer first; the same call resumes when they have.
    """
    policy = required_policy(config)
    if policy.samples is not None:
        raise ConfigError(
            "policy.samples holds what a policy answered before, and fresh prompts have to be answered now; leave it "
            "out, and name the policy."
        )
    require_served_judge(policy, is_gold=config.is_gold)
    smallest_n(config.readiness.planned_kl)  # a plan that best-of-n cannot carry out is refused before anything runs

    def judged(refs: Mapping[str, ArtifactRef]) -> dict[str, Any]:
        found = read_json(refs["confirmation"], "confirmation.json")
        return found | {"verdict": verdict_on_served(found), "next_rung": None}

    view = Presentation(judged, confirmation_block)
    return run_chain(config, ["confirmation"], view, kind="confirm", checkpoint=checkpoint)


Mode = Literal["full", "rm", "policy"]


RLHF_FORM = Form(
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


@configured_flow("rlhf", RLHF_FORM, drawn(pipeline_stages(DRAWN), DRAWN), "-rlhf")
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
        RLHF_CAPTIONS,
    )
    return run_chain(config, ["grpo"], view, kind="rlhf", checkpoint=checkpoint)
