"""The planner of the next step: one command that changes the best run of those on the same held-out prompts.

While checks on labelled pairs fail or are undecided, a policy's samples would only show at a higher price what is
known, so the next step is here and not on the next evidence level. A step starts from the best run so far, never
repeats a recipe that was run, and leaves the held-out prompts as they are, so that each run compares with all others.
Of the steps for which the run has evidence the cheapest comes first whose effect the held-out pairs could show; then
pairs at hand that were left unused, though too few held-out pairs show their effect. Where none is left, labels are,
and how many.
"""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rmcore.config.data import DataConfig
from rmcore.config.model import TINY_SIZES
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.capabilities import capabilities
from rmcore.evaluation.diagnosis import MANY_CUT, OVER_BASELINE, OVERFITTING, REVERSED, STUCK, UNDER_TRAINED, WILD
from rmcore.reporting.figures import numbers
from rmcore.reporting.schema import NextRung, Training, Verdict
from rmcore.training.record import passes, planned_steps

USUAL_LR = {"minilm": 5e-5, **dict.fromkeys(TINY_SIZES, 1e-3)}
"""AdamW's rates that suit these models; a rate that is more than twice as low or high has a candidate in them."""
MANY_STEPS, MANY_PASSES = 300, 6
"""From here on more of the same training is no longer among the candidates."""
BY_HEART, HARDLY_BY_HEART = 0.15, 0.08
"""Train accuracy minus held-out accuracy: pairs were learned by heart, as in the check of that gap; and they were not,
so that more passes may help."""
CAP_FACTOR = 4
"""Times as many pairs of a prompt in the next step: all at once may cost a day."""
DISAGREEMENT = 0.2
"""Share of held-out pairs that only one of two trained models orders as labelled, assumed until two were compared."""
GAP = "train_test_gap"
WORTH_SEEING = 0.03
"""Gain in accuracy for which the number of held-out pairs is told where these show too little."""
_MORE_PAIRS = "MORE_PAIRS"


class Tried(NamedTuple):
    """A finished run on the held-out prompts of a chain, as far as a plan needs it."""

    name: str
    config: PipelineConfig
    verdict: Verdict
    diagnoses: frozenset[str]
    """Diagnoses of its training and its outcome."""
    metrics: Mapping[str, Mapping[str, Any]]
    """Held-out metrics as records."""
    gap: float | None
    """Accuracy on training pairs minus that on held-out pairs."""
    training: Training
    num_unused: int
    """Usable training pairs that `data.pairs_per_prompt` left out."""
    over_first: Mapping[str, Any] | None = None
    """Accuracy minus that of the chain's first run on the pairs that both hold out; None: of the first run itself, or
    not known, as the stored rewards are gone."""

    @property
    def accuracy(self) -> float:
        """Held-out pairwise accuracy; that of guessing where it is undefined."""
        value = self.metrics["pairwise_accuracy"]["value"]
        return 0.5 if value is None else float(value)


class Candidate(NamedTuple):
    """A change of the best run that may raise its accuracy."""

    what: str
    """The change and the evidence for it."""
    changes: Mapping[str, Any]
    """New values by dotted setting."""
    most: float
    """Accuracy that it can add at most."""
    seconds: float
    rank: int = 1
    """0: nothing else counts before; 1: the run has evidence for it; 2: it makes the best of too few pairs, so more of
    them come first; 4 and 5: it is only cheap."""
    uses_more: bool = False
    """Whether it trains on pairs at hand that were left unused: worth a step (of rank 3) also where its effect is
    smaller than what the held-out pairs show."""


