"""Checks of what a run needs, before hours are spent: by the run itself, and by the plan of one."""

from collections.abc import Sequence
from pathlib import Path

from rmcore.config.pipeline import PipelineConfig
from rmcore.core.errors import ConfigError, DataError
from rmcore.policy.grpo.rlhf_requirements import require_rlhf
from rmcore.policy.judge import audit_of, require_named_judge
from rmcore.stages.order import is_judged, only_starts_reward_model, required_policy
from rmcore.stages.stages import OPTIONAL, STAGES


def require_run(config: PipelineConfig) -> None:
    """Refuse a run of the pipeline that could not come to its end.

    Raises:
        ConfigError: there is a policy and no judge of its samples, or no benchmark of a name.
        DataError: the judged answers that are named tell nothing.
    """
    if not only_starts_reward_model(config):
        require_judge(config)
    for name in OPTIONAL:
        if (settings := getattr(config, name)) is not None:
            STAGES[name].require(settings)
    if config.evaluate.answers is not None:
        require_answers(config.evaluate.answers)
    if config.rlhf is not None:
        policy = required_policy(config)
        require_rlhf(config.rlhf, policy.judge, policy.verdict_judging, is_gold=config.is_gold)


def require_judge(config: PipelineConfig) -> None:
    """Refuse to judge a policy's samples where their true reward is unknown.

    Raises:
        ConfigError: there is a policy, the data are not the synthetic benchmark's, and neither judged samples nor a
            judge are named. A training of the policy continues without: nothing but its own rise can be shown then.
    """
    policy = config.policy
    if policy is not None and policy.judge is not None:
        if policy.samples is None:
            require_named_judge(policy.judge, policy.judging)
        else:  # it has judged them before, and its audit says how far to trust it
            audit_of(policy.judge, policy.judging)
    if policy is not None and config.rlhf is None and not is_judged(config):
        raise ConfigError(
            "readiness v2 needs the true reward of the policy's samples, which is unknown for "
            f"{config.data.source}. Draw samples with `rm-opt readiness best-of-n`, have them judged, and name the "
            "file in policy.samples; or name a judge in policy.judge: openai:MODEL@URL, or a function of (prompt, "
            "response); or leave the policy out, for a verdict on labelled pairs alone."
        )


def require_answers(path: str, metrics: Sequence[str] = ()) -> None:
    """Read a file of judged answers; which prompts are trained on is not known yet.

    Args:
        path: of the file.
        metrics: of cells that are to be measured on it.

    Raises:
        DataError: it tells nothing, see `read_judged_answers`, or too few prompts have the answers of a metric.
    """
    from rmcore.readiness.judged_answers import read_judged_answers  # pandas and scipy, which most runs need not yet
    from rmcore.readiness.logged_answers import MIN_PROMPTS
    from rmcore.study.cells import ANSWER_METRICS

    sizes = read_judged_answers(Path(path)).table.groupby("prompt_id").size()
    for name in metrics:
        enough = int((sizes > ANSWER_METRICS.get(name, 0)).sum())
        if name in ANSWER_METRICS and enough < MIN_PROMPTS:
            raise DataError(
                f"{enough} prompts of {path} have more than {ANSWER_METRICS[name]} distinct judged answers, and {name} "
                f"takes {MIN_PROMPTS}; judge answers to more prompts, or more of each, or leave that metric out."
            )
