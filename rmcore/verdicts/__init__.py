"""Pre-registered hypotheses against intervals.

`estimate_over_seeds` turns one measurement a seed into a value with its interval, `judge` holds estimates against the
claims that were registered before the first run. A verdict follows from the interval, never from the point alone, and
all claims of an experiment share one error rate. Prompts are the inner unit of resampling, seeds the outer one; pairs
never are.
"""

from rmcore.verdicts.estimate import Estimate, SeedSample, estimate_over_seeds
from rmcore.verdicts.judgement import Claim, Judgement, holm, judge

__all__ = ["Claim", "Estimate", "Judgement", "SeedSample", "estimate_over_seeds", "holm", "judge"]
