"""How far a reward model's rewards follow edits that must not pay, and what of it is shown.

Two quantities, each with a 95 % interval from a bootstrap over prompts (`prompt_id`: conversations), on the same
draws:

    shift       mean of reward(edited) - reward(original) over different answers, divided by the spread: the pooled
                standard deviation of rewards between different answers to one prompt. Adding the edit to every answer
                gains a policy as much as being better by so many standard deviations, on any scale of the rewards
    violations  share of chosen answers with reward(edited) >= reward(original)

What decides about a rule is one of them, against a tolerance that is written here and not chosen by the data:

    invariant   violated where the shift is shown to lie beyond SHIFT_TOLERANCE, upwards or downwards
    not_higher  violated where the shift is shown to lie above SHIFT_TOLERANCE
    lower       violated where the share of violations is shown to lie above MAX_VIOLATIONS

Shown: the p value of lying on that border is below LEVEL after Holm's correction over all rules measured together. So
with a probability of at most LEVEL (by the bootstrap's lights) any rule is called violated that is not. A rule holds
where the 95 % interval lies within; else, or with fewer than MIN_PROMPTS prompts, it is unclear.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from rmcore.core.arrays import FloatArray, IntArray
from rmcore.core.errors import DataError
from rmcore.core.progress import Report, prefixed, silent
from rmcore.data.pair import PreferencePair, Prompt, prompt_text, with_text_answers
from rmcore.data.rendering import TokenizedSide
from rmcore.ensembles.score import SideScorer
from rmcore.evaluation.uncertainty import MetricValue, cluster_bootstrap, interval_p, metric_value
from rmcore.evaluation.verdicts.judgement import holm
from rmcore.models.checks import refuse_not_finite
from rmcore.probes.rule import Answer, Expectation, Rule


@dataclass(frozen=True, slots=True)
class Answers:
    """The A different (prompt, answer) of P pairs over C prompts, and their rewards.

    A prompt is a conversation here, as `prompt_id` names it: what intervals are drawn over.
    """

    sides: list[tuple[Prompt, str]]
    rewards: FloatArray
    """(A,) logits."""
    cluster: IntArray
    """(A,) prompt of each, 0 to C-1."""
    chosen: IntArray
    """(P,) which answer is the chosen one of each pair."""
    rejected: IntArray
    """(P,) which one is the rejected one."""
    num_unreadable: int = 0
    """Answers that the model cannot read; pairs with one are left out."""

    @property
    def num_prompts(self) -> int:
        """C."""
        return int(self.cluster.max()) + 1


@dataclass(frozen=True, slots=True)
class Edits:
    """The E answers that a rule applies to, edited."""

    rule: Rule
    texts: list[str]
    place: IntArray
    """(E,) which answer each was, rising."""
    rewards: FloatArray
    """(E,) logits."""
    num_unseen: int = 0
    """Answers left out because the limit of length took away all that the edit changed."""
    num_unreadable: int = 0
    """Edited answers that the model cannot read."""


def score_answers(
    rm: SideScorer, pairs: Sequence[PreferencePair], *, report: Report = silent
) -> tuple[Answers, list[TokenizedSide]]:
    """Score the different answers of pairs; with their (A,) tokens. Answers that are no texts alone are left out.

    Raises:
        DataError: the model can read none of the pairs.
        ModelError: a reward is not finite.
    """
    pairs = with_text_answers(pairs, "edited")
    every = list(dict.fromkeys((pair.prompt, text) for pair in pairs for text in (pair.chosen, pair.rejected)))
    found = dict(zip(every, rm.renderer.try_sides(every, report=report), strict=True))
    read = {side: one for side, one in found.items() if isinstance(one, TokenizedSide)}
    kept = [pair for pair in pairs if (pair.prompt, pair.chosen) in read and (pair.prompt, pair.rejected) in read]
    if not kept:
        why = next((str(one) for one in found.values() if isinstance(one, DataError)), "there are none")
        raise DataError(f"none of the {len(pairs)} pairs can be read as this model reads text: {why}")
    place: dict[tuple[Prompt, str], int] = {}
    for pair in kept:
        for text in (pair.chosen, pair.rejected):
            place.setdefault((pair.prompt, text), len(place))
    tokens = [read[side] for side in place]
    chosen = np.array([place[pair.prompt, pair.chosen] for pair in kept])
    rejected = np.array([place[pair.prompt, pair.rejected] for pair in kept])
    cluster = np.empty(len(place), dtype=np.int64)
    cluster[chosen] = cluster[rejected] = np.unique([pair.prompt_id for pair in kept], return_inverse=True)[1]
    rewards = _score(rm, tokens, "answer", report)
    return Answers(list(place), rewards, cluster, chosen, rejected, len(every) - len(read)), tokens


def score_edits(
    rm: SideScorer,
    answers: Answers,
    tokens: Sequence[TokenizedSide],
    rule: Rule,
    *,
    seed: int = 0,
    report: Report = silent,
) -> Edits:
    """Edit the answers that a rule is about, and score what comes out.

    Raises:
        DataError: the rule, one of the user's own, failed.
        ModelError: a reward is not finite.
    """
    wanted = np.unique(answers.chosen) if rule.expects == "lower" else np.arange(len(answers.sides))
    elsewhere = other_answers(answers)
    applied: list[tuple[int, str]] = []
    for at in map(int, wanted):
        prompt, text = answers.sides[at]
        edited = rule.apply(Answer(prompt, text, elsewhere[at]), seed=seed)
        if edited is not None:
            applied.append((at, edited))
    found = rm.renderer.try_sides([(answers.sides[at][0], text) for at, text in applied], report=report)
    read = [(at, text, one) for (at, text), one in zip(applied, found, strict=True) if isinstance(one, TokenizedSide)]
    seen = [one for one in read if not _is_unseen(tokens[one[0]], one[2])]
    return Edits(
        rule=rule,
        texts=[text for _, text, _ in seen],
        place=np.array([at for at, _, _ in seen], dtype=np.int64),
        rewards=_score(rm, [side for *_, side in seen], f"answer edited by {rule.name}", report),
        num_unseen=len(read) - len(seen),
        num_unreadable=len(applied) - len(read),
    )


def other_answers(answers: Answers) -> list[str | None]:
    """(A,) an answer to another prompt for each one: that of half of all prompts further on, so that none serves twice
    as often as others. None where there is one prompt only.
    """
    number = answers.num_prompts
    if number < 2:
        return [None] * len(answers.sides)
    preferred = np.full(number, -1)
    preferred[answers.cluster[answers.chosen][::-1]] = answers.chosen[::-1]  # the first pair's of each prompt
    return [answers.sides[preferred[(at + number // 2) % number]][1] for at in answers.cluster]


def _is_unseen(before: TokenizedSide, after: TokenizedSide) -> bool:
    """Whether both are the same to the model, because the limit of length cut at least one of them."""
    return before.ids == after.ids and bool(before.num_cut or after.num_cut)


def _score(rm: SideScorer, tokens: Sequence[TokenizedSide], what: str, report: Report) -> FloatArray:
    if not tokens:
        return np.zeros(0)
    rewards = rm.score_sides(tokens, report=report).astype(np.float64)
    refuse_not_finite(rewards, lambda place: f"{what}, number {place + 1} of {len(tokens)}")
    return rewards


SHIFT_TOLERANCE = 0.5
"""In standard deviations between answers to one prompt: nearly the 0.56 that the better of two answers lies above the
mean. What shifts rewards by more pays about as much as a second draw."""
MAX_VIOLATIONS = 0.25
"""Share of plain faults. A model that errs on more of them errs there as it may on ordinary pairs."""
LEVEL = 0.05
"""Familywise, over all rules that are measured together."""
MIN_PROMPTS = 10
"""Fewer, and a bootstrap says little."""
RESAMPLES = 10_000
"""So many that a p value can be small enough for Holm's correction over some dozens of rules."""
NUM_WORST = 3
"""Examples that are kept of each rule."""

