"""Sizes that would decide claims that are undecided, and how likely the looks that are left do.

Nothing here decides anything, and no registration depends on it.
"""

from collections.abc import Sequence

from rmcore.evaluation.verdicts.judgement import Looks, chance_to_decide
from rmcore.evaluation.verdicts.size import deciding_size
from rmcore.reporting.experiment_schema import Size
from rmcore.study.analysis import ALPHA, LooksTaken
from rmcore.study.cells import GAP


def deciding_sizes(taken: LooksTaken) -> dict[str, Size]:
    """Give the sizes of new studies, each of one inconclusive claim alone, by claim.

    Claims without an interval, and those of fewer than five seeds, have none.
    """
    sizes: dict[str, Size] = {}
    for one in taken.results:
        claim, estimates = taken.evidence[one["name"]]
        if one["verdict"] != "inconclusive":
            continue
        found = deciding_size(estimates[-1], claim.borders, alpha=ALPHA)
        if found is not None:
            # The gap's prompts are those of the training, too, which no test set adds to.
            sizes[one["name"]] = {"seeds": found.seeds, "prompts": None if one["metric"] == GAP else found.prompts}
    return sizes


def chances(taken: LooksTaken, looks: Sequence[int]) -> dict[str, float]:
    """Give the probability that the last look decides a claim, by open claim (see `chance_to_decide`).

    A claim without an interval has none.

    Args:
        taken: looks so far.
        looks: numbers of seeds of all looks.
    """
    plan = Looks(tuple(looks))
    seen = {name: taken.evidence[name] for name in taken.open}
    return {
        name: chance_to_decide(claim, estimates, plan, alpha=ALPHA)
        for name, (claim, estimates) in seen.items()
        if estimates[-1].spread is not None
    }
