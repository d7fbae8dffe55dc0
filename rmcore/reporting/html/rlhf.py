"""The outcome of a training against the reward model, as people read it: in the report, in a terminal, in Prefect."""

from collections.abc import Mapping
from typing import Any

from rmcore.reporting.figures import numbers
from rmcore.reporting.html.blocks import Block, Table
from rmcore.reporting.html.policy import EMPTY, shown

CAPTIONS = {
    "rlhf": "The proxy is what the policy is trained on, so it rises. Where the true reward no longer follows, "
    "training on does harm. The dashed curves are best-of-n by the same reward model: what the same KL buys without "
    "any training.",
    "watch": "What the watch knew, by few labels. Evidence above the dashed line convinces; each of the two that end a "
    "training is wrong in at most one of twenty by default, however often one looks. The curve on the left is a smooth "
    "guess; no alarm rests on it.",
}
REWARDS = {"vllm": "a vLLM reward server", "local": "the reward model in the training's process"}
RLHF_HEADINGS = ("step", "KL, nats", "proxy gain, sd", "gain of the true reward, sd", "win rate", "tokens")
DIGITS = (("kl", 2), ("proxy", 2), ("gold", 2), ("win_rate", 2), ("num_tokens", 0))
"""Decimals of each column after the step."""
WATCH_HEADINGS = (
    "seed", "step", "KL, nats", "against step", "pairs", "difference", "turned, nats", "stopped, nats", "what follows"
)  # fmt: skip


