"""Counterfactual preference pairs: what a model has to be trained on, too, so that it no longer follows an edit.

Of a fault (`lower`): the chosen answer is preferred to itself with the fault. Of manner (`invariant`, `not_higher`): a
pair keeps its label while one of its answers is edited, the rejected one and the chosen one in turns. So the edit is on
the losing side as often as on the winning one, and with the loss -log sigmoid(margin) nothing is lower than to give it
no reward at all: for any margin m of a pair, -log sigmoid(m - s) - log sigmoid(m + s) is least at the shift s = 0.
Swapping in edited copies as Liu et al. 2024 (RRM, arXiv:2409.13156) swap in answers to other prompts.

The pairs must be training data. Made of test pairs they would let the model see the test.
"""

from collections.abc import Sequence
from random import Random

from rmcore.core.errors import DataError
from rmcore.data.pair import PreferencePair
from rmcore.probes.rule import Answer, Rule

SHARE = 0.25
"""Counterfactual pairs of each rule, as a share of the pairs."""
RULE_KEY = "probe_rule"
"""Where a counterfactual pair's metadata name its rule."""


def repair_pairs(pairs: Sequence[PreferencePair], rules: Sequence[Rule], *, seed: int = 0) -> list[PreferencePair]:
    """The pairs given, and counterfactual ones for each rule, shuffled: what to train on.

    A rule gets SHARE as many as there are pairs, of pairs drawn at random without replacement, or as many as it applies
    to. They carry the rule's name in their metadata, and no margin: how strong they are nobody has annotated.

    Raises:
        DataError: a rule applies to none of the pairs.
    """
    found = list(pairs)
    for rule in rules:
        made = _of_rule(pairs, rule, seed)
        if not made:
            raise DataError(f"the rule {rule.name} applies to none of the {len(pairs)} pairs that are to repair it.")
        found += made
    Random(f"{seed} order").shuffle(found)  # noqa: S311 - data, not cryptography
    return found


def _of_rule(pairs: Sequence[PreferencePair], rule: Rule, seed: int) -> list[PreferencePair]:
    rng = Random(f"{seed} repair {rule.name}")  # noqa: S311 - data, not cryptography
    order = rng.sample(range(len(pairs)), len(pairs))
    wanted = max(1, round(SHARE * len(pairs)))
    made: list[PreferencePair] = []
    for at in order:
        if len(made) == wanted:
            break
        one = _counterfactual(pairs[at], pairs[order[at]], rule, on_rejected=len(made) % 2 == 0, seed=seed)
        if one is not None:
            made.append(one)
    return made


def _counterfactual(
    pair: PreferencePair, other: PreferencePair, rule: Rule, *, on_rejected: bool, seed: int
) -> PreferencePair | None:
    """Make one pair of another; None where the rule does not apply, or leaves two equal answers."""
    elsewhere = other.chosen if other.prompt_id != pair.prompt_id else None
    is_fault = rule.expects == "lower"
    text = pair.rejected if on_rejected and not is_fault else pair.chosen
    edited = rule.apply(Answer(pair.prompt, text, elsewhere), seed=seed)
    if edited is None:
        return None
    if is_fault:
        chosen, rejected = pair.chosen, edited
    else:
        chosen, rejected = (pair.chosen, edited) if on_rejected else (edited, pair.rejected)
    if chosen == rejected:
        return None
    return PreferencePair(pair.prompt, chosen, rejected, metadata={RULE_KEY: rule.name})