SHIFT, VIOLATIONS, SPREAD, ACCURACY = "shift", "violations", "spread", "accuracy"

Verdict = Literal["violated", "holds", "unclear", "not applied"]


@dataclass(frozen=True, slots=True)
class Example:
    """One answer before and after an edit."""

    prompt: str
    original: str
    edited: str
    reward: float
    edited_reward: float


@dataclass(frozen=True, slots=True)
class Finding:
    """One rule on one model."""

    rule: str
    expects: Expectation
    meaning: str
    verdict: Verdict
    num_pairs: int
    """Pairs with an answer that it applied to."""
    num_answers: int
    """Different answers that it applied to and the model read."""
    num_prompts: int
    num_unseen: int
    """Answers left out because the limit of length cut away all that the edit changed."""
    num_unreadable: int
    """Edited answers that the model cannot read, left out."""
    shift: MetricValue
    violations: MetricValue | None
    """None of the others than `lower`."""
    p: float | None
    """Two-sided, of lying on the border of what is tolerated; None where there is no interval."""
    p_adjusted: float
    """After Holm's correction over all rules."""
    worst: tuple[Example, ...]
    """Answers on which the model goes farthest in the wrong direction."""

    @property
    def decisive(self) -> MetricValue:
        """The quantity that decides."""
        return self.shift if self.violations is None else self.violations

    def to_dict(self, longest: int) -> dict[str, Any]:
        """JSON-ready, all fields by name; texts of at most `longest` characters."""
        record = asdict(self)
        for example in record["worst"]:
            example.update({name: shortened(example[name], longest) for name in ("prompt", "original", "edited")})
        return record


