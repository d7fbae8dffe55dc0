"""What each number is called, its unit, how it is defined, and the words that a reader needs.

Definitions repeat those of rmcore.evaluation and rmcore.landscape in one sentence each.
"""

from typing import NamedTuple


class Term(NamedTuple):
    """A number as readers see it. `unit`: "%" for shares, "count", "" for plain numbers, else a word to append."""

    label: str
    unit: str
    definition: str


METRICS: dict[str, Term] = {
    "pairwise_accuracy": Term(
        "pairwise accuracy", "%", "share of pairs whose chosen side gets the higher reward; ties count on neither side"
    ),
    "length_matched_accuracy": Term(
        "length-matched accuracy",
        "%",
        "pairwise accuracy where the two completions differ by less than 15 % in characters, so length cannot help",
    ),
    "longer_wins_accuracy": Term(
        "“the longer one wins”", "%", "accuracy of always preferring the longer completion: a yardstick, not this model"
    ),
    "tie_rate": Term("ties", "%", "share of pairs with exactly equal rewards"),
    "loss": Term("loss", "nats", "mean of log(1 + exp(−margin)); 0.693 is guessing"),
    "mean_margin": Term("mean margin", "logits", "mean of reward(chosen) − reward(rejected)"),
    "margin_std": Term("spread of margins", "logits", "standard deviation of the margins"),
    "margin_p05": Term("margin, 5th percentile", "logits", "5 % of the margins are below"),
    "margin_p25": Term("margin, 25th percentile", "logits", "a quarter of the margins is below"),
    "margin_p50": Term("median margin", "logits", "half of the margins are below"),
    "margin_p75": Term("margin, 75th percentile", "logits", "three quarters of the margins are below"),
    "margin_p95": Term("margin, 95th percentile", "logits", "95 % of the margins are below"),
    "negative_margin_rate": Term("negative margins", "%", "share of pairs ranked the wrong way round"),
    "ece_debiased": Term(
        "calibration error (ECE), debiased",
        "",
        "mean gap between confidence max(p, 1 − p), p = sigmoid(margin), and accuracy over bins of confidence, without "
        "the upward bias of binning; 0 where none was found",
    ),
    "ece_tempered_debiased": Term(
        "ECE after temperature, debiased", "", "the same of margin / temperature, on pairs it was not fitted on"
    ),
    "temperature": Term(
        "temperature",
        "",
        "the number to divide margins by for the best probabilities; above 1 the model is too sure of itself",
    ),
    "brier": Term("Brier score", "", "mean squared error of the probability; 0.25 is guessing"),
    "roc_auc": Term(
        "ROC AUC (secondary)",
        "",
        "chance that a chosen side outscores a rejected side of any prompt; compares offsets between prompts that "
        "training leaves free",
    ),
    "pooled_reward_variance": Term("reward variance, pooled", "logits²", "variance of all held-out rewards together"),
    "within_prompt_reward_variance": Term(
        "reward variance within prompts", "logits²", "variance among answers to the same prompt, averaged over prompts"
    ),
    "train_test_gap": Term("train − test accuracy", "%", "how much better the model does on pairs that it has seen"),
    "loss_after_temperature": Term(
        "loss after temperature", "nats", "loss of margin / temperature: what is left when the scale is set right"
    ),
    "readiness_v1": Term("readiness v1", "", "the weighted score of the readiness section"),
    "on_policy_accuracy": Term("on-policy accuracy", "%", "accuracy on pairs of the policy's own samples"),
    "hard_accuracy": Term("hard on-policy accuracy", "%", "the same where the shorter sample is the better one"),
    "win_rate_16": Term("best-of-16 win rate", "%", "how often the best of 16 samples beats one more"),
    "planned_gain": Term("gain at the planned KL", "sd", "of the gold reward, in deviations within prompts"),
    "headroom": Term("headroom", "", "distance to the gold reward's peak over the planned distance"),
    "signal_share": Term("signal share", "%", "of the variance within prompts that other training data repeat"),
    "gain_probability": Term("probability of that gain", "%", "as for the gold world's small reward models"),
}

