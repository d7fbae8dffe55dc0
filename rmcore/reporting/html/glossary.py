"""The words that a reader needs: what the parts of the original readiness score are, and what terms mean.

The names of the metrics themselves are in rmcore.core.metrics.
"""

from rmcore.core.metrics import METRICS

READINESS = {
    "accuracy_score": ("accuracy", "min(1, held-out pairwise accuracy)"),
    "calibration_score": ("calibration", "max(0, 1 − 5 · ECE)"),
    "stability_score": ("stability", "max(0, 1 − (reward variance − 0.5) / 2.5)"),
    "landscape_score": ("landscape", "max(0, 1 − (λmax − 50) / 450)"),
}
"""Labels and definitions of the parts of the original score."""

READINESS_WEAKNESS = (
    "Nothing is decided by it. A model that guesses with small margins scores 0.88, the score can exceed 1, "
    "multiplying all rewards by a constant changes it, and over 110 reward models of known gain its rank correlation "
    "with that gain was 0.008. It is kept for comparison with earlier runs."
)

NUMBER_WORDS = {
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
}
"""In a run's glossary, before the words of capabilities."""
RUN_WORDS = {
    "gate": "conditions that a model must meet, each on its own: passing one does not make up for failing another",
    "evidence level": "how strong the evidence of a verdict is: 1 labelled pairs, 2 logged answers, 3 judged samples "
    "of the policy, 4 a policy that was optimised; nothing is called ready below the third",
    "logged answer": "an existing answer, from any model, that labels compare with other answers to its prompt",
    "policy, start policy": "the model that answers prompts and is optimised against the reward model; the start "
    "policy is as it was before",
    "proxy reward, true reward": "proxy: the reward model's output, for which the policy is optimised; true reward: "
    "the quality that should rise, known in the synthetic benchmark or estimated by a judge",
    "KL, nats": "how far the policy has moved from the start policy, for a whole response; best-of-16 is 1.8",
    "GRPO": "training in which the samples of one prompt are compared with each other (Shao et al. 2024)",
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
    "supported": "the whole interval is on the side of the threshold that the claim names",
    "refuted": "the whole interval is on the other side",
    "inconclusive": "the interval holds the threshold, or there is none: this matrix cannot tell. It does not mean "
    "that there is no effect",
    "95 % interval": "the range in which the number would plausibly lie with other seeds and, for numbers over "
    "held-out pairs, other prompts of the same kind. Seeds are the outer level, whole prompts the inner one, because "
    "pairs of one prompt are alike",
    "paired": "both arms met the same pairs, so the pairs that are easy or hard for both cancel out",
    "difference, points": "arm minus the other; percentage points where the metric is a share",
    "ratio, ×": "arm over the other; 1× is no difference",
    "band": "where rm-opt draws the line between failure, acceptable and success",
}
_SHARED_WORDS = ("pairwise accuracy", "margin", "calibration, ECE", "validation", "gate", "artifact, key", "cached")

EXPERIMENT_WORDS: dict[str, str] = _OF_EXPERIMENTS | {word: (NUMBER_WORDS | RUN_WORDS)[word] for word in _SHARED_WORDS}
"""Words that a reader of an experiment's report needs, some of them the same as in a pipeline's."""
