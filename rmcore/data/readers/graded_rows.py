"""One graded answer a row: rows of one prompt, wherever they lie in the source, become observations and pairs.

The answers of one prompt that one annotator graded are one observation, in the order of their texts, so that the order
of the rows changes nothing; an answer that he graded again is one of a further observation. The pairs are what the
grades imply: see `_Better`. Memory holds the rows of the whole source, as the other answers to a prompt may stand
anywhere, and what a grade is worth depends on all of them.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rmcore.core.errors import DataError
from rmcore.data.observation import Grades, Observation
from rmcore.data.pair import PreferencePair, Prompt
from rmcore.data.readers.row_pairs import PAIRS_PER_ROW, RowPairs, of_sides, strict_pairs
from rmcore.data.survey import Scale, better_weights

_DIGITS = 9
"""Combined grades are compared to so many decimals: sums in another order differ in the last ones of a double."""


_OfPrompt = dict[tuple[str | None, float], list[Observation]]
"""The rows of one prompt, by who graded and how often it counts; each is an observation of one answer."""


class GradedRows:
    """Takes observations of one answer each, and puts those of one prompt together.

    Args:
        source: its name, for messages.
        weights: how much each attribute counts in what is better; None: see `survey.better_weights`.
    """

    def __init__(self, source: str, weights: Mapping[str, float] | None) -> None:
        self._source, self._asked = source, weights
        self._prompts: dict[Prompt, _OfPrompt] = {}
        self._values: dict[str, Counter[float]] = {}

    def add(self, rows: Iterable[RowPairs]) -> None:
        """Take what further rows say."""
        for row in rows:
            if (said := row.observation) is None:
                continue
            for name, (value,) in said.grades.items():  # in the order of the columns, whichever row comes first
                self._values.setdefault(name, Counter()).update([] if value is None else [value])
            self._prompts.setdefault(said.prompt, {}).setdefault((said.annotator, said.weight), []).append(said)

    def collected(self, limit: int | None) -> tuple[list[PreferencePair], list[Observation], int, list[str]]:
        """Gather pairs and observations, how many pairs are over `PAIRS_PER_ROW`, and sentences on what was left out.

        Args:
            limit: stop after the prompt that gives the pair of this number; without pairs, after so many observations.

        Raises:
            DataError: every grade is the same, or a weight is of an attribute that is not there.
        """
        if not self._prompts:
            return [], [], 0, []
        constant = [name for name, counts in self._values.items() if len(counts) == 1]
        names = [name for name, counts in self._values.items() if len(counts) > 1]
        if not names:
            raise DataError(
                f"all grades of {self._source} are the same ({self._shown(constant)}): no answer is better than "
                "another, and there is nothing to learn. Name the right columns in data.grade_columns, or add answers "
                "that were graded otherwise."
            )
        sentences = []
        if constant:
            sentences.append(
                f"{self._shown(constant)} in all graded rows of {self._source}: set aside, as a single value tells no "
                "answer from another."
            )
        better = _Better(self._weights(names), self._values)
        pairs: list[PreferencePair] = []
        observations: list[Observation] = []
        num_over_cap = 0
        for prompt, rows in self._prompts.items():
            groups = [sorted(rows[who], key=_place) for who in sorted(rows, key=repr)]
            observations += [judgement for group in groups for judgement in _joined(group, names)]
            of_prompt, num_left_out = better.pairs(prompt, [row for group in groups for row in group])
            pairs += of_prompt
            num_over_cap += num_left_out
            if limit is not None and len(pairs) >= limit:
                break
        return pairs, observations if pairs else observations[:limit], num_over_cap, sentences

    def why_no_pair(self) -> DataError:
        """Say why the grades imply no pair, where they do not."""
        texts = [{row.answers for rows in by_who.values() for row in rows} for by_who in self._prompts.values()]
        are_alone = all(len(answers) < 2 for answers in texts)
        why = "every prompt has one graded answer"
        what = why if are_alone else "no prompt has two answers that differ in their grades"
        return DataError(
            f"{self._source}: {what}, so no held-out pair can be formed: name pairs in data.eval_source. Where pairs "
            "alone are read (rm-opt data convert, evaluate), there is nothing to read here."
        )

    def _shown(self, names: Iterable[str]) -> str:
        return ", ".join(f"{name} is {next(iter(self._values[name])):g}" for name in names)

    def _weights(self, names: Sequence[str]) -> dict[str, float]:
        """Which attributes count and how much; those of a single value count for nothing."""
        weights = self._asked
        absent = [name for name in weights or () if name not in self._values]
        if absent:
            raise DataError(
                f"data.attribute_weights names {absent[0]!r}, which {self._source} does not grade: its attributes are "
                f"{', '.join(self._values)}."
            )
        counting = better_weights(names, weights)
        if not counting:
            raise DataError(
                f"all attributes of {self._source} with a weight in data.attribute_weights have a single value: give "
                f"{', '.join(names)} one."
            )
        return counting


class _Better:
    """Which of two answers is better: the one whose weighted sum of standardized grades is greater.

    Args:
        weights: of the attributes that count.
        values: attribute -> how often each grade is given in the source; of more than one value.
    """

    def __init__(self, weights: Mapping[str, float], values: Mapping[str, Counter[float]]) -> None:
        self._weights = weights
        scales = ((name, Scale.of(name, values[name])) for name in weights)
        self._scale = {name: scale for name, scale in scales if scale is not None}

    def pairs(self, prompt: Prompt, rows: Sequence[Observation]) -> tuple[list[PreferencePair], int]:
        """Give the pairs of a prompt's answers, at most `PAIRS_PER_ROW`, and how many are left out.

        A grade of an answer is the mean over those who gave it; an answer that lacks one that counts is in no pair.
        """
        grades: dict[str, dict[str, list[float]]] = {}
        carried: dict[str, Mapping[str, Any]] = {}
        for row in rows:
            (text,) = row.answers
            carried.setdefault(text, row.metadata)
            for name, (value,) in row.grades.items():
                if value is not None:
                    grades.setdefault(text, {}).setdefault(name, []).append(value)
        means = {
            text: {name: sum(given) / len(given) for name, given in by_name.items()} for text, by_name in grades.items()
        }
        texts = sorted(text for text, mean in means.items() if all(name in mean for name in self._weights))
        if len(texts) < 2:
            return [], 0
        strength = [self._strength(means[text]) for text in texts]
        places, num_over_cap = strict_pairs(prompt, texts, strength, PAIRS_PER_ROW)
        return [self._pair(prompt, texts[i], texts[j], means, carried) for i, j in places], num_over_cap

    def _pair(
        self,
        prompt: Prompt,
        chosen: str,
        rejected: str,
        means: Mapping[str, Mapping[str, float]],
        carried: Mapping[str, Mapping[str, Any]],
    ) -> PreferencePair:
        """Pair two answers; the margin is the gap in the one attribute that counts, or in the sum that does."""
        if len(self._weights) == 1:
            (name,) = self._weights
            margin = abs(means[chosen][name] - means[rejected][name])
        else:
            margin = self._strength(means[chosen]) - self._strength(means[rejected])
        metadata = of_sides(carried[chosen], carried[rejected])
        for side, text in (("chosen", chosen), ("rejected", rejected)):
            metadata |= {f"{side}_{name}": value for name, value in means[text].items()}
        return PreferencePair(prompt, chosen, rejected, margin, metadata)

    def _strength(self, grades: Mapping[str, float]) -> float:
        standardized = (
            weight * (grades[name] - self._scale[name].mean) / self._scale[name].deviation
            for name, weight in self._weights.items()
        )
        return round(math.fsum(standardized), _DIGITS)


def _place(row: Observation) -> tuple[tuple[str, ...], str, str]:
    """Order rows by what they say, so that the order in which they are read does not matter."""
    return row.answers, repr(sorted(row.grades.items())), repr(sorted(row.metadata.items()))


def _joined(rows: Sequence[Observation], names: Sequence[str]) -> list[Observation]:
    """Join what one annotator says of the answers to a prompt; rows with none of the attributes are left out."""
    layers: list[list[Observation]] = []
    times: Counter[tuple[str, ...]] = Counter()
    for row in rows:
        if any(row.grades.get(name, (None,))[0] is not None for name in names):
            if times[row.answers] == len(layers):
                layers.append([])
            layers[times[row.answers]].append(row)
            times[row.answers] += 1
    return [_of_answers(layer, names) for layer in layers]


def _of_answers(rows: Sequence[Observation], names: Sequence[str]) -> Observation:
    grades: dict[str, Grades] = {name: tuple(row.grades.get(name, (None,))[0] for row in rows) for name in names}
    return replace(
        rows[0],
        answers=tuple(row.answers[0] for row in rows),
        grades={name: given for name, given in grades.items() if any(value is not None for value in given)},
        metadata=_of_all([row.metadata for row in rows]),
        observation_id="",
    )


def _of_all(carried: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Keep what all rows carry alike as it is; what differs as a list in the order of the answers."""
    names = {name: None for metadata in carried for name in metadata}
    values = {name: [metadata.get(name) for metadata in carried] for name in names}
    return {name: each[0] if all(value == each[0] for value in each) else each for name, each in values.items()}
