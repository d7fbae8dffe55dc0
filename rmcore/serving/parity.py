"""Two programs, one reward: what PyTorch and the server give the same token ids must agree before anyone is answered.

A wrong pooling, a second BOS, a head that was not loaded or an activation too many all show here, and nowhere else
until a policy has been trained on the wrong numbers.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rmcore.core.errors import ServingError
from rmcore.serving.types import RewardProbe

if TYPE_CHECKING:
    from rmcore.models.reward_model import BradleyTerryRM

FLOAT32_TOLERANCE = 1e-4
"""Logits; measured differences of float32 implementations are 1e-6 to 1e-5."""
BF16_TOLERANCE = 0.02
"""Share of the spread of the rewards (and at least of 1 logit): bf16 keeps 8 binary digits, and each of tens of layers
rounds by up to 0.4 %. It sees a wrong token or head, whose errors are of the size of the spread itself."""

_TEXTS = (
    ("What is the capital of France?", "Paris."),
    ("What is the capital of France?", "I do not know, and I will not look it up either."),
    ("Name three primary colours.", "Red, yellow and blue."),
    ("Name three primary colours.", ""),
    ("Schreibe „Grüße“ rückwärts. 🙂", "“eßürG„ 🙂"),
    ("def add(a, b):\n    return", " a + b\n\n\nprint(add(1, 2))"),
    ("Count.", "one two three four five six seven eight nine ten " * 40),
    ("Tell me about the sea. " * 30, "It is wide."),
)


def make_probe(rm: "BradleyTerryRM", *, bf16: bool) -> RewardProbe:
    """The sample with the rewards of `rm`, computed in float32, and how far a server may be from them.

    Args:
        rm: the model that is to be served.
        bf16: whether the server computes in bf16.

    Raises:
        ServingError: a reward is not finite.
    """
    sides = rm.renderer.tokenize_sides(list(_TEXTS))  # short and long, cut, empty, of several scripts
    rewards = rm.score_sides(sides).tolist()
    if not all(map(math.isfinite, rewards)):
        raise ServingError(
            "PyTorch gives rewards that are not finite for the sample: this checkpoint cannot be served. Evaluate it, "
            "and go back to an earlier one."
        )
    spread = max(1.0, max(rewards) - min(rewards))
    return RewardProbe(
        token_ids=tuple(tuple(side.ids) for side in sides),
        rewards=tuple(rewards),
        tolerance=BF16_TOLERANCE * spread if bf16 else FLOAT32_TOLERANCE,
    )


def check_probe(probe: RewardProbe, served: Sequence[float]) -> None:
    """Compare what the server gives for a probe with what was expected.

    Raises:
        ServingError: a row differs by more than the probe allows; the message has the worst one.
    """
    both = list(enumerate(zip(served, probe.rewards, strict=True)))
    row, (found, expected) = max(
        both, key=lambda one: math.inf if math.isnan(one[1][0]) else abs(one[1][0] - one[1][1])
    )
    if not abs(found - expected) <= probe.tolerance:  # a NaN is not
        raise ServingError(
            f"the served rewards differ from PyTorch's by up to {abs(found - expected):.3g} logits, and "
            f"{probe.tolerance:.3g} is rounding: these are not the rewards of this checkpoint, so they are not served. "
            f"Worst: row {row}, {len(probe.token_ids[row])} tokens: expected {expected:+.6f}, served {found:+.6f}"
        )