def _points(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row a measured step; what nobody judged is a dash."""
    return [
        (str(point["step"]), *("-" if point[name] is None else _short(point[name], digits) for name, digits in DIGITS))
        for point in record["curve"]
    ]


def _looks(seed: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list((seed.get("watch") or {"looks": []})["looks"])


def watch_rows(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row a look; none where nobody watched."""
    rows: list[tuple[str, ...]] = []
    for seed in record["seeds"]:
        looks = _looks(seed)
        steps = [0, *(look["step"] for look in looks)]
        rows += [
            (
                str(seed["seed"]),
                str(look["step"]),
                f"{look['kl']:.2f}",
                "the start" if look["reference"] == 0 else str(steps[look["reference"]]),
                str(look["num_pairs"]),
                f"{look['difference']:+.2f} ± {look['error']:.2f}",
                f"{look['turned']:+.1f}",
                f"{look['stopped']:+.1f}",
                f"{look['action'].replace('_', ' ')}: {look['reason']}",
            )
            for look in looks
        ]
    return rows


def _watched(record: Mapping[str, Any]) -> list[str]:
    watches = [(one["seed"], one["watch"]) for one in record["seeds"] if one.get("watch")]
    saved = [] if len(watches) < 2 else [f"model/ is the policy of seed {record['saved_seed']}"]
    return [
        f"seed {seed}: "
        + ("the start is kept" if not watch["kept_step"] else f"kept is step {watch['kept_step']}")
        + f", after {watch['labels']} labels on the way and {watch['final_labels']} for what was gained"
        for seed, watch in watches
    ] + saved


def _findings(record: Mapping[str, Any]) -> list[str]:
    """Sentences below the table: first what speaks against the verdict."""
    verdict = record["verdict"]
    seeds = record["num_seeds"]
    intervals = f"over {seeds} seeds and the prompts that they share" if seeds > 1 else "over prompts, not seeds"
    penalties = [] if record["kl_beta"] == 0 else [f"KL penalty {record['kl_beta']:g}"]
    penalties += [] if record["length_penalty"] == 0 else [f"{record['length_penalty']:g} off for each token"]
    lines = list(verdict["reasons"])
    lines += [f"seed {one['seed']} ended early: {one['stopped']}" for one in record["seeds"] if one["stopped"]]
    lines += _watched(record)
    lines += [
        f"GRPO with the loss {record['loss']}, {record['num_steps']} steps of {record['prompts_per_step']} prompts "
        f"with {record['group_size']} samples each, learning rate {record['learning_rate']:g}"
        + "".join(f", {one}" for one in penalties),
        f"rewards: the reward model's own, from {REWARDS[record['rewards']]}; the true reward: {record['judge']}",
        *_several(record.get("several")),
        _samples(record.get("parity")),
        f"measured on {record['num_prompts']} held-out prompts with {record['samples_per_prompt']} samples each, "
        f"against stored samples of the start policy; 95 % intervals {intervals}",
    ]
    cost = record["cost"]
    return [
        *lines,
        f"{numbers.duration(cost['train_seconds'])} of training and measuring, {cost['tokens_per_second']:,.0f} "
        f"response tokens/s while training, {cost['peak_mib']:,.0f} MiB at most",
    ]


def _several(several: Mapping[str, Any] | None) -> list[str]:
    """How each of several rewards moved on what was trained on; nothing where there was one."""
    if several is None:
        return []
    first, last = several["steps"][0], several["steps"][-1]
    parts = [
        f"the mean of {name} (weight {weight:g}) went from {before:.3g} to {after:.3g}"
        for name, weight, before, after in zip(
            several["names"], several["weights"], first["means"], last["means"], strict=True
        )
    ]
    return [
        "several rewards, each normalised within its groups and then summed: " + "; ".join(parts),
        "the proxy and best-of-n are those of the reward model's own reward alone",
    ]


def rlhf_block(record: Mapping[str, Any]) -> Block:
    """A training against the reward model: the curve, the watch's looks, examples.

    Args:
        record: of the stage grpo (`rmcore.stages.grpo`).
    """
    return Block(
        record["verdict"]["headline"],
        text=(
            "The policy was trained by GRPO to raise the reward model's reward (the proxy). Gains are over the policy "
            "as it began, in standard deviations within prompts, so they compare with best-of-n. The win rate is how "
            "often a sample of the trained policy is judged better than one of the start policy; ties count half.",
        ),
        figures=("rlhf",),
        tables=(Table(RLHF_HEADINGS, _points(record), left=()),),
        findings=_findings(record),
        parts=[*_watch(record), *_examples(record)],
    )


def _watch(record: Mapping[str, Any]) -> list[Block]:
    looks = [look for seed in record["seeds"] for look in _looks(seed)]
    if not looks:
        return []
    about = (
        "At each look the policy was compared with an earlier one on prompts that had not been used. Evidence of "
        f"{looks[0]['needed']:.1f} nats convinces: that the true reward has turned, or that it gains less than is "
        "useful since half of its distance. A plateau is no alarm."
    )
    table = Table(WATCH_HEADINGS, watch_rows(record), left=(len(WATCH_HEADINGS) - 1,))
    return [Block("What the judge's few labels said on the way", text=(about,), figures=("watch",), tables=(table,))]


def _examples(record: Mapping[str, Any]) -> list[Block]:
    """The first final prompts with the answers of the start and of the kept policy: not chosen for how they look."""
    watch = record["seeds"][0].get("watch") or {"final": None}
    final = watch["final"] or {"examples": []}
    if not final["examples"] or not watch["kept_step"]:
        return []
    rows = [
        (*(one[name] or EMPTY for name in ("prompt", "before", "after")), f"{one['difference']:+.2f} {watch['unit']}")
        for one in final["examples"]
    ]
    about = "The first prompts of the final measurement, whatever became of them, with the difference as judged."
    headings = ("prompt", "the start policy", "the kept policy", "after − before")
    return [Block("Before and after", text=(about,), tables=(Table(headings, rows, left=range(3)),))]


def _samples(parity: Mapping[str, Any] | None) -> str:
    """Who drew the samples, and how far its probabilities were from the trainer's."""
    if parity is None:
        return "samples: drawn in the training's process"
    return (
        "samples: drawn by a vLLM that has each step's own weights; over the "
        f"{parity['num_tokens']:,} tokens of {parity['num_steps']} steps its log-probabilities are "
        f"{parity['mean_difference']:.2g} nats from the trainer's on average and {parity['max_difference']:.2g} at "
        f"most, which truncated importance sampling corrects; {parity['truncated_share']:.2%} of its weights were cut"
    )


def _short(value: Mapping[str, Any], digits: int) -> str:
    """With few decimals, so that all columns fit on a page."""
    if value["value"] is None or value["ci_low"] is None:
        return shown(value)
    return f"{value['value']:.{digits}f} ({value['ci_low']:.{digits}f} to {value['ci_high']:.{digits}f})"
