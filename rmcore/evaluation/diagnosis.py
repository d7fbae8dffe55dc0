"""Reading a training run: a table of symptoms, and the gate before scaling up.

Logged numbers are noisy, so symptoms are judged on means over thirds of the run rather than on single points. The
thresholds are this module's own reading of "falls", "stuck" and "oscillates", named below.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rmcore.evaluation.ranking import OVER_BASELINE

ACCURACY_CHANGE = 0.02
"""A change of mean accuracy between thirds of the run that counts: two points."""
STUCK_IMPROVEMENT = 0.02
"""A loss is stuck when its last third is less than this share below its first third ..."""
STUCK_LOSS = 0.9 * math.log(2)
"""... and still within a tenth of the coin flip's loss log 2: a flat low loss is a finished run."""
EXPLODED_FACTOR = 2.0
"""A loss exploded when its last third is at this multiple of its best third, and above log 2."""
OSCILLATION = 0.03
"""Mean change of eval accuracy from one evaluation to the next, in the last half, that counts as oscillation ..."""
TURNING_SHARE = 0.5
"""... when at least this share of the possible turning points turn."""


UNDER_TRAINED, STUCK, OVERFITTING, REVERSED, WILD = (
    "under-trained",
    "learning rate too low",
    "overfitting",
    "reversed model",
    "learning rate too high",
)
"""Diagnoses that a next step follows from."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One symptom that was seen, what it means and what to do."""

    symptom: str
    diagnosis: str
    advice: str


def diagnose(history: Sequence[Mapping[str, Any]]) -> list[Diagnosis]:
    """The symptoms of the table that a training history shows, most urgent first.

    Args:
        history: rows `{"step": int, "metrics": {"train/loss": ..., "eval/pairwise_accuracy": ..., ...}}` as the JSONL
            tracker writes them, in any order; a row holds whatever was logged at its step, null for non-finite numbers.
            Read are train/loss, train/pairwise_accuracy, eval/pairwise_accuracy, eval/mean_margin.

    Returns:
        Empty where nothing is seen or the history is too short to tell (three points of a metric; two evaluations for
        a reversed model, six for oscillation).
    """
    symptoms = (_exploding(history), _reversed(history), _overfitting(history), _stuck(history), _oscillating(history))
    return [diagnosis for diagnosis in symptoms if diagnosis is not None]