def record_of(record: Mapping[str, Any], name: str, over_first: Mapping[str, Any] | None = None) -> Tried:
    """Return what a plan needs of a run's record (`rmcore.reporting.schema.Results`).

    Raises:
        pydantic.ValidationError: its settings are not those of this version.
    """
    gap = next((check["value"] for check in record["label_gate"] if check["name"] == GAP), None)
    return Tried(
        name,
        PipelineConfig.model_validate(record["config"]),
        record["verdict"],
        frozenset(diagnosis["diagnosis"] for diagnosis in record["diagnoses"]),
        record["metrics"],
        gap,
        record["training"],
        sum(source["num_over_cap"] for source in record["audit"].get("sources", ())[:1]),
        over_first,
    )


def held_out_by(config: PipelineConfig) -> tuple[Any, ...]:
    """Return the settings that choose the held-out prompts: equal ones make two runs steps of one chain."""
    return config.seed, *sorted(config.data.model_dump(mode="json", exclude={"pairs_per_prompt"}).items(), key=str)


def best_of(runs: Sequence[Tried]) -> Tried:
    """Return the run of highest accuracy on common held-out pairs, the first of equal ones.

    Args:
        runs: of a chain, the first one first, which others were compared with.
    """
    known = [run for run in runs if run.over_first is not None and run.over_first["value"] is not None]
    return max([runs[0], *known], key=lambda run: run.over_first["value"] if run.over_first else 0.0)


def so_far(runs: Sequence[Tried]) -> str | None:
    """Say which run of the chain is best, and by how much; None of a chain of one run."""
    if len(runs) < 2:
        return None
    first, best = runs[0], best_of(runs)
    text = f"{len(runs)} runs on these held-out prompts; the best is {best.name}"
    if best.over_first is None:
        return f"{text}, the first: no change has raised the accuracy"
    value, bounds = numbers.estimate("pairwise_accuracy", best.over_first, "share", "difference")
    low, is_pair = best.over_first["ci_low"], best.over_first["num"]
    is_shown = "shown to be better" if low is not None and low > 0 else "not shown to be better"
    return f"{text}, {is_shown} than {first.name}, the first: {value} ({bounds or 'no interval'}) on {is_pair:,} pairs"


def next_step(runs: Sequence[Tried]) -> NextRung | None:
    """Name the step that would raise the best run's verdict on labelled pairs.

    None where that passes, or where other evidence is against it: logged answers where no check on the pairs fails,
    samples where some were judged.

    Args:
        runs: finished runs on the same held-out prompts, in the order in which they ended.
    """
    best = best_of(runs)
    if not is_to_mend(best.verdict):
        return None
    is_reversed = REVERSED in best.diagnoses and best.accuracy < 0.5
    if is_reversed and UNDER_TRAINED not in best.diagnoses and not best.config.is_gold:
        return _look_at_labels(best)
    width = visible_gain(runs)
    new = [candidate for candidate in candidates(best) if not _was_run(best, candidate, runs)]
    worth = [candidate for candidate in new if candidate.most >= width]
    worth += [_unseen(candidate, best) for candidate in new if candidate.uses_more and candidate.most < width]
    if not worth:
        return _more_labels(best, runs, width)
    chosen = min(worth, key=lambda candidate: (candidate.rank, candidate.seconds))
    cost = f"one training, about {numbers.duration(chosen.seconds)}, and no new label"
    return _step(best, chosen.what, cost, chosen.changes)


def _unseen(candidate: Candidate, best: Tried) -> Candidate:
    """The candidate after those whose effect can be seen, with that said."""
    num = best.metrics["pairwise_accuracy"]["num"]
    return candidate._replace(rank=3, what=f"{candidate.what}, with a gain that {num:,} held-out pairs may not show")


def is_to_mend(verdict: Verdict) -> bool:
    """Whether labelled pairs have the word: with judged samples, these have."""
    return verdict["rung"] <= 2 and verdict["status"] != "passes"


