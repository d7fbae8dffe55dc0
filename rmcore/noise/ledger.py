"""A ledger of doubtful labels: a row a pair, with its cross-fitted margin, what the label's posterior is, and flags.

| column | what |
| --- | --- |
| pair_id, prompt_id, source, annotator | which pair, and whose |
| fold, margin | the fold that the pair was scored in, and the margin: below 0 the model prefers the rejected answer |
| with_others | the margin given the other labels of the same answers too (`rmcore.noise.strengths`) |
| posterior | probability that the label was turned round (`rmcore.noise.rate`); missing where no rate can be told |
| cautious | the same under the lower ends of the rates' intervals: what calls are made by |
| called | among the labels called wrong |
| close_call | neither answer has more than 60 % by the margin with the others: no order is learned from other labels |
| contradicted, in_cycle, repeated, near_copy | what the file itself says (`rmcore.noise.contradictions`) |
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import logit

from rmcore.core.arrays import FloatArray, IntArray
from rmcore.core.progress import Report, silent
from rmcore.data.observation import annotator_of
from rmcore.data.pair import PreferencePair
from rmcore.evaluation.ranking import correctness
from rmcore.noise.contradictions import contradicted, couples, in_cycles, near_copies, repeated
from rmcore.noise.rate import LabelModel, Rate, called, check_margins, fit_labels, flipped, group_rates
from rmcore.noise.strengths import Strengths, with_other_labels

FALSE_SHARE = 0.2
"""Default of the expected share of right labels among those that are called wrong: four of five are wrong."""
CLOSE = 0.6
"""A pair of which neither answer is better with more than this probability is a close call."""
EQUALLY_LIKELY = "mistakes are as likely for close calls as for clear ones"
"""The assumption under which the intervals of `LabelModel.rate` and of the rates of groups hold."""
NOBODY = "(not named)"
FLAGS = ("called", "close_call", "contradicted", "in_cycle", "repeated", "near_copy")


@dataclass(frozen=True, slots=True, eq=False)
class Ledger:
    """Labels of P pairs with what is known of them.

    Attributes:
        pairs: as they were read.
        table: (P, columns) as the module says.
        model: of labels given margins with the others.
        strengths: of answers that recur; None where none do.
        rates: "source" and "annotator" -> rates by name, where there are two or more of them.
        false_share: the expected share of right labels among those that are called.
    """

    pairs: Sequence[PreferencePair]
    table: pd.DataFrame
    model: LabelModel
    strengths: Strengths | None
    rates: Mapping[str, Mapping[str, Rate]]
    false_share: float

    @property
    def posterior(self) -> FloatArray:
        """Probability that each label is wrong, (P,)."""
        return self.table["posterior"].to_numpy()

    def doubtful(self) -> IntArray:
        """Places of all pairs, those first whose review pays most, (P,).

        A review rights a label with the posterior's probability. Of two labels that contradict one another one is
        wrong, whatever the model says, so theirs counts as at least one half.
        """
        worth = np.maximum(np.nan_to_num(self.posterior), 0.5 * self.table["contradicted"].to_numpy())
        return np.lexsort((self.table["with_others"], -worth))

    def for_review(self, count: int) -> list[PreferencePair]:
        """Up to `count` pairs whose review pays most; of pairs with the same two answers only one."""
        texts = couples(self.pairs)
        seen: set[tuple[str, frozenset[str]]] = set()
        chosen: list[PreferencePair] = []
        for place in self.doubtful():
            prompt, better, worse = texts[place]
            if len(chosen) < count and (prompt, frozenset((better, worse))) not in seen:
                seen.add((prompt, frozenset((better, worse))))
                chosen.append(self.pairs[place])
        return chosen

    def record(self) -> dict[str, Any]:
        """JSON-ready: the rates with their intervals, and how many pairs have each flag."""
        return {
            "num_pairs": len(self.table),
            "num_prompts": self.model.rate.num_prompts,
            "rate": asdict(self.model.rate),
            "rate_assumes": EQUALLY_LIKELY,
            "rate_of_any_dependence": {"low": self.model.low, "high": self.model.high},
            "rate_is_shown": self.model.is_shown,
            "by_source": {name: asdict(rate) for name, rate in self.rates.get("source", {}).items()},
            "by_annotator": {name: asdict(rate) for name, rate in self.rates.get("annotator", {}).items()},
            "model_agrees": float(correctness(self.table["margin"].to_numpy()).mean()),
            "others_agree": float((self.table["with_others"] > 0).mean()),
            "strengths": None if self.strengths is None else asdict(self.strengths),
            "scale": self.model.scale,
            "design_effect": self.model.design_effect,
            "false_share": self.false_share,
            "expected_wrong": None
            if self.model.says_nothing or not self.model.is_shown
            else float(self.posterior.sum()),
            "flags": {name: int(self.table[name].sum()) for name in FLAGS},
        }


def examine(
    pairs: Sequence[PreferencePair],
    margins: FloatArray,
    folds: IntArray,
    *,
    false_share: float = FALSE_SHARE,
    report: Report = silent,
) -> Ledger:
    """Fit the model of labels, and note what each label is worth.

    A pair's posterior is under the rate of its annotator where several are named, else of its source, else of all.
    Where every rate fits about as well there is no posterior, and no rate of groups.
    Labels are called by the posterior under the lower end of that rate's interval, so nothing is called wrong where the
    rate is not shown to be above 0, over all pairs or in a group.

    Args:
        pairs: P of them.
        margins: (P,) cross-fitted, as `rmcore.noise.crossfit.cross_fit` gives them.
        folds: (P,)
        false_share: see `rmcore.noise.rate.called`.
        report: told of the comparison of texts.

    Raises:
        DataError: see `fit_labels`.
        ModelError: see `rmcore.noise.strengths.with_other_labels`.
    """
    prompts = [pair.prompt_id for pair in pairs]
    check_margins(margins, prompts)
    texts = couples(pairs)
    with_others, strengths = with_other_labels(margins, texts)
    model = fit_labels(with_others, prompts)
    named = {
        "source": [str(pair.metadata.get("source") or NOBODY) for pair in pairs],
        "annotator": [annotator_of(pair.metadata) or NOBODY for pair in pairs],
    }
    rates = {
        kind: group_rates(with_others, prompts, names, model)
        for kind, names in named.items()
        if len(set(names)) > 1 and not model.says_nothing
    }
    each: FloatArray | float = model.rate.value
    least: FloatArray | float = model.rate.low
    for kind, by_name in rates.items():  # the annotator comes last, and counts where there are several
        each = np.array([by_name[name].value for name in named[kind]])
        least = np.array([by_name[name].low if model.is_shown else 0.0 for name in named[kind]])
    cautious = flipped(with_others, model.scale_at_low, least)
    table = pd.DataFrame(
        {
            "pair_id": [pair.pair_id for pair in pairs],
            "prompt_id": prompts,
            **named,
            "fold": folds,
            "margin": margins,
            "with_others": with_others,
            "posterior": np.nan if model.says_nothing else flipped(with_others, model.scale, each),
            "cautious": cautious,
            "called": called(cautious, false_share) & (cautious > 0),
            "close_call": np.abs(model.scale * with_others) < logit(CLOSE),
            "contradicted": contradicted(texts),
            "in_cycle": in_cycles(texts),
            "repeated": repeated(texts),
            "near_copy": near_copies(pairs, folds, report=report),
        }
    )
    return Ledger(pairs, table, model, strengths, rates, false_share)