_PATTERNS: dict[str, Term] = {
    "pairwise_accuracy[": Term("accuracy: {}", "%", "pairwise accuracy over the pairs of this subset"),
    "tpr@": Term("true positive rate at {}", "%", "share of chosen sides with sigmoid(reward − mean) at or above it"),
    "fpr@": Term(
        "false positive rate at {}", "%", "share of rejected sides with sigmoid(reward − mean) at or above it"
    ),
    "fnr@": Term("false negative rate at {}", "%", "share of chosen sides with sigmoid(reward − mean) below it"),
}

SPECTRUM: dict[str, Term] = {
    "lambda_max": Term("largest eigenvalue λmax", "", "curvature of the loss along its sharpest direction"),
    "lambda_min": Term("smallest eigenvalue λmin", "", "negative: along some direction the loss still bends down"),
    "trace_estimate": Term("trace", "", "sum of all eigenvalues, estimated with random probes"),
    "negative_mass": Term("negative mass", "%", "sizes of the negative eigenvalues together, as a share of all sizes"),
    "effective_rank": Term(
        "effective rank", "", "about how many directions carry the curvature: k for k equal eigenvalues"
    ),
    "condition_number": Term("condition number", "", "largest over smallest resolved positive eigenvalue"),
    "sharpness_score": Term("sharpness λmax / trace", "", "share of the trace in one direction"),
    "flatness_index": Term("flatness 1 / λmax", "", "grows merely because margins grow: never read it alone"),
}

NORMALIZED: dict[str, Term] = {
    "temperature": Term("size of the margins", "logits", "their root mean square: what they are divided by here"),
    "lambda_max": Term("λmax at margins of size 1", "", "may be compared between models whose margins differ in size"),
    "lambda_min": Term("λmin at margins of size 1", "", "the most negative curvature of the same loss"),
    "trace": Term("trace at margins of size 1", "", "sum of all eigenvalues of the same loss"),
}

GAUSS_NEWTON: dict[str, Term] = {
    "lambda_max": Term("λmax of the Gauss–Newton matrix", "", "its largest eigenvalue; none of them is negative"),
    "trace": Term("trace of the Gauss–Newton matrix", "", "sum of all its eigenvalues"),
    "effective_rank": Term("effective rank", "", "about how many directions carry it: k for k equal eigenvalues"),
}

DENSITY: dict[str, Term] = {
    "negative_mass": SPECTRUM["negative_mass"],
    "effective_rank": SPECTRUM["effective_rank"],
    "trace": Term("trace", "", "sum of all eigenvalues, from the same probes as the density"),
    "lambda_high": Term("largest value seen", "", "λmax is at least this"),
    "lambda_low": Term("smallest value seen", "", "λmin is at most this"),
}

SAM: dict[str, Term] = {
    "sharpness": Term("SAM sharpness", "nats", "rise of the loss after one step of this length up its own gradient"),
    "first_order": Term("rise that the slope predicts", "nats", "length of the step times length of the gradient"),
    "second_order": Term(
        "rise that slope and curvature predict", "nats", "the same with the curvature along the gradient"
    ),
}

NOISE: dict[str, Term] = {
    "lambda_max": SPECTRUM["lambda_max"],
    "lambda_min": SPECTRUM["lambda_min"],
    "trace": SPECTRUM["trace_estimate"],
}

CURVATURE_WORDS: dict[str, str] = {
    "Hessian, eigenvalue": "the matrix of second derivatives of the loss, its curvature around the trained weights; an "
    "eigenvalue λ is the curvature along one direction. Large: sharp; negative: the loss bends down, so no minimum",
    "Gauss–Newton matrix": "the part of the Hessian that is there even if the margins were linear in the weights; it "
    "is never negative and leaves out how the model itself bends",
    "trace": "sum of all eigenvalues; a single eigenvalue can be large while the trace is near zero",
    "effective rank": "how many equal eigenvalues would be as spread out as these: 1 when one direction carries all",
    "spectral density": "how many of all eigenvalues lie near each value, as a smooth curve",
    "residual": "error bound of a computed eigenvalue: some true eigenvalue of the same pairs lies within it",
    "standard error over probes": "spread of an estimate from random vectors; more vectors make it smaller",
    "standard error over prompts": "how much the number would vary with other prompts of the same kind; whole prompts "
    "are left out or regrouped, because pairs of one prompt are alike",
    "SAM sharpness": "rise of the loss after one small step straight up its gradient (Foret et al. 2021)",
}
"""What a reader of the curvature section needs."""