def visible_gain(runs: Sequence[Tried]) -> float:
    """Return the smallest gain in accuracy that the chain's held-out pairs can show: half of a 95 % paired interval.

    It is the mean over the runs that were compared. Without any it is 1.96 √(d / n): d is `DISAGREEMENT`, and n the
    number of independent pairs that would give the interval of the first run's accuracy, p (1 - p) / s² with standard
    error s.
    """
    widths = [
        (run.over_first["ci_high"] - run.over_first["ci_low"]) / 2
        for run in runs
        if run.over_first is not None and run.over_first["ci_low"] is not None
    ]
    if any(widths):
        return sum(widths) / len(widths)
    accuracy = runs[0].metrics["pairwise_accuracy"]
    value, low, high = accuracy["value"], accuracy["ci_low"], accuracy["ci_high"]
    if value is None or low is None or not 0 < value < 1 or high <= low:
        return 1.96 * math.sqrt(DISAGREEMENT / max(1, accuracy["num"]))
    independent = value * (1 - value) * (2 * 1.96 / (high - low)) ** 2
    return 1.96 * math.sqrt(DISAGREEMENT / independent)


def candidates(best: Tried) -> Iterator[Candidate]:
    """Yield the changes of a run that leave its held-out prompts as they are."""
    config, training, room = best.config, best.training, 1 - best.accuracy
    lr, seconds = config.train.lr, training["wall_seconds"]
    usual = USUAL_LR.get(config.model.name) if config.train.optimizer in ("adamw", "adam") else None
    usual = None if config.model.lora or config.model.head_only else usual
    if WILD in best.diagnoses:
        yield Candidate("a training that does not explode", _rate(lr / 4), room, seconds, 0)
    if usual is not None and not usual / 2 <= lr <= 2 * usual:
        what = f"the learning rate that suits {config.model.name}"
        yield Candidate(what, {"train.lr": usual}, room, seconds, 0)
    has_learned = not best.diagnoses & {UNDER_TRAINED, STUCK}
    if not has_learned:
        what = "the training loss ended near that of guessing"
        if training["steps"] < MANY_STEPS:
            yield Candidate(f"a longer training: {what}", _length(best, 3), room, 3 * seconds, 0)
        if usual is None or lr < 2 * usual:
            yield Candidate(f"a higher learning rate: {what}", _rate(3 * lr), room, seconds, 0)
    yield from _of_data(best, room)
    yield from _of_length(best, room)
    if has_learned:
        for number, times in enumerate((0.5, 2) if OVERFITTING in best.diagnoses else (2, 0.5)):
            what = (
                f"a {'higher' if times > 1 else 'lower'} learning rate than {lr:g}: a try, with no sign that it helps"
            )
            yield Candidate(what, _rate(lr * times), room, seconds, 4 + number)


def _peaked_early(run: Tried) -> bool:
    """Whether training continued after validation pairs gained by it, and pairs were learned by heart."""
    is_early = run.training["best_step"] <= run.training["steps"] / 2
    return OVERFITTING in run.diagnoses or (run.gap is not None and run.gap > BY_HEART and is_early)


def _of_data(best: Tried, room: float) -> Iterator[Candidate]:
    """More of what the run was given and did not read.

    An error that falls with the square root of the number of pairs falls as fast as learning curves are known to.
    """
    training, data = best.training, best.config.data
    num = training["num_distinct"]
    if best.num_unused and data.pairs_per_prompt is not None:
        every = 1 + best.num_unused / num
        times = min(CAP_FACTOR, every)
        cap = None if every <= CAP_FACTOR else CAP_FACTOR * data.pairs_per_prompt
        changes = {"data.pairs_per_prompt": cap}
        longer = _steps(changed(best.config, changes), num * times) / _steps(best.config, num)
        what = f"more of the pairs at hand: {best.num_unused:,} were left unused"
        most, seconds = room * (1 - times**-0.5), training["wall_seconds"] * longer
        yield Candidate(what, changes, most, seconds, uses_more=True)
    cut, limit = training["truncation"]["test"], best.config.model.max_seq_len
    share = cut["num_cut_sides"] / max(1, 2 * cut["num_pairs"])
    most = min(2 * limit, training["max_positions"] or 2 * limit)
    if share > MANY_CUT and most > limit:
        what = f"longer texts: {numbers.percent(share)} of the sides were cut at {limit} tokens"
        longer = 1 + share * (most / limit - 1)
        changes = {"model.max_seq_len": most}
        if (budget := best.config.train.token_budget) is not None and budget < 2 * most:
            changes["train.token_budget"] = 2 * most  # a micro-batch holds both sides of a pair
        yield Candidate(what, changes, room * min(1, 2 * share), training["wall_seconds"] * longer)


