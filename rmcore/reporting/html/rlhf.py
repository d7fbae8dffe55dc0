"""The outcome of a training against the reward model, as people read it: in the report, in a terminal, in Prefect."""

from collections.abc import Mapping
from typing import Any

from rmcore.reporting.figures import numbers
from rmcore.reporting.html.markdown import bullets, escape, text_table
from rmcore.reporting.html.policy import EMPTY, shown

CAPTIONS = {
    "rlhf": "The proxy is what the policy is trained on, so it rises. Where gold no longer follows, training on does "
    "harm. The dashed curves are best-of-n by the same reward model: what the same KL buys without any training.",
    "watch": "What the watch knew, by few labels. Evidence above the dashed line convinces; each of the two that end a "
    "training is wrong in at most one of twenty by default, however often one looks. The curve on the left is a smooth "
    "guess; no alarm rests on it.",
}
REWARDS = {"vllm": "a vLLM reward server", "local": "the reward model in the training's process"}
RLHF_HEADINGS = ("step", "KL, nats", "proxy gain, sd", "gold gain, sd", "win rate", "disagreement", "tokens")
DIGITS = (("kl", 2), ("proxy", 2), ("gold", 2), ("win_rate", 2), ("disagreement", 2), ("num_tokens", 0))
"""Decimals of each column after the step."""
WATCH_HEADINGS = (
    "seed", "step", "KL, nats", "against step", "pairs", "difference", "turned, nats", "stopped, nats", "what follows"
)  # fmt: skip
STOP_HEADINGS = (
    "seed",
    "the rule stops at",
    "gold there, sd",
    "gold peaks at",
    "gold there, sd",
    "gold at the end, sd",
)


def rlhf_rows(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row a measured step; what nobody judged is a dash."""
    return [
        (str(point["step"]), *("-" if point[name] is None else _short(point[name], digits) for name, digits in DIGITS))
        for point in record["curve"]
    ]


def stop_rows(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The rule by disagreement beside the truth, one row a seed; none where there is no rule."""
    return [
        (
            str(one["seed"]),
            "nowhere" if one["stop_step"] is None else f"step {one['stop_step']}",
            _gain(one["stop_gold"]),
            "not known" if one["peak_step"] is None else f"step {one['peak_step']}",
            _gain(one["peak_gold"]),
            _gain(one["last_gold"]),
        )
        for one in (record["early_stop"] or {"seeds": []})["seeds"]
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


def watch_examples(record: Mapping[str, Any]) -> list[dict[str, str]]:
    """The first final prompts with the answers of the start and of the kept policy: not chosen for how they look."""
    watch = record["seeds"][0].get("watch") or {"final": None}
    return [
        {name: one[name] or EMPTY for name in ("prompt", "before", "after")}
        | {"difference": f"{one['difference']:+.2f} {watch['unit']}"}
        for one in (watch["final"] or {"examples": []})["examples"]
        if watch["kept_step"]
    ]


def _watched(record: Mapping[str, Any]) -> list[str]:
    watches = [(one["seed"], one["watch"]) for one in record["seeds"] if one.get("watch")]
    saved = [] if len(watches) < 2 else [f"model/ is the policy of seed {record['saved_seed']}"]
    return [
        f"seed {seed}: "
        + ("the start is kept" if not watch["kept_step"] else f"kept is step {watch['kept_step']}")
        + f", after {watch['labels']} labels on the way and {watch['final_labels']} for what was gained"
        for seed, watch in watches
    ] + saved


def rlhf_findings(record: Mapping[str, Any]) -> list[str]:
    """Sentences below the table, the verdict first."""
    verdict = record["verdict"]
    seeds = record["num_seeds"]
    intervals = f"over {seeds} seeds and the prompts that they share" if seeds > 1 else "over prompts, not seeds"
    penalties = [] if record["kl_beta"] == 0 else [f"KL penalty {record['kl_beta']:g}"]
    penalties += [] if record["length_penalty"] == 0 else [f"{record['length_penalty']:g} off for each token"]
    lines = [verdict["headline"], *verdict["reasons"]]
    lines += [f"seed {one['seed']} ended early: {one['stopped']}" for one in record["seeds"] if one["stopped"]]
    lines += _watched(record)
    lines += [
        f"GRPO with the loss {record['loss']}, {record['num_steps']} steps of {record['prompts_per_step']} prompts "
        f"with {record['group_size']} samples each, learning rate {record['learning_rate']:g}"
        + "".join(f", {one}" for one in penalties),
        f"rewards: the reward model's own, from {REWARDS[record['rewards']]}; gold: {record['judge']}",
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
    """How much each of several rewards made of what was trained on; nothing where there was one."""
    if several is None:
        return []
    first, last = several["steps"][0], several["steps"][-1]
    made = several["shares"] or [0.0] * len(several["names"])
    parts = [
        f"{name} (weight {weight:g}) made {share:.0%} of the advantages, and its mean went from {before:.3g} to "
        f"{after:.3g}"
        for name, weight, share, before, after in zip(
            several["names"], several["weights"], made, first["means"], last["means"], strict=True
        )
    ]
    return [
        "several rewards, each normalised within its groups and then summed: " + "; ".join(parts),
        "the proxy, the members and best-of-n are those of the reward model's own reward alone",
    ]


def rlhf_section(record: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Gather the values that the report prints, numbers as text; None where no policy was trained."""
    if record is None:
        return None
    rule = record["early_stop"]
    return {
        "headline": record["verdict"]["headline"],
        "headings": RLHF_HEADINGS,
        "points": rlhf_rows(record),
        "findings": rlhf_findings(record)[1:],
        "watch_headings": WATCH_HEADINGS,
        "looks": watch_rows(record),
        "needed": next((f"{look['needed']:.1f}" for one in record["seeds"] for look in _looks(one)), ""),
        "examples": watch_examples(record),
        "stop_headings": STOP_HEADINGS,
        "stops": stop_rows(record),
        "threshold": numbers.MISSING if rule is None else numbers.decimal(rule["threshold"]),
    }


def rlhf_markdown(record: Mapping[str, Any]) -> str:
    """Verdict, points and findings."""
    parts = [f"# {escape(record['verdict']['headline'])}", text_table(RLHF_HEADINGS, rlhf_rows(record))]
    parts.append(bullets(line.replace("<", "&lt;") for line in rlhf_findings(record)[1:]))
    return "\n\n".join(parts) + "\n"


def _samples(parity: Mapping[str, Any] | None) -> str:
    """Who drew the samples, and how far its probabilities were from the trainer's."""
    if parity is None:
        return "samples: drawn in the training's process"
    behind = parity["max_steps_behind"]
    weights = f"weights up to {behind} steps old" if behind else "each step's own weights"
    return (
        f"samples: drawn by a vLLM that has {weights}; over the "
        f"{parity['num_tokens']:,} tokens of {parity['num_steps']} steps its log-probabilities are "
        f"{parity['mean_difference']:.2g} nats from the trainer's on average and {parity['max_difference']:.2g} at "
        f"most, which truncated importance sampling corrects; {parity['truncated_share']:.2%} of its weights were cut"
    )


def _short(value: Mapping[str, Any], digits: int) -> str:
    """With few decimals, so that all columns stand beside each other on a page."""
    if value["value"] is None or value["ci_low"] is None:
        return shown(value)
    return f"{value['value']:.{digits}f} ({value['ci_low']:.{digits}f} to {value['ci_high']:.{digits}f})"


def _gain(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f}"
