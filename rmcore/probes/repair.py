"""Counterfactual preference pairs: what a model has to be trained on, too, so that it no longer follows an edit.

Each pair is an answer and the same answer edited, so that they differ in the edit alone. Its label is the rule's
expectation: where the edit must lower the reward, or must not raise it, the original is preferred. Where nothing may
change, both orders are there: with the loss -log sigmoid(margin) an edit that shifts the reward by s costs
-log sigmoid(s) - log sigmoid(-s), which is least at s = 0. (So `rm-opt data check` counts these pairs as preferred
both ways round.)

Editing one answer of a pair under the pair's own label seems as good and is not. Bullet points are put into plain
answers alone: bulleted chosen answers then meet plain rejected ones, bulleted rejected ones meet chosen answers that
had lists all along, and bullets win (measured in docs/probes.md).

The pairs must be training data. Made of test pairs they would let the model see the test.
"""

from collections.abc import Sequence
from random import Random

from rmcore.core.errors import DataError
from rmcore.data.pair import PreferencePair, with_text_answers
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
    editable = with_text_answers(pairs, "edited")
    for rule in rules:
        made = _of_rule(editable, rule, seed)
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
    for place, at in enumerate(order):
        if len(made) >= wanted:
            break
        text = pairs[at].rejected if rule.expects != "lower" and place % 2 else pairs[at].chosen
        made += _counterfactuals(pairs[at], text, pairs[order[place - 1]], rule, seed)
    return made


def _counterfactuals(
    pair: PreferencePair, text: str, other: PreferencePair, rule: Rule, seed: int
) -> list[PreferencePair]:
    """Make one or two pairs of an answer to a pair's prompt; none where the rule does not apply."""
    elsewhere = other.chosen if other.prompt_id != pair.prompt_id else None
    edited = rule.apply(Answer(pair.prompt, text, elsewhere), seed=seed)
    if edited is None:
        return []
    orders = [(text, edited), (edited, text)] if rule.expects == "invariant" else [(text, edited)]
    return [PreferencePair(pair.prompt, *both, metadata={RULE_KEY: rule.name}) for both in orders]