def _of_length(best: Tried, room: float) -> Iterator[Candidate]:
    """Fewer passes where pairs were learned by heart, more where they were not."""
    training, gap = best.training, best.gap
    seen, seconds = _passes(best), training["wall_seconds"]
    if _peaked_early(best) and seen > 1:
        why = f"pairs were learned by heart, and step {training['best_step']} of {training['steps']} was the best"
        yield Candidate(f"fewer passes: {why}", _length(best, 0.5), room, seconds / 2, 2)
    elif gap is not None and gap < HARDLY_BY_HEART and seen < MANY_PASSES:
        points = numbers.text(gap, "share", "difference")
        what = f"more passes: training pairs are only {points} ahead of held-out ones"
        yield Candidate(what, _length(best, 2), room, 2 * seconds)


def _rate(lr: float) -> dict[str, Any]:
    """The setting of a learning rate, as exact as a command shows it."""
    return {"train.lr": float(f"{lr:.3g}")}


def _passes(run: Tried) -> float:
    """Planned passes over the training pairs."""
    num, train = run.training["num_distinct"], run.config.train
    return passes(train, num) if train.steps is None else train.steps * train.pairs_per_step / max(1, num)


def _length(run: Tried, times: float) -> dict[str, Any]:
    """The setting that makes a training so many times as long."""
    if (steps := run.config.train.steps) is not None:
        return {"train.steps": max(1, round(steps * times))}
    return {"train.epochs": round(_passes(run) * times, 2)}


def _steps(config: PipelineConfig, num_pairs: float) -> int:
    return planned_steps(config.train, max(1, round(num_pairs)))


def changed(config: PipelineConfig, changes: Mapping[str, Any]) -> PipelineConfig:
    """Return a config with other values of some dotted settings."""
    for name, value in changes.items():
        group, _, field = name.rpartition(".")
        config = config.model_copy(update={group: getattr(config, group).model_copy(update={field: value})})
    return config


def _was_run(best: Tried, candidate: Candidate, runs: Sequence[Tried]) -> bool:
    """Whether a run of the chain had this recipe, however the length of its training was set."""

    def recipe(config: PipelineConfig, run: Tried) -> tuple[Any, ...]:
        others = config.train.keyed() | {"steps": _steps(config, run.training["num_distinct"]), "epochs": None}
        return config.data.pairs_per_prompt, config.model, others

    after = changed(best.config, candidate.changes)
    # A run under the same `pairs_per_prompt` has as many pairs as the candidate would have.
    return any(recipe(after, run) == recipe(run.config, run) for run in runs)


def _step(run: Tried, what: str, cost: str, changes: Mapping[str, Any]) -> NextRung:
    words = ["rm-opt", "run", "--from", run.name]
    for name, value in changes.items():
        shown = "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
        words += ["--set", f"{name}={shown}"]
    return {"rung": run.verdict["rung"], "evidence": what, "command": shlex.join(words), "cost": cost}


def _look_at_labels(run: Tried) -> NextRung:
    data = run.config.data
    return {
        "rung": run.verdict["rung"],
        "evidence": "labels the right way round: look at which column is read as chosen",
        "command": shlex.join(["rm-opt", "data", "check", data.source, *_reading(data)]),
        "cost": "seconds",
    }


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


