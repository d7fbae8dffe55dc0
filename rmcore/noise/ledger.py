"""A ledger of doubtful labels: a row a pair, with its cross-fitted margin, what the label's posterior is, and flags.

| column | what |
| --- | --- |
| pair_id, prompt_id | which pair |
| fold, margin | the fold that the pair was scored in, and the margin: below 0 the model prefers the rejected answer |
| with_others | the margin given the other labels of the same answers too (`rmcore.noise.recurring`) |
| posterior | probability that the label was turned round (`rmcore.noise.rate`); missing where no rate can be told |
| cautious | the same under the lowest rate that fits: what calls are made by |
| called | among the labels called wrong |
| close_call | neither answer has more than 60 % by the margin with the others: no order is learned from other labels |
| contradicted | the same two answers are preferred the other way round elsewhere in the file |

`clean` makes a new file without doubtful labels, or with weights for all. Nothing is lost: the manifest, a JSONL file
next to the new one, has every changed pair as it was, with the reason.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from scipy.special import logit

from rmcore.core.arrays import FloatArray, IntArray
from rmcore.core.files import write_json_lines
from rmcore.data.observation import WEIGHT
from rmcore.data.pair import PreferencePair
from rmcore.data.splits import normalized_prompt, normalized_text
from rmcore.data.table import write_converted
from rmcore.evaluation.ranking import correctness
from rmcore.noise.rate import LabelModel, called, fit_labels
from rmcore.noise.recurring import Couple, with_other_labels

FALSE_SHARE = 0.2
"""Default of the expected share of right labels among those that are called wrong: four of five are wrong."""
CLOSE = 0.6
"""A pair of which neither answer is better with more than this probability is a close call."""
FLAGS = ("called", "close_call", "contradicted")
How = Literal["drop", "weight"]
LEAST_WEIGHT = 0.01
"""A weight has to be above 0."""


@dataclass(frozen=True, slots=True, eq=False)
class Ledger:
    """Labels of P pairs with what is known of them.

    Attributes:
        pairs: as they were read.
        table: (P, columns) as the module says.
        model: of labels given margins with the others.
        false_share: the expected share of right labels among those that are called.
    """

    pairs: Sequence[PreferencePair]
    table: pd.DataFrame
    model: LabelModel
    false_share: float

    def doubtful(self) -> IntArray:
        """Places of all pairs, those first whose review pays most, (P,).

        A review rights a label with the posterior's probability. Of two labels that contradict one another one is
        wrong, whatever the model says, so theirs counts as at least one half.
        """
        worth = np.maximum(np.nan_to_num(self.table["posterior"]), 0.5 * self.table["contradicted"].to_numpy())
        return np.lexsort((self.table["with_others"], -worth))

    def for_review(self, count: int) -> list[PreferencePair]:
        """Up to `count` pairs whose review pays most; of pairs with the same two answers only one."""
        texts = couples(self.pairs)
        chosen: dict[tuple[str, frozenset[str]], PreferencePair] = {}
        for place in self.doubtful():
            prompt, *answers = texts[place]
            if len(chosen) < count:
                chosen.setdefault((prompt, frozenset(answers)), self.pairs[place])
        return list(chosen.values())

    def record(self) -> dict[str, Any]:
        """JSON-ready: the rate with its interval, and how many pairs have each flag."""
        is_known = self.model.is_shown and not self.model.says_nothing
        return {
            "num_pairs": len(self.table),
            "num_prompts": self.model.rate.num_prompts,
            "rate": asdict(self.model.rate),
            "rate_is_shown": self.model.is_shown,
            "model_agrees": float(correctness(self.table["margin"].to_numpy()).mean()),
            "others_agree": float((self.table["with_others"] > 0).mean()),
            "false_share": self.false_share,
            "expected_wrong": float(self.table["posterior"].sum()) if is_known else None,
            "flags": {name: int(self.table[name].sum()) for name in FLAGS},
        }


def examine(
    pairs: Sequence[PreferencePair], margins: FloatArray, folds: IntArray, *, false_share: float = FALSE_SHARE
) -> Ledger:
    """Fit the model of labels, and note what each label is worth.

    Where every rate fits about as well there is no posterior. Labels are called by the posterior under the lowest rate
    that fits, so nothing is called wrong where the rate is not shown to be above 0.

    Args:
        pairs: P of them.
        margins: (P,) cross-fitted, as `rmcore.noise.crossfit.cross_fit` gives them.
        folds: (P,)
        false_share: see `rmcore.noise.rate.called`.

    Raises:
        DataError: see `fit_labels`.
    """
    prompts = [pair.prompt_id for pair in pairs]
    texts = couples(pairs)
    with_others = with_other_labels(margins, texts)
    model = fit_labels(with_others, prompts)
    cautious = model.cautious(with_others)
    there = set(texts)
    table = pd.DataFrame(
        {
            "pair_id": [pair.pair_id for pair in pairs],
            "prompt_id": prompts,
            "fold": folds,
            "margin": margins,
            "with_others": with_others,
            "posterior": np.nan if model.says_nothing else model.posterior(with_others),
            "cautious": cautious,
            "called": called(cautious, false_share) & (cautious > 0),
            "close_call": np.abs(model.scale * with_others) < logit(CLOSE),
            "contradicted": [one != other and (prompt, other, one) in there for prompt, one, other in texts],
        }
    )
    return Ledger(pairs, table, model, false_share)


def couples(pairs: Sequence[PreferencePair]) -> list[Couple]:
    """Prompt, chosen and rejected text of each of P pairs; equal but for case and white space are equal."""
    return [(normalized_prompt(p.prompt), normalized_text(p.chosen), normalized_text(p.rejected)) for p in pairs]


def clean(ledger: Ledger, how: How) -> tuple[list[PreferencePair], list[dict[str, Any]]]:
    """The pairs as they are after cleaning, and the manifest's rows.

    `drop` leaves out the pairs that are called, `weight` lets every pair count by the probability that its label is
    right, times the weight that it has. Where the rate is not shown to be above 0 nothing is changed.
    """
    kept: list[PreferencePair] = []
    changes: list[dict[str, Any]] = []
    for pair, row in zip(ledger.pairs, ledger.table.to_dict("records"), strict=True):
        if not (row["called"] if how == "drop" else ledger.model.is_shown):
            kept.append(pair)
            continue
        weight = 0.0
        if how == "weight":
            right = max(LEAST_WEIGHT, 1 - row["posterior"])
            weight = round(float(pair.metadata.get(WEIGHT) or 1.0) * right, 6)
            kept.append(replace(pair, metadata={**pair.metadata, WEIGHT: weight}))
        said = {name: row[name] for name in ("pair_id", "margin", "with_others", "posterior")}
        flags = [name for name in FLAGS if row[name]]
        changes.append({**said, "flags": flags, "weight": weight, "was": pair.to_dict()})
    return kept, changes


def manifest_of(out: Path) -> Path:
    """Where the manifest of a cleaned file is: `cleaned.changes.jsonl` of `cleaned.parquet`."""
    return out.with_name(f"{out.stem}.changes.jsonl")


def write_cleaned(ledger: Ledger, how: How, out: Path, *, unread: Sequence[PreferencePair] = ()) -> tuple[int, int]:
    """Write the cleaned pairs to `out` and what was changed to its manifest, which comes first.

    Args:
        ledger: of the pairs.
        how: see `clean`.
        out: the new file.
        unread: pairs that no model could read, so that nothing is known of them: they follow as they are.

    Returns:
        How many pairs were changed, and how many are in the new file.
    """
    kept, changes = clean(ledger, how)
    write_json_lines(manifest_of(out), changes)
    write_converted([*kept, *unread], out)
    return len(changes), len(kept) + len(unread)