def _series(history: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    """(step, value) of one metric in step order; null becomes NaN."""
    rows = [(int(row["step"]), row["metrics"][name]) for row in history if name in row["metrics"]]
    return sorted(((step, math.nan if value is None else float(value)) for step, value in rows), key=lambda row: row[0])


def _finite(series: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    return [(step, value) for step, value in series if math.isfinite(value)]


@dataclass(frozen=True, slots=True)
class _Third:
    """A third of a series: its first and last step, the mean, and the mean's squared standard error."""

    first: int
    last: int
    mean: float
    error2: float


def _thirds(series: Sequence[tuple[int, float]]) -> list[_Third]:
    """The three thirds of a finite series; empty below three points."""
    size = len(series)
    if size < 3:
        return []
    cuts = [0, size // 3, size - size // 3, size]
    return [_third(series[start:end]) for start, end in pairwise(cuts)]


def _third(part: Sequence[tuple[int, float]]) -> _Third:
    mean = sum(value for _, value in part) / len(part)
    squares = sum((value - mean) ** 2 for _, value in part)
    return _Third(part[0][0], part[-1][0], mean, squares / max(len(part) - 1, 1) / len(part))


def _exploding(history: Sequence[Mapping[str, Any]]) -> Diagnosis | None:
    series = _series(history, "train/loss")
    broken = [step for step, value in series if not math.isfinite(value)]
    if broken:
        symptom = f"train loss is not finite at step {broken[0]}"
    else:
        means = [third.mean for third in _thirds(series)]
        if not means or means[-1] <= math.log(2) or means[-1] < EXPLODED_FACTOR * min(means):
            return None
        symptom = f"train loss explodes: {min(means):.3f} at its best third, {means[-1]:.3f} in the last"
    return Diagnosis(symptom, WILD, "lower the learning rate; check gradients and clipping")


def _reversed(history: Sequence[Mapping[str, Any]]) -> Diagnosis | None:
    series = _finite(_series(history, "eval/mean_margin"))
    if len(series) < 2:
        return None
    end = _third(series[-max(2, len(series) // 3) :])
    # two standard errors: the margins of an untrained model wander about zero
    if end.mean >= -2 * math.sqrt(end.error2):
        return None
    return Diagnosis(
        f"eval margin is negative ({end.mean:.3f} at the end)",
        REVERSED,
        "check data loading (are chosen and rejected swapped?); reduce the learning rate drastically",
    )


def _overfitting(history: Sequence[Mapping[str, Any]]) -> Diagnosis | None:
    thirds = _thirds(_finite(_series(history, "eval/pairwise_accuracy")))
    train = _finite(_series(history, "train/pairwise_accuracy"))
    if not thirds:
        return None
    best, end = max(thirds, key=lambda third: third.mean), thirds[-1]
    train_then = [value for step, value in train if best.first <= step <= best.last]
    train_end = [value for step, value in train if end.first <= step <= end.last]
    if not train_then or not train_end:
        return None
    before, after = sum(train_then) / len(train_then), sum(train_end) / len(train_end)
    # two standard errors: an accuracy that swings up and down is not one that falls
    clear = max(ACCURACY_CHANGE, 2 * math.sqrt(best.error2 + end.error2))
    if best.mean - end.mean < clear or after - before < ACCURACY_CHANGE:
        return None
    return Diagnosis(
        f"eval accuracy falls from {best.mean:.3f} to {end.mean:.3f} "
        f"while train accuracy rises from {before:.3f} to {after:.3f}",
        OVERFITTING,
        "lower the learning rate, regularise, stop early",
    )


def _stuck(history: Sequence[Mapping[str, Any]]) -> Diagnosis | None:
    series = _series(history, "train/loss")
    if len(_finite(series)) < len(series):
        return None
    means = [third.mean for third in _thirds(series)]
    if not means or means[-1] < STUCK_LOSS or means[-1] >= EXPLODED_FACTOR * min(means):
        return None
    if means[-1] < (1 - STUCK_IMPROVEMENT) * means[0]:
        return None
    return Diagnosis(
        f"train loss is stuck: {means[0]:.3f} in the first third, {means[-1]:.3f} in the last",
        STUCK,
        "raise the learning rate",
    )


def _oscillating(history: Sequence[Mapping[str, Any]]) -> Diagnosis | None:
    values = [value for _, value in _finite(_series(history, "eval/pairwise_accuracy"))]
    if len(values) < 6:
        return None
    late = values[len(values) // 2 :]
    changes = [after - before for before, after in pairwise(late)]
    size = sum(map(abs, changes)) / len(changes)
    turns = sum(before * after < 0 for before, after in pairwise(changes)) / (len(changes) - 1)
    if size < OSCILLATION or turns < TURNING_SHARE:
        return None
    return Diagnosis(
        f"eval accuracy oscillates late, by {size:.3f} from one evaluation to the next",
        "learning rate too high late in the run",
        "use a decaying schedule (cosine or linear)",
    )


@dataclass(frozen=True, slots=True)
class GateCheck:
    """One condition of the gate.

    value: None where it was not measured, which does not pass.
    unclear: it does not pass, and the threshold is within the interval, so that more pairs might show that it does.
    """

    name: str
    value: float | None
    threshold: float
    passed: bool
    text: str
    unclear: bool = False


ECE = "ece_debiased"
BASELINE_LABEL = "accuracy minus the best baseline (chance or length)"
_GATE = (
    ("pairwise_accuracy", "above", 0.60, "held-out pairwise accuracy"),
    ("margin_p50", "above", 0.0, "median held-out margin"),
    ("negative_margin_rate", "below", 0.40, "share of negative margins"),
    (ECE, "below", 0.15, "calibration error (ECE)"),
    ("train_test_gap", "below", 0.15, "train accuracy minus test accuracy"),
)


def validation_gate(test: Mapping[str, Mapping[str, Any]], train_accuracy: float | None) -> list[GateCheck]:
    """The gate before scaling up, on held-out metrics and, of the calibration error, an end of its interval.

    Accuracy > 60 %, median margin > 0, negative-margin rate < 40 %, ECE < 0.15, train-test gap < 15 points; all must
    pass. (Its sixth condition compares LoRA with full fine-tuning, so it needs two runs and is not part of this gate.)

    Of few pairs an ECE says little: what counts is the upper end of the debiased value's interval, which covers.

    Args:
        test: held-out metrics by name with their intervals, as `evaluate_pairs` gives them, as records. Records and no
            point values, because a check that reads an interval's end would find none. A missing metric, or one that is
            None or not finite, does not pass.
        train_accuracy: pairwise accuracy on training pairs as a fraction, for the gap; None does not pass.
    """
    accuracy = test.get("pairwise_accuracy", {}).get("value")
    gap = None if train_accuracy is None or accuracy is None else train_accuracy - accuracy
    checks = []
    for name, side, threshold, label in _GATE:
        metric = {"value": gap} if name == "train_test_gap" else test.get(name, {})
        value = metric.get("ci_high" if name == ECE else "value")
        if value is None or not math.isfinite(value):
            text = f"{label}: not measured; it has to be {side} {threshold:g}"
            checks.append(GateCheck(name, None, threshold, False, text))
            continue
        passed = value > threshold if side == "above" else value < threshold
        far = metric.get("ci_high" if side == "above" else "ci_low")
        unclear = not passed and far is not None and (far > threshold if side == "above" else far < threshold)
        shown = f"{value:.3f},"
        if name == ECE:
            point, low = (max(0.0, metric.get(part) or 0.0) for part in ("value", "ci_low"))
            unclear = not passed and low < threshold  # also where no lower end is known
            shown = f"{point:.3f} (95 %: {low:.3f} to {value:.3f}), upper end"
        text = f"{label}: {shown} {'' if passed else 'not '}{side} {threshold:g}"
        checks.append(GateCheck(name, float(value), threshold, passed, text, unclear))
    return checks


def baseline_check(over_baseline: Mapping[str, Any]) -> GateCheck:
    """Whether a model is shown to know more than chance and length: on the lower end of the interval.

    Args:
        over_baseline: the metric `accuracy_over_baseline` as `evaluate_pairs` gives it.
    """
    value, low, high = (over_baseline[name] for name in ("value", "ci_low", "ci_high"))
    if value is None or low is None:
        why = over_baseline["reason"] or "it has no interval"
        text = f"{BASELINE_LABEL}: {why}; its lower end has to be above 0"
        return GateCheck(OVER_BASELINE, None, 0.0, False, text, unclear=True)
    passed, shown = low > 0, f"{_points(value, low, high)} on {over_baseline['num']} pairs"
    text = f"{BASELINE_LABEL}: {shown}, lower end {'' if passed else 'not '}above 0"
    return GateCheck(OVER_BASELINE, low, 0.0, passed, text, unclear=not passed and high >= 0)


def _points(value: float, low: float, high: float) -> str:
    return f"{100 * value:+.1f} points ({100 * low:+.1f} to {100 * high:+.1f})"


MANY_CUT = 0.1
"""A share of sides cut at the length limit that is named."""
UNDERTRAINED_SHARE = 0.9
"""A loss above this share of log 2 that still falls is one of a training that ended too early ..."""
UNLEARNED_SHARE = 0.98
"""... and one above this share has learned next to nothing, whether it falls or not: calibrated guesses that are right
in 58 % have it."""


def diagnose_outcome(
    history: Sequence[Mapping[str, Any]],
    test: Mapping[str, Mapping[str, Any]],
    truncation: Mapping[str, Mapping[str, int]],
) -> list[Diagnosis]:
    """Find what speaks against trusting an outcome at all, most urgent first: named before the symptoms of `diagnose`.

    Args:
        history: as for `diagnose`; train/loss is read.
        test: held-out metrics with their intervals; `accuracy_over_baseline` and `pairwise_accuracy` are read.
        truncation: by split {"num_cut_sides", "num_pairs"}.
    """
    symptoms = (_undertrained(history), _no_better_than_length(test), _many_cut(truncation))
    return [diagnosis for diagnosis in symptoms if diagnosis is not None]


def _undertrained(history: Sequence[Mapping[str, Any]]) -> Diagnosis | None:
    series = _finite(_series(history, "train/loss"))
    if not series:
        return None
    thirds = _thirds(series)
    first, last = (thirds[0].mean, thirds[-1].mean) if thirds else (math.log(2), series[-1][1])
    share, falls = last / math.log(2), last < (1 - STUCK_IMPROVEMENT) * first
    is_unlearned = UNLEARNED_SHARE <= share <= 2 - UNLEARNED_SHARE  # further above, it is not at rest: it explodes
    if not is_unlearned and not (UNDERTRAINED_SHARE <= share <= 1 and falls):
        return None
    and_falls = " and was falling" if falls else ""
    return Diagnosis(
        f"train loss ends at {last:.3f} after {series[-1][0]} steps{and_falls}; guessing is {math.log(2):.3f}",
        UNDER_TRAINED,
        "train longer (train.epochs or train.steps), or raise the learning rate",
    )


def _no_better_than_length(test: Mapping[str, Mapping[str, Any]]) -> Diagnosis | None:
    """Say what the interval of `accuracy_over_baseline` speaks against, where its lower end is not above 0."""
    over_baseline, accuracy = test[OVER_BASELINE], test["pairwise_accuracy"]["value"]
    value, low, high = (over_baseline[name] for name in ("value", "ci_low", "ci_high"))
    if value is None or low is None or low > 0:
        return None
    symptom = f"{BASELINE_LABEL} is {_points(value, low, high)} on {over_baseline['num']} held-out pairs"
    if high >= 0:
        equal = "it is equal to the best baseline (chance or length) on these pairs: " if abs(value) < 1e-9 else ""
        return Diagnosis(
            symptom,
            f"{equal}too few held-out pairs to say whether it knows more than chance and length",
            "hold out more pairs (data.test_fraction, data.eval_source); their number has to grow with the square of "
            "the precision that is wanted",
        )
    if accuracy > 0.5:  # then the baseline that is better is length
        return Diagnosis(
            symptom,
            f"it is right in {accuracy:.0%} of the pairs, and always taking the longer answer in more",
            "it has learned less than length alone tells: train longer, or on more pairs",
        )
    return Diagnosis(
        symptom, f"it is right in {accuracy:.0%} of the pairs, no more than a coin", "look for a reversed column"
    )


def _many_cut(truncation: Mapping[str, Mapping[str, int]]) -> Diagnosis | None:
    for split, cut in truncation.items():
        num_sides = 2 * cut["num_pairs"]
        if num_sides and cut["num_cut_sides"] > MANY_CUT * num_sides:
            share = cut["num_cut_sides"] / num_sides
            return Diagnosis(
                f"{share:.0%} of the {split} sides were cut at the length limit",
                "the model judges texts whose end it has not read",
                "raise model.max_seq_len, or drop such pairs (train.over_length=drop) and say so",
            )
    return None