def _more_labels(run: Tried, runs: Sequence[Tried], width: float) -> NextRung:
    """More labelled pairs, and how many."""
    over, data = run.metrics.get(OVER_BASELINE, {}), run.config.data
    sentences = [
        f"more labelled pairs: nothing else is left whose effect {over.get('num', 0):,} held-out pairs could show"
    ]
    sentences.append(_pairs_to_learn(run, runs, width))
    if (wanted := pairs_to_decide(over)) is not None:
        sentences.append(f"about {wanted:,} held-out ones would decide whether it beats length, if it stays as good")
    elif width > WORTH_SEEING and over.get("num"):
        wanted = math.ceil(over["num"] * (width / WORTH_SEEING) ** 2)
        sentences.append(f"about {wanted:,} held-out ones would show a gain of {100 * WORTH_SEEING:g} points")
    if run.config.is_gold:
        return _step(run, "; ".join(sentences), "no label", {"data.gold.num_prompts": 2 * data.gold.num_prompts})
    return _step(run, "; ".join(sentences), "their labels", {"data.source": _MORE_PAIRS})


def _pairs_to_learn(run: Tried, runs: Sequence[Tried], width: float) -> str:
    """Say how many training pairs would give a gain that can be seen.

    By the learning curve, where runs of the chain differ in the number of their pairs alone: accuracy rises by as much
    with each doubling as it did between the smallest and the largest of them. A curve of the best run's recipe counts
    first.
    """

    def recipe(tried: Tried) -> PipelineConfig:
        return changed(tried.config, {"data.pairs_per_prompt": None})

    num = run.training["num_distinct"]
    curves = [
        sorted((tried.training["num_distinct"], tried.accuracy) for tried in runs if recipe(tried) == recipe(like))
        for like in (run, *runs)
    ]
    alike = next((curve for curve in curves if curve[0][0] < curve[-1][0]), None)
    if alike is None:
        return f"{num:,} more to train on would be as many again, a guess, as no two runs differ in their pairs alone"
    (few, before), (many, after) = alike[0], alike[-1]
    doubling = (after - before) / math.log2(many / few)
    seen = f"{few:,} to {many:,} pairs brought {numbers.text(after - before, 'share', 'difference')}"
    if doubling <= 0:
        return f"more of the same prompts have not helped ({seen}): label other prompts"
    if width / doubling > 5:
        return f"more than 30 times as many would be needed for a gain that can be seen, as {seen}"
    return f"about {math.ceil(num * (2 ** (width / doubling) - 1)):,} more to train on, as {seen}"


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


def step_of_checkpoint(
    verdict: Verdict,
    gate: Sequence[Mapping[str, Any]],
    model: Sequence[str],
    data: DataConfig,
    trained_on: str | None = None,
) -> NextRung | None:
    """Name what would raise the verdict on a checkpoint that no run is known of; None as in `next_step`.

    Args:
        verdict: as it is.
        gate: its checks as records of `GateCheck`.
        model: words by which a command finds the checkpoint and reads with it.
        data: the pairs as they were read.
        trained_on: the pairs that it was trained on; None: not named.
    """
    if not is_to_mend(verdict):
        return None
    more, words, last = data, ["readiness", "pairs"], ["--train-data", trained_on or "PAIRS_IT_WAS_TRAINED_ON"]
    explaining = next((one.explains for one in capabilities().values() if one.explains), ())
    if verdict["status"] == "fails" and explaining:
        what, words, cost, last = "what it gets wrong, and why", list(explaining[:1]), "minutes", list(explaining[1:])
    elif trained_on is None and not any(check["unclear"] for check in gate):
        what, cost = "the pairs that it was trained on, which a check needs that was not measured", "no new label"
    else:
        more = data.model_copy(update={"source": _MORE_PAIRS, "limit": None})
        what, cost = "more labelled pairs", "their labels"
    words += [*model, "--data", more.source, *_reading(more), *last]
    return {"rung": verdict["rung"], "evidence": what, "command": shlex.join(["rm-opt", *words]), "cost": cost}
