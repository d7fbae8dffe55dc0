"""Commands and settings that this release removed: one sentence each, shown in place of "no such command".

A line stays for one release. It says what replaced the command or setting, and why it was removed.
"""

from collections.abc import Mapping
from typing import Any

_DECIDED_NOTHING = "curvature decides nothing, so only the ends of its spectrum and its trace are measured."
_REFRESHED = (
    "no refresh of the reward model was shown to gain; the watch keeps the best checkpoint (rlhf.watch), and labels of "
    "its pairs may train the next reward model."
)
_TEN_BINS = "calibration errors are of ten bins everywhere."
_SINGLE = "single responses are always measured, too: it takes no time."
_THRESHOLDS = "evaluate.thresholds is of the held-out pairs; while it trains they are 0.3, 0.5 and 0.7."
_EVERY_PAIR = "every held-out pair counts; `accuracy_by_prompt` weighs each prompt alike."
_MAX_TOKENS = (
    "policy.judging.max_calls or max_cost is the budget; with price_read=1 and price_written=1, max_cost is in "
    "millions of tokens."
)
_CALLS_PER_MINUTE = "a server's `Retry-After` is obeyed, and policy.judging.concurrency limits the calls at a time."
_LION = "at equal tuning it was less accurate than adamw, the default (experiments/log/optimizers.md)."
COMMANDS: dict[str, str] = {
    "presets": "`rm-opt run --presets` lists the named runs.",
    "push": "`rm-opt card --checkpoint DIR --push OWNER/NAME` publishes the model with its card.",
    "best-of-n": "`rm-opt readiness best-of-n` is the same, with the same options.",
    "overoptimize": "`rm-opt readiness overoptimize` is the same, with the same options.",
    "status": "`rm-opt info` shows which services run, and where.",
    "readiness validate": "the study of what readiness predicts is finished; its result is in docs/readiness.md.",
    "active study": "no acquisition function saved labels on real pairs; `rm-opt data propose` and `ingest` stay.",
    "soup": "averages of weights passed only for models nudged apart by hand; `rm-opt ensemble` averages rewards.",
    "why": "`rm-opt store why` says it.",
    "sync": "`rm-opt store sync` sends the runs.",
    "active propose": "`rm-opt data propose` chooses the pairs.",
    "active ingest": "`rm-opt data ingest` takes the labels back.",
    "trajectory": "`--set 'train.callbacks=[calibration,curvature]'` measures λmax, λmin and the trace at every "
    "evaluation of a training and draws them in its report; `rm-opt analyze` measures one checkpoint.",
}
"""By the words of the command, as in `trajectory` or `active simulate`."""
OPTIONS: dict[str, str] = {
    **dict.fromkeys(("--num-bins", "--calibration-bins"), _TEN_BINS),
    **dict.fromkeys(("--per-response", "--no-per-response"), _SINGLE),
    "--eval-threshold": _THRESHOLDS,
    "--optimizer lion": _LION,
    "--heads": "heads on one model's features repeat each other and tell nothing of unusual texts that length does not "
    "(docs/readiness.md); name several checkpoints.",
    "--eval-pairs-per-prompt": _EVERY_PAIR,
    "--max-tokens": _MAX_TOKENS,
    "--calls-per-minute": _CALLS_PER_MINUTE,
    "--start-port": "the start page is gone: runs and schedules are in Prefect, reports are with their runs in MLflow, "
    "and `rm-opt worker --server` takes Prefect's address.",
    "--refreshes": _REFRESHED,
    "--skip": "the curvature was all that it left out; it is measured with `--set landscape.method=lanczos`, only.",
    "--runner ray": "one engine for many machines is enough: `--runner pool`, whose cells survive the command and the "
    "server and can be handed back; `rm-opt score --engine ray` and `ray:` sources stay.",
    **dict.fromkeys(
        ("--acquisition bald", "--acquisition d-optimal"),
        "it saved no label on real pairs; `entropy`, the default, is the one that was not refuted.",
    ),
}
"""By the option, with its value where only that was removed."""
PRESETS: dict[str, str] = {
    "trajectory": COMMANDS["trajectory"],
    **dict.fromkeys(("validation", "validation-smoke"), COMMANDS["readiness validate"]),
    **dict.fromkeys(("active", "active-pairs", "active-smoke"), COMMANDS["active study"]),
}
"""By the name of the preset, which files that `rm-opt init` wrote begin with."""
SETTINGS: dict[str, str] = {
    **dict.fromkeys(
        (f"readiness.{part}_weight" for part in ("accuracy", "calibration", "stability", "landscape")),
        "the original score decides nothing, so it has the weights of its definition; "
        "`RLReadinessScorer(weights)` takes others in Python.",
    ),
    **dict.fromkeys(("evaluate.num_bins", "train.calibration_bins"), _TEN_BINS),
    "evaluate.per_response": _SINGLE,
    "train.eval_thresholds": _THRESHOLDS,
    "data.eval_pairs_per_prompt": _EVERY_PAIR,
    "policy.num_members": "the heads told nothing of a policy that its samples do not, so there are none.",
    "policy.judging.max_tokens": _MAX_TOKENS,
    "policy.judging.calls_per_minute": _CALLS_PER_MINUTE,
    "train.nuisance": "best of 64 gained no true reward by it; rlhf.length_penalty does while a policy is trained.",
    "rlhf.stop_on_disagreement": "disagreement stayed in its range while the true reward fell; rlhf.watch sees it.",
    "rlhf.aggregate": "members that share a backbone share its flaw, so their combined reward gained nothing.",
    "rlhf.reward_clip": "a clip flattens what is far, and what policies exploit is not far: it gained no true reward.",
    "rlhf.refresh_every": _REFRESHED,
    "rlhf.refresh_pairs": _REFRESHED,
    "rlhf.watch.refreshes": _REFRESHED,
    "rlhf.refresh_steps": _REFRESHED,
    "rlhf.refresh_lr": _REFRESHED,
    "policy.gradient_prompts": "the variance of the policy gradient decided nothing.",
    "validation": "the study of what readiness predicts is finished; its result is in docs/readiness.md.",
    "active": "the study of what active learning saves is finished: nothing on real pairs (experiments/log/).",
    "train.curriculum": "easy pairs first cost 1.6 points of accuracy; `CurriculumSampler` stays in Python.",
    "train.curriculum_margins": "easy pairs first cost 1.6 points of accuracy; `CurriculumSampler` stays in Python.",
    "train.group_prompts": "it computed fewer tokens and added as much gradient variance: nothing was gained.",
    "explain.train_pairs": "influence of training pairs had a rank correlation of 0.2 with retraining under AdamW.",
    "explain.memory_gib": "it bounded the memory of training-pair influence, which was removed.",
    "train.num_nodes": "a stage trains on one host; torchrun starts `rm-opt train` on several (docs/training.md).",
    "skip": "the curvature was all that it left out, and is measured where a setting of landscape is given, only.",
    "landscape.minutes": "what was measured depended on how busy the machine was, so counts say it now: "
    "landscape.num_pairs, landscape.lanczos_steps, landscape.trace_probes.",
    "landscape.checkpoint": "the stage measures the kept checkpoint, and `rm-opt analyze --checkpoint DIR` any other.",
    "landscape.parts": f"{_DECIDED_NOTHING} λmax at margins of size 1 is landscape.normalized=true.",
    "landscape.density_vectors": _DECIDED_NOTHING,
    "landscape.layer_steps": f"{_DECIDED_NOTHING} landscape.parameters measures one layer.",
    "landscape.slice_points": _DECIDED_NOTHING,
    "landscape.surface_points": _DECIDED_NOTHING,
}
"""By the dotted name of a setting or of a whole group, as in `landscape.minutes`."""
VALUES: dict[str, str] = {"train.optimizer=lion": _LION}
"""By the dotted name of a setting and a value that it no longer has."""
DEPLOYMENTS: dict[str, str] = {
    **{
        name: f"{new} is the same: Prefect lists by name, and what is used most comes first"
        for name, new in {
            "benchmark": "public-benchmarks",
            "cell": "worker-cell",
            **{name: f"policy-{name}" for name in ("best-of-n", "confirm", "overoptimize", "readiness", "rlhf")},
        }.items()
    },
    **{
        name: f"its schedule is {name} of the deployment experiment, paused until you resume it there"
        for name in ("nightly-ablation", "weekly-optimizers")
    },
}
"""Deployments of Prefect that an earlier `rm-opt up` left, by name; the next one deletes them."""
AS_NOW: dict[str, Any] = {
    "train.calibration_bins": 10,
    "evaluate.num_bins": 10,
    "data.eval_pairs_per_prompt": None,
    "train.curriculum": "none",
    "train.group_prompts": 1,
    "train.nuisance": [],
    "rlhf.stop_on_disagreement": False,
    "rlhf.aggregate": "one",
    "rlhf.reward_clip": None,
    "rlhf.refresh_every": None,
    "rlhf.watch.refreshes": 0,
    "validation": None,
    "train.num_nodes": 1,
    "active": None,
}
"""Values with which a run was one of today. Without another value its outcome would be another one; all further
settings above only measured, or were about one that is here."""
DEFAULTS: dict[str, Any] = AS_NOW | {
    "readiness.accuracy_weight": 0.35,
    "readiness.calibration_weight": 0.25,
    "readiness.stability_weight": 0.25,
    "readiness.landscape_weight": 0.15,
    "evaluate.per_response": True,
    "train.eval_thresholds": [0.3, 0.5, 0.7],
    "policy.judging.max_tokens": None,
    "policy.judging.calls_per_minute": None,
    "skip": [],
}
"""Values that a file of an earlier version may have, because they were defaults: it means the same without them."""


def removed_setting(name: str) -> str | None:
    """Return what a user is told of a setting that a release before had, or None of any other name."""
    group = name
    while group not in SETTINGS and "." in group:
        group = group.rpartition(".")[0]
    return f"the setting {name} was removed: {SETTINGS[group]}" if group in SETTINGS else None


def removed_value(name: str, value: object) -> str | None:
    """Return what a user is told of a value that a setting no longer has, or None of any other value."""
    given = f"{name}={value}" if isinstance(value, str) else ""
    return f"{given} was removed: {VALUES[given]}" if given in VALUES else None


def without_removed(recorded: Mapping[str, Any], group: str = "") -> tuple[dict[str, Any], list[str]]:
    """Settings that an earlier version recorded of a run, without those that were removed, and the names of these.

    One that made the outcome another (`AS_NOW`) stays, so that it is refused by name.
    """
    kept: dict[str, Any] = {}
    removed: list[str] = []
    for name, value in recorded.items():
        where = f"{group}{name}"
        if removed_setting(where) is not None and value == AS_NOW.get(where, value):
            removed.append(where)
        elif isinstance(value, Mapping):
            kept[name], inside = without_removed(value, f"{where}.")
            removed += inside
        else:
            kept[name] = value
    return kept, removed