READINESS: dict[str, Term] = {
    "accuracy_score": Term("accuracy", "", "min(1, held-out pairwise accuracy)"),
    "calibration_score": Term("calibration", "", "max(0, 1 − 5 · ECE)"),
    "stability_score": Term("stability", "", "max(0, 1 − (reward variance − 0.5) / 2.5)"),
    "landscape_score": Term("landscape", "", "max(0, 1 − (λmax − 50) / 450)"),
}

READINESS_WEAKNESS = (
    "Known weaknesses of v1: a model that guesses with small margins can score 0.88, the score can exceed 1, "
    "multiplying all rewards by a constant changes it, and in a controlled study it hardly went with what a policy "
    "gained (correlation 0.17, against 0.92 for pairwise accuracy). Read it beside the other numbers, never alone."
)

WORDS: dict[str, str] = {
    "reward model": "a model that gives one number, the reward, to an answer to a prompt; higher is better",
    "pair": "one prompt with two completions, one of which (chosen) was preferred to the other (rejected)",
    "side": "the prompt with one of its two completions",
    "reward, logits": "the model's output; only differences count: one logit more is e times the odds of preference",
    "margin": "reward(chosen) − reward(rejected); positive means ranked as labelled",
    "pairwise accuracy": METRICS["pairwise_accuracy"].definition,
    "label ceiling": "the accuracy of a perfect model on these noisy labels, known only where the true reward is known",
    "95 % interval": "the range in which the number would plausibly lie on other prompts of the same kind; drawn by "
    "resampling whole prompts, because pairs of one prompt are alike",
    "held-out, test": "pairs whose prompts were not trained on; all headline numbers are on these",
    "validation": "pairs held out of training for choosing the checkpoint and fitting the temperature",
    "out of distribution": "pairs that differ from the training pairs in kind, where a learnt shortcut stops working",
    "calibration, ECE": "whether “80 % sure” is right 80 % of the time; ECE is the mean gap (0 is perfect)",
    **CURVATURE_WORDS,
    "curvature along the trajectory": "λmax, λmin and trace at each evaluation of a training, on the same few pairs; "
    "λmax falls merely because margins grow, so the size of the margins is drawn beside it",
    "gate": "conditions that a model must meet before a policy is optimised against it",
    "readiness v1": "one weighted score of accuracy, calibration, stability and landscape; above 0.8 is called ready",
    "policy, start policy": "the model that answers prompts and is optimised against the reward model; the start "
    "policy is as it was before",
    "proxy reward, gold reward": "proxy: what the policy is optimised for, the reward model's; gold: what counts, "
    "known in the gold world or from a judge",
    "KL, nats": "how far the policy has moved from the start policy, for a whole response; best-of-16 is 1.8",
    "GRPO": "training in which the samples of one prompt are compared with each other (Shao et al. 2024)",
    "refresh": "new labels on samples of the policy as it is now, on which the reward model is trained further",
    "optimizer step": "one update of the weights from one batch of pairs",
    "artifact, key": "the stored result of a stage; its key is a digest of everything that the result depends on",
    "cached": "the artifact existed already with the same key, so the stage was not run again",
}
_OF_EXPERIMENTS = {
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
_SHARED_WORDS = ("pairwise accuracy", "margin", "calibration, ECE", "validation", "gate", "artifact, key", "cached")

EXPERIMENT_WORDS: dict[str, str] = _OF_EXPERIMENTS | {word: WORDS[word] for word in _SHARED_WORDS}
"""What a reader of an experiment's report needs, some of it as in that of a pipeline."""


def metric_term(name: str) -> Term:
    """The term of a metric; one that is not listed keeps its own name, without definition."""
    if name in METRICS:
        return METRICS[name]
    for prefix, term in _PATTERNS.items():
        if name.startswith(prefix):
            return term._replace(label=term.label.format(name[len(prefix) :].removesuffix("]")))
    return Term(name.replace("_", " "), "", "")


def metric_order(name: str) -> tuple[int, str]:
    """Sort key: listed metrics in the order of METRICS, then subsets and thresholds, then the rest by name."""
    if name in METRICS:
        return list(METRICS).index(name), ""
    listed = [index for index, prefix in enumerate(_PATTERNS) if name.startswith(prefix)]
    return len(METRICS) + (listed[0] if listed else len(_PATTERNS)), name
