"""Credit of rollouts: one number each that a policy is trained on, from a reward model's score and what else is known.

Assigners read what a scorer, an environment or a verifier wrote into a rollout's `meta`, and write nothing. One takes
the value of another and joins the score to it:

    RewardModelCreditAssigner(LengthCredit(0.01), mode="add")        rm_score - 0.01 num_tokens

A number that is missing or not finite is refused, never replaced: one NaN would spoil a whole step of the policy.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from numbers import Real
from typing import Any, Literal, Protocol, get_args

from rmcore.core.errors import ConfigError, DataError
from rmcore.serving.scorer import Rollout

Mode = Literal["replace", "add", "multiply", "weighted", "bonus"]
_WEIGHTS = {"weighted": "the w of w * s + (1 - w) * b, in [0, 1]", "bonus": "the c of b + c * s, any finite number"}


class CreditAssigner(Protocol):
    """Gives each rollout its credit, not normalised within the rollouts of one prompt: TRL does that."""

    def assign(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Credits of N rollouts in their order: (N,), finite. The rollouts stay as they are.

        Raises:
            DataError: a rollout lacks what its credit is made of, or a number is not finite; the message names it.
        """


@dataclass(frozen=True)
class LengthCredit:
    """The price of length for `mode="add"`: -per_token * meta[key], the number of tokens that the policy wrote.

    per_token: price of a token in the unit of the credit, such as logits; finite and at least 0, else a ConfigError.
    """

    per_token: float
    key: str = "num_tokens"

    def __post_init__(self) -> None:
        if not (_is_number(self.per_token) and self.per_token >= 0):
            raise ConfigError(f"per_token={self.per_token!r:.60}: a price is subtracted; take a finite number >= 0.")

    def assign(self, rollouts: Sequence[Rollout]) -> list[float]:
        """See CreditAssigner."""
        tokens = _read(rollouts, self.key, "Let what draws the rollouts write there how many tokens the policy wrote.")
        return _checked([-self.per_token * count for count in tokens], rollouts, "LengthCredit", "Lower per_token.")


@dataclass(frozen=True)
class RewardModelCreditAssigner:
    """Joins an inner assigner's value b and the reward model's score s, which the scorer wrote to `meta[score_key]`.

    replace: s · add: b + s · multiply: b * s · weighted: w * s + (1 - w) * b · bonus: b + c * s

    inner: gives b in the unit of s (logits, unless the scorer has `normalize=True`) or, with a weight, in its own. Not
        for replace, which would ignore it. To multiply logits, let b be >= 0: two negatives make a credit.
    weight: w in [0, 1], or c, any finite number. No default, for it depends on both units; not for other modes.
    Raises ConfigError: the mode is unknown, lacks what it needs or got what it ignores, or the weight is out of range.
    """

    inner: CreditAssigner | None = None
    _: KW_ONLY
    mode: Mode = "replace"
    weight: float | None = None
    score_key: str = "rm_score"

    def __post_init__(self) -> None:
        asked, needs = f"mode={self.mode!r}", _WEIGHTS.get(self.mode)
        if self.mode not in get_args(Mode):
            raise ConfigError(f"{asked} is not known; name one of {', '.join(get_args(Mode))}.")
        if (self.mode == "replace") != (self.inner is None):
            raise ConfigError(f"{asked}, inner={self.inner!r:.40}: replace would ignore an inner, a join needs one.")
        if needs is None and self.weight is not None:
            raise ConfigError(f"{asked} would ignore weight={self.weight!r:.40}: leave it out, or name another mode.")
        is_number = self.weight is not None and _is_number(self.weight)
        if needs and not (is_number and (self.mode == "bonus" or 0 <= (self.weight or 0) <= 1)):
            raise ConfigError(f"weight={self.weight!r:.60}: {asked} needs {needs}. There is no default.")

    def assign(self, rollouts: Sequence[Rollout]) -> list[float]:
        """See CreditAssigner. Scores are checked before the inner is asked, which may be costly."""
        scores = _read(
            rollouts, self.score_key, f"Let RewardModelScorer(..., score_key={self.score_key!r}) score it first."
        )
        if self.inner is None:
            return scores
        name, values = type(self.inner).__name__, self.inner.assign(rollouts)
        if len(values) != len(rollouts):
            raise DataError(f"{name} gave {len(values)} values for {len(rollouts)} rollouts; let it give one for each.")
        values = _checked(values, rollouts, name, "Let its assign give finite numbers.")
        joined = [self._join(b, s) for b, s in zip(values, scores, strict=True)]
        return _checked(joined, rollouts, f"mode={self.mode!r}", "Bring both values to a smaller unit.")

    def _join(self, b: float, s: float) -> float:
        w = 0.0 if self.weight is None else float(self.weight)
        return {"add": b + s, "multiply": b * s, "weighted": w * s + (1 - w) * b, "bonus": b + w * s}[self.mode]


def _read(rollouts: Sequence[Rollout], key: str, remedy: str) -> list[float]:
    for index, rollout in enumerate(rollouts):
        if key not in rollout.meta:
            raise DataError(f"{_name(rollouts, index)} has no {key!r}. {remedy}")
    return _checked([rollout.meta[key] for rollout in rollouts], rollouts, f"meta[{key!r}]", remedy)


def _checked(values: Sequence[Any], rollouts: Sequence[Rollout], source: str, remedy: str) -> list[float]:
    for index, value in enumerate(values):
        if not _is_number(value):
            raise DataError(f"{_name(rollouts, index)} has {value!r:.60} from {source}, no finite number. {remedy}")
    return [float(value) for value in values]


def _is_number(value: Any) -> bool:
    with suppress(OverflowError):  # of an integer beyond any float
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    return False


def _name(rollouts: Sequence[Rollout], index: int) -> str:
    steps = rollouts[index].steps
    prompt = steps[0].prompt if steps else ""
    text = prompt if isinstance(prompt, str) else " ".join(turn.message().text for turn in prompt)
    return f"rollout {index} of the list (prompt {text!r:.60}, meta of {list(rollouts[index].meta)})"
