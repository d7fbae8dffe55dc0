"""The claims of the study of readiness, fixed in code before a row of it is computed, and how each is judged.

Frozen with hash and time by whoever starts the study (`rmcore.study.registration`); the study's record names the same
digest, so a verdict can always name the claims that it judged.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from rmcore.core.store import make_key
from rmcore.policy.overoptimization import Method

LEVEL = 0.95
NUM_RESAMPLES = 2000
PRIMARY_GAIN: Method = "best_of_n"
"""The gain that claims are about: of the best of all samples of a prompt, 64 in the study."""


@dataclass(frozen=True, slots=True)
class ReadinessClaim:
    """One score ranks reward models by what they gain better than another: `better` above `than`, both by name."""

    name: str
    role: Literal["primary", "secondary"]
    better: str
    than: str
    text: str


CLAIMS = (
    ReadinessClaim(
        "H1",
        "primary",
        "win_rate_16",
        "on_policy_accuracy",
        "the best-of-16 win rate ranks reward models by their gain better than on-policy accuracy",
    ),
    ReadinessClaim(
        "S1",
        "secondary",
        "v2",
        "win_rate_fit",
        "the composed score ranks them better than the best-of-16 win rate, both as left-out fits",
    ),
    ReadinessClaim(
        "S2",
        "secondary",
        "measured_gain",
        "win_rate_16",
        "the gain on the judged prompts ranks them better than the best-of-16 win rate",
    ),
)
STATISTIC = (
    "Spearman's rho of the score, from the judged prompts, with the gain of best-of-64 on prompts that no score has "
    "seen, over all reward models of a world, averaged over the worlds; difference of the two scores"
)
INTERVAL = (
    "95 % expanded percentile interval of 2000 resamples; a cluster is a recipe: its seeds, its heads and both of its "
    "worlds are drawn together, which is wider than drawing backbones; left-out fits are not fitted anew"
)
LEFT_OUT = (
    "a model's left-out probability is from a logistic fit, over both worlds, to models that share no kind of defect "
    "with it, neither of its backbone nor of its head; clean backbones are a kind"
)
VERDICTS = (
    "primary: supported where the interval lies above zero, refuted where it lies below, else inconclusive; secondary: "
    "the same where p, which inverts that interval, is below 0.05 after Holm's correction over the secondary claims"
)
REPLACING = (
    "on-policy accuracy is the shipped score; the win rate replaces it only if H1 is supported and the 95 % interval "
    "of each world alone lies above zero; after that the composed score by S1, else the measured gain by S2, on the "
    "same conditions"
)


def frozen_claims() -> dict[str, Any]:
    """Everything that decides the verdicts, JSON-ready."""
    return {
        "claims": [asdict(claim) for claim in CLAIMS],
        "statistic": STATISTIC,
        "interval": INTERVAL,
        "left_out": LEFT_OUT,
        "verdicts": VERDICTS,
        "replacing": REPLACING,
        "level": LEVEL,
        "resamples": NUM_RESAMPLES,
        "gain": PRIMARY_GAIN,
    }


def claims_digest() -> str:
    """Digest of `frozen_claims`."""
    return make_key(frozen_claims())