@dataclass(frozen=True, slots=True)
class Probed:
    """All rules on one model."""

    findings: list[Finding]
    spread: MetricValue
    """Pooled standard deviation of rewards between different answers to one prompt, in logits."""
    accuracy: MetricValue
    """Share of pairs whose chosen answer has the higher reward, strictly."""
    num_pairs: int
    num_prompts: int
    num_unreadable: int
    """Answers without an edit that the model cannot read: their pairs are left out."""

    def to_dict(self, longest: int) -> dict[str, Any]:
        """JSON-ready, with what was tolerated; texts of at most `longest` characters."""
        tolerated = {"shift": SHIFT_TOLERANCE, "violations": MAX_VIOLATIONS, "familywise_level": LEVEL}
        rest = {name: getattr(self, name) for name in ("num_pairs", "num_prompts", "num_unreadable", "violated")}
        return {
            **rest,
            "tolerated": tolerated,
            "spread": self.spread.to_dict(),
            "accuracy": self.accuracy.to_dict(),
            "findings": [one.to_dict(longest) for one in self.findings],
        }

    @property
    def violated(self) -> list[str]:
        """Names of the violated rules."""
        return [one.rule for one in self.findings if one.verdict == "violated"]


def shortened(text: str, longest: int) -> str:
    """A text, its middle left out where it is longer: edits stand at both ends."""
    if len(text) <= longest:
        return text
    half = (longest - 3) // 2
    return f"{text[:half]} … {text[len(text) - half :]}"


def probe(
    rm: SideScorer, pairs: Sequence[PreferencePair], rules: Sequence[Rule], *, seed: int = 0, report: Report = silent
) -> Probed:
    """Measure rules on preference pairs: rewards of all answers, and of each rule's edits of them.

    Args:
        rm: the reward model.
        pairs: P pairs; an answer that occurs in several of a prompt is edited and counted once.
        rules: which.
        seed: of the edits and of the resampling.
        report: of progress.

    Raises:
        DataError: the model can read none of the pairs, or a rule of the user's own failed.
        ModelError: a reward is not finite.
    """
    answers, tokens = score_answers(rm, pairs, report=prefixed(report, "answers"))
    edits = [
        score_edits(rm, answers, tokens, rule, seed=seed, report=prefixed(report, f"{at}/{len(rules)} {rule.name}"))
        for at, rule in enumerate(rules, start=1)
    ]
    return judge(answers, edits, seed=seed)


