"""The words that a reader of an experiment's report needs, beside those of the pipeline's glossary."""

from rmcore.reporting.html.glossary import WORDS

_OWN = {
    "arm": "one recipe: the base configuration with the changes that its row names",
    "control": "the arm that the others are compared with",
    "seed": "one repetition of every arm: it sets the initial reward head, the order of the data and the split; "
    "how much the seeds differ shows what chance alone does",
    "cell": "one arm under one seed: one training and its evaluation",
    "hypothesis, claim": "a statement with a metric, a side and a threshold, written down before the first cell ran",
    "registration": "the frozen list of hypotheses, with its digest; a later change makes a new one and says what "
    "differs, so that a claim cannot be fitted to a result",
    "supported": "the whole interval lies on the side of the threshold that the claim names",
    "refuted": "the whole interval lies on the other side",
    "inconclusive": "the interval holds the threshold, or there is none: this matrix cannot tell. It does not mean "
    "that there is no effect",
    "95 % interval": "the range in which the number would plausibly lie with other seeds and, for numbers over "
    "held-out pairs, other prompts of the same kind. Seeds are the outer level, whole prompts the inner one, because "
    "pairs of one prompt are alike",
    "paired": "both arms met the same pairs, so the pairs that are easy or hard for both cancel out",
    "difference, points": "arm minus the other; percentage points where the metric is a share",
    "ratio, ×": "arm over the other; 1× is no difference",
    "p, Holm": "how surprising the value would be if it were exactly the threshold; Holm's adjustment keeps the chance "
    "of any wrong claim among all hypotheses at 5 %",
    "sign-flip test": "a second test of whether two arms differ at all: it swaps them prompt by prompt",
    "smallest detectable effect": "how far from the threshold the truth has to be for this number of seeds and prompts "
    "to find it four times out of five",
    "tuning": "trials of one setting of an arm before its cells run, with a seed of their own",
    "band": "what the specification of the experiment calls failure, acceptable or success",
}
_SHARED = ("pairwise accuracy", "margin", "calibration, ECE", "validation", "gate", "artifact, key", "cached")

EXPERIMENT_WORDS: dict[str, str] = _OWN | {word: WORDS[word] for word in _SHARED}
