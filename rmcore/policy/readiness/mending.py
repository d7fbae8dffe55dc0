"""The step that mends what labelled pairs speak against: one command that changes the named run.

While checks on labelled pairs fail or are undecided, a policy's samples would only show at a higher price what is
known, so the next step is here and not on the next evidence level. Causes are considered in the order in which one
hides the next: a broken training, one that learned next to nothing, pairs learned by heart, too few pairs.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rmcore.config.data import DataConfig
from rmcore.config.pipeline import PipelineConfig
from rmcore.evaluation.diagnosis import ECE, OVER_BASELINE, OVERFITTING, REVERSED, UNDER_TRAINED, WILD, Diagnosis
from rmcore.reporting.schema import NextRung, Verdict

OFTENER, HIGHER, LOWER = 3, 3, 4
"""Factors of the next try: passes, and learning rates that were too low or too high."""
MANY_STEPS, MANY_PASSES = 300, 6
"""From here on more of the same training is no longer the first thing to try."""
LARGEST_TEST = 0.4
"""Most pairs that are held out: more are missed in the training."""
GAP = "train_test_gap"
_MORE_PAIRS = "MORE_PAIRS"


class Trained(NamedTuple):
    """A run that is to be mended: its name for `--from`, and what its training was."""

    name: str
    config: PipelineConfig
    num_steps: int
    num_passes: float
    seconds: float


def mending_step(
    verdict: Verdict,
    found: Sequence[Diagnosis],
    checks: Sequence[Mapping[str, Any]],
    metrics: Mapping[str, Any],
    run: Trained,
) -> NextRung | None:
    """Name what would mend a verdict on labelled pairs; None where it passes, or where other evidence is against it.

    That are logged answers where no check on the pairs fails, and samples where some were judged.

    Args:
        verdict: as it is.
        found: by `diagnose_outcome` and `diagnose`.
        checks: on labelled pairs, as records.
        metrics: of the held-out pairs, as records.
        run: what was run.
    """
    if not _is_to_mend(verdict):
        return None
    seen = {one.diagnosis for one in found}
    return _mended_training(verdict, seen, run) or _mended_fit(verdict, seen, checks, metrics, run)


def _is_to_mend(verdict: Verdict) -> bool:
    return verdict["rung"] <= 2 and verdict["status"] != "passes"  # on samples, these have the word


def _mended_training(verdict: Verdict, seen: set[str], run: Trained) -> NextRung | None:
    """Name what mends a training that did not work; None of one that did."""
    rate = run.config.train.lr
    if WILD in seen:
        return _again(verdict, run, "a training that does not explode", {"train.lr": rate / LOWER})
    if UNDER_TRAINED in seen:  # margins of such a model mean nothing yet, reversed or not
        if run.num_steps >= MANY_STEPS:
            return _again(verdict, run, "a training that learns", {"train.lr": rate * HIGHER})
        return _longer(verdict, run, "a training that is long enough to learn")
    if REVERSED in seen and run.config.data.source != "gold":
        return {
            "rung": verdict["rung"],
            "evidence": "labels the right way round: look at which column is read as chosen",
            "command": shlex.join(["rm-opt", "data", "check", run.config.data.source, *_reading(run.config.data)]),
            "cost": "seconds",
        }
    return None


def _reading(data: DataConfig) -> list[str]:
    """The options of `rm-opt data check` with which it reads a source as the run has read it."""
    names = ("split", "prompt_column", "chosen_column", "rejected_column", "margin_column", "grade_columns", "limit")
    words: list[str] = []
    for name in names:
        value = getattr(data, name)
        if value != DataConfig.model_fields[name].default:
            option = f"--{name.replace('_', '-')}"
            words += [word for one in (value if isinstance(value, tuple) else (value,)) for word in (option, str(one))]
    return words


def _mended_fit(
    verdict: Verdict, seen: set[str], checks: Sequence[Mapping[str, Any]], metrics: Mapping[str, Any], run: Trained
) -> NextRung | None:
    """Name what mends a training that worked: fewer passes, more of them, or more pairs; None where no check fails."""
    failed = {check["name"]: check for check in checks if not check["passed"]}
    decided = {name for name, check in failed.items() if not check["unclear"] and check["value"] is not None}
    by_heart = OVERFITTING in seen or GAP in decided
    temperature = metrics.get("temperature", {}).get("value") or 1.0
    is_sure = failed.keys() == decided == {ECE} and temperature > 1
    if (by_heart or is_sure) and run.num_passes > 1.5:  # of one pass there is no half
        what = "fewer passes: it learned its pairs by heart" if by_heart else "fewer passes: it is too sure of itself"
        return _again(verdict, run, what, _length(run, 0.5))
    if not failed:
        return None
    if run.num_passes < 1 and run.num_steps < MANY_STEPS:
        return _longer(verdict, run, "a training that sees all of its pairs")
    is_short = run.num_passes < MANY_PASSES and run.num_steps < MANY_STEPS
    if is_short and not by_heart and decided and not is_sure:
        return _longer(verdict, run, "a longer training")
    over = metrics.get(OVER_BASELINE, {}) if OVER_BASELINE in failed.keys() - decided else {}
    return _more_pairs(verdict, run, over, is_open=not decided)


def _longer(verdict: Verdict, run: Trained, what: str) -> NextRung:
    return _again(verdict, run, what, _length(run, OFTENER))


def _length(run: Trained, times: float) -> dict[str, Any]:
    """The settings that make a training so many times as long, in whole passes where it counts passes."""
    if (steps := run.config.train.steps) is not None:
        return {"train.steps": max(1, round(steps * times))}
    passes = run.num_passes * times
    return {"train.epochs": math.ceil(passes) if times > 1 else max(1, round(passes))}


def _again(verdict: Verdict, run: Trained, what: str, changed: Mapping[str, Any]) -> NextRung:
    words = ["rm-opt", "run", "--from", run.name]
    words += [word for name, value in changed.items() for word in ("--set", f"{name}={value:g}")]
    before = run.config.train.steps or run.num_passes
    times = next((value / before for name, value in changed.items() if name != "train.lr"), 1.0)
    seconds = run.seconds * times
    took = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
    return {
        "rung": verdict["rung"],
        "evidence": what,
        "command": shlex.join(words),
        "cost": f"one training, about {took}, and no new label",
    }


def _more_pairs(verdict: Verdict, run: Trained, over: Mapping[str, Any], is_open: bool) -> NextRung:
    """More held-out pairs where these may decide, else more labelled ones."""
    data = run.config.data
    wanted = pairs_to_decide(over)
    if data.source == "gold":
        return _again_with(verdict, run, "more pairs", f"data.gold.num_prompts={2 * data.gold.num_prompts}", "no label")
    if is_open and data.eval_source is None and data.eval_split is None and data.test_fraction < LARGEST_TEST:
        share = min(LARGEST_TEST, 1 - data.validation_fraction - 0.1, 2 * data.test_fraction)
        if wanted is not None and wanted <= over["num"] * share / data.test_fraction:
            cost = "no new label: fewer pairs are trained on"
            return _again_with(verdict, run, "more held-out pairs", f"data.test_fraction={share:g}", cost)
    setting = "data.source" if data.eval_source is None or not is_open else "data.eval_source"
    enough = "" if wanted is None else f"; about {wanted:,} held-out ones would decide, if it stays as good"
    return _again_with(verdict, run, f"more labelled pairs{enough}", f"{setting}={_MORE_PAIRS}", "their labels")


def _again_with(verdict: Verdict, run: Trained, what: str, setting: str, cost: str) -> NextRung:
    command = shlex.join(["rm-opt", "run", "--from", run.name, "--set", setting])
    return {"rung": verdict["rung"], "evidence": what, "command": command, "cost": cost}


def pairs_to_decide(over: Mapping[str, Any]) -> int | None:
    """Held-out pairs with which the lower end would come to 0, were the value to stay; None where none do, or it is.

    The half-width of an interval falls with the square root of their number.

    >>> pairs_to_decide({"value": 0.05, "ci_low": -0.05, "ci_high": 0.15, "num": 100})
    400
    """
    value, low = over.get("value"), over.get("ci_low")
    if value is None or low is None or value <= 0 or low > 0:
        return None
    return math.ceil(over["num"] * round(((value - low) / value) ** 2, 6))


def mending_of_checkpoint(
    verdict: Verdict, model: Sequence[str], data: DataConfig, trained_on: str | None = None
) -> NextRung | None:
    """Name what would mend a verdict on a checkpoint that no run is known of; None as in `mending_step`.

    Args:
        verdict: as it is.
        model: words by which a command finds the checkpoint and reads with it.
        data: the pairs as they were read.
        trained_on: the pairs that it was trained on; None: not named.
    """
    if not _is_to_mend(verdict):
        return None
    if verdict["status"] == "unclear":
        more = data.model_copy(update={"source": _MORE_PAIRS, "limit": None})
        what, words, cost = "more labelled pairs", ["readiness", "pairs"], "their labels"
        last = ["--train-data", trained_on or "PAIRS_IT_WAS_TRAINED_ON"]
    else:
        more, what, words, cost, last = data, "what it gets wrong, and why", ["probe"], "minutes", ["--explain"]
    words += [*model, "--data", more.source, *_reading(more), *last]
    return {"rung": verdict["rung"], "evidence": what, "command": shlex.join(["rm-opt", *words]), "cost": cost}