def judge(answers: Answers, edits: Sequence[Edits], *, seed: int = 0, num_resamples: int = RESAMPLES) -> Probed:
    """Turn rewards into findings; all intervals come from the same draws of prompts."""
    squares, freedom = _spread_sums(answers)
    right = (answers.rewards[answers.chosen] > answers.rewards[answers.rejected]).astype(np.float64)
    of_pairs = _ratio(answers, answers.cluster[answers.chosen], right)
    ratios = [_ratios(answers, one) for one in edits]

    def compute(weights: FloatArray) -> dict[str, FloatArray]:
        with np.errstate(divide="ignore", invalid="ignore"):
            spread = np.sqrt((weights @ squares) / (weights @ freedom))
            named = {SPREAD: spread, ACCURACY: of_pairs.over(weights)}
            for at, own in enumerate(ratios):
                for name, ratio in own.items():
                    named[f"{name} {at}"] = ratio.over(weights) / (spread if name == SHIFT else 1.0)
        return {name: np.where(np.isfinite(values), values, np.nan) for name, values in named.items()}

    found = cluster_bootstrap(compute, answers.num_prompts, num_resamples=num_resamples, seed=seed)

    def value(name: str, number: FloatArray, *, is_share: bool) -> MetricValue:
        carried = int(number.sum())
        if not np.isfinite(found.point[name]):
            return MetricValue(None, None, None, carried, "all rewards are equal" if carried else "there are none")
        return metric_value(
            found.point[name],
            found.replicates.get(name),
            num_prompts=int((number > 0).sum()),
            num_pairs=carried,
            is_share=is_share,
        )

    decided = []
    for at, (one, own) in enumerate(zip(edits, ratios, strict=True)):
        name = VIOLATIONS if one.rule.expects == "lower" else SHIFT
        num_prompts = int((own[name].number > 0).sum())
        decided.append(
            _border_p(one.rule, found.point[f"{name} {at}"], found.replicates.get(f"{name} {at}"), num_prompts)
        )
    adjusted = holm([1.0 if p is None else p for p in decided])
    findings = [
        _finding(
            answers,
            one,
            {name: value(f"{name} {at}", ratio.number, is_share=name != SHIFT) for name, ratio in ratios[at].items()},
            decided[at],
            adjusted[at],
        )
        for at, one in enumerate(edits)
    ]
    return Probed(
        findings=findings,
        spread=value(SPREAD, freedom, is_share=False),
        accuracy=value(ACCURACY, of_pairs.number, is_share=True),
        num_pairs=len(answers.chosen),
        num_prompts=answers.num_prompts,
        num_unreadable=answers.num_unreadable,
    )


@dataclass(frozen=True, slots=True)
class _Ratio:
    """A mean, as sums by prompt."""

    total: FloatArray
    """(C,)"""
    number: FloatArray
    """(C,) of what is averaged."""

    def over(self, weights: FloatArray) -> FloatArray:
        """(B,) means under prompt weights (B, C); NaN where nothing is averaged."""
        result: FloatArray = (weights @ self.total) / (weights @ self.number)
        return result


def _ratio(answers: Answers, cluster: IntArray, values: FloatArray) -> _Ratio:
    number = answers.num_prompts
    total = np.bincount(cluster, values, number).astype(np.float64)
    return _Ratio(total, np.bincount(cluster, minlength=number).astype(np.float64))


def _spread_sums(answers: Answers) -> tuple[FloatArray, FloatArray]:
    """(C,) squared deviations from the mean of the same prompt, with all its turns; and their degrees of freedom."""
    prompt = _numbered([prompt for prompt, _ in answers.sides])
    number = np.bincount(prompt)
    mean = np.bincount(prompt, answers.rewards) / number
    squares = np.bincount(answers.cluster, (answers.rewards - mean[prompt]) ** 2)
    freedom = np.bincount(answers.cluster, 1 - 1 / number[prompt])  # sums to n - 1 over the answers of a prompt
    return squares.astype(np.float64), freedom.astype(np.float64)


def _numbered(values: Sequence[Any]) -> IntArray:
    places = {one: at for at, one in enumerate(dict.fromkeys(values))}
    return np.array([places[one] for one in values])


def _ratios(answers: Answers, edits: Edits) -> dict[str, _Ratio]:
    """The quantities of a rule before they are divided by the spread, by name."""
    gain = edits.rewards - answers.rewards[edits.place]
    cluster = answers.cluster[edits.place]
    ratios = {SHIFT: _ratio(answers, cluster, gain)}
    if edits.rule.expects == "lower":
        ratios[VIOLATIONS] = _ratio(answers, cluster, (gain >= 0).astype(np.float64))
    return ratios


def _border_p(rule: Rule, point: float, replicates: FloatArray | None, num_prompts: int) -> float | None:
    """Two-sided p that the deciding quantity lies on the border of what is tolerated, the nearer one of two."""
    if replicates is None or not np.isfinite(point) or num_prompts < MIN_PROMPTS:
        return None
    border = MAX_VIOLATIONS if rule.expects == "lower" else SHIFT_TOLERANCE
    if rule.expects == "invariant" and point < 0:
        border = -SHIFT_TOLERANCE
    return interval_p(replicates - border, num_prompts)


def _finding(
    answers: Answers, edits: Edits, values: dict[str, MetricValue], p: float | None, p_adjusted: float
) -> Finding:
    rule = edits.rule
    verdict: Verdict = "not applied" if not len(edits.place) else "unclear"
    decisive = values[VIOLATIONS if rule.expects == "lower" else SHIFT]
    if p is not None and decisive.value is not None and decisive.ci_low is not None and decisive.ci_high is not None:
        ends = (decisive.ci_low, decisive.ci_high)
        if not _is_tolerated(rule, decisive.value) and p_adjusted < LEVEL:
            verdict = "violated"
        elif all(_is_tolerated(rule, end) for end in ends):
            verdict = "holds"
    touched = np.isin(answers.chosen, edits.place) | np.isin(answers.rejected, edits.place)
    return Finding(
        rule=rule.name,
        expects=rule.expects,
        meaning=rule.meaning,
        verdict=verdict,
        num_pairs=int(touched.sum()),
        num_answers=len(edits.place),
        num_prompts=len(np.unique(answers.cluster[edits.place])),
        num_unseen=edits.num_unseen,
        num_unreadable=edits.num_unreadable,
        shift=values[SHIFT],
        violations=values.get(VIOLATIONS),
        p=p,
        p_adjusted=p_adjusted,
        worst=_worst(answers, edits, downwards=rule.expects == "invariant" and (values[SHIFT].value or 0.0) < 0),
    )


def _is_tolerated(rule: Rule, value: float) -> bool:
    if rule.expects == "lower":
        return value <= MAX_VIOLATIONS
    return value <= SHIFT_TOLERANCE and (rule.expects == "not_higher" or value >= -SHIFT_TOLERANCE)


def _worst(answers: Answers, edits: Edits, *, downwards: bool) -> tuple[Example, ...]:
    gain = edits.rewards - answers.rewards[edits.place]
    order = np.argsort(gain if downwards else -gain, kind="stable")[:NUM_WORST]
    wrong = [at for at in order if (gain[at] < 0 if downwards else gain[at] >= 0)]
    return tuple(
        Example(
            prompt=prompt_text(answers.sides[edits.place[at]][0]),
            original=answers.sides[edits.place[at]][1],
            edited=edits.texts[at],
            reward=float(answers.rewards[edits.place[at]]),
            edited_reward=float(edits.rewards[at]),
        )
        for at in wrong
    )
