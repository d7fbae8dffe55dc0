"""Who compares two responses of one prompt in a watch: a judge of single responses, or people with a file."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from rmcore.active.labels import read_preferences, write_proposal
from rmcore.config.judging import JudgingConfig
from rmcore.core.arrays import FloatArray
from rmcore.core.errors import DataError, JudgementsWantedError
from rmcore.core.files import append_json_lines, read_json_lines, write_json_lines
from rmcore.data.pair import PreferencePair, Prompt, as_prompts, as_rows, is_blank
from rmcore.judging.judge import Judge
from rmcore.policy.sampling.best_of_n import pooled_deviation

if TYPE_CHECKING:
    from rmcore.judging.language_model import LanguageModelJudge

CLIP = 3.0
"""Standard deviations at which who bets on the difference of two scores clips it: a bet needs a bound, and beyond it
lie 4 % of the differences of two normal responses. Judges give differences as they are."""
CALIBRATED = 24
"""Prompts whose two start samples give the unit; its standard error is 15 %, and all that is shown has the same one."""
WINS = "wins less losses a comparison"
EMPTY = "(an empty answer)"
"""How people see a response that has no text."""
ANSWER_AGAIN = (
    "Correct the file, or move it away where it belongs to another run; then the same command resumes, or writes its "
    "own."
)


def differ(first: str, second: str) -> bool:
    """Whether people would see two responses that differ."""
    return first != second and not (is_blank(first) and is_blank(second))


class PairJudge:
    """Compares responses.

    name: as people read it.
    unit: of a difference, in words.
    limit: size at which a difference is clipped by who bets on it; wins and losses have no larger one.
    labels_per_pair: that a comparison costs.
    at_once: pairs that are requested together, so that a look that is decided early saves the rest; None: all.
    calibrates: whether the unit has to be measured on samples of the start policy first.
    scale: score of one unit; None: not calibrated yet, or there is nothing to calibrate.
    """

    name: str
    unit: str = WINS
    limit: float = 1.0
    labels_per_pair: int = 2
    at_once: int | None = 8
    calibrates: bool = False
    scale: float | None = None

    def calibrate(self, prompts: Sequence[Prompt], first: Sequence[str], second: Sequence[str]) -> None:
        """Measure the unit, where there is one, on two start samples of each prompt.

        Raises:
            DataError: the judge finds no two of them different.
        """

    def compare(
        self, asked: str, prompts: Sequence[Prompt], later: Sequence[str], earlier: Sequence[str]
    ) -> FloatArray:
        """How much better each of N later responses is than the earlier one, (N,), not clipped; NaN unread.

        Args:
            asked: name of these questions, the same if they are asked again.
            prompts: N.
            later: responses of the later policy.
            earlier: responses of the earlier one.

        Raises:
            DataError: there is no judgement of a response.
            JudgementsWantedError: people have not answered yet.
        """
        raise NotImplementedError


def judge_in_turns(
    judge: PairJudge, asked: str, prompts: Sequence[Prompt], later: Sequence[str], earlier: Sequence[str], kept: Path
) -> Iterator[list[float]]:
    """Judge N pairs, at each turn as many as the judge takes together; a caller that has seen enough requests no more.

    Args:
        judge: who compares.
        asked: name of these questions.
        prompts: N.
        later: responses that may be better.
        earlier: responses that they are compared with.
        kept: JSONL file that takes the differences of each turn; those that it holds are not requested again.

    Raises:
        DataError: there is no judgement of a response.
        JudgementsWantedError: people have not answered yet.
    """
    known = [row["difference"] for row in read_json_lines(kept)]
    if judge.at_once is None and len(known) < len(prompts):
        known = []  # who is asked about all together has the answers still
    write_json_lines(kept, [{"difference": difference} for difference in known])  # without a line that a kill has cut
    size = judge.at_once or max(len(prompts), 1)
    for first in range(0, len(prompts), size):
        part, start = known[first : first + size], max(first, len(known))
        turn = slice(start, first + size)
        if start < min(first + size, len(prompts)):
            judged = judge.compare(asked, prompts[turn], later[turn], earlier[turn]).tolist()
            append_json_lines(kept, [{"difference": difference} for difference in judged])
            part = [*part, *judged]
        yield part


def pair_judge_of(judge: Judge, judging: JudgingConfig | None) -> "ScoreJudge | OrderedPairJudge":
    """The judge of pairs that a judge is: by its scores, or as a language model in mode pairwise compares."""
    if judging is not None and judging.mode != "pointwise":
        return OrderedPairJudge(cast("LanguageModelJudge", judge))
    return ScoreJudge(judge)


class ScoreJudge(PairJudge):
    """Differences of a judge's scores, in standard deviations of the start samples within prompts."""

    unit = "sd"
    limit = CLIP
    calibrates = True

    def __init__(self, judge: Judge) -> None:
        self.name, self.judge = judge.name, judge

    def calibrate(self, prompts: Sequence[Prompt], first: Sequence[str], second: Sequence[str]) -> None:
        """See `PairJudge`."""
        unit = self.unit_of(prompts, first, second, share=0)
        if unit is None:
            raise DataError(
                f"{self.name} finds both answers of the start policy equally good on all of {len(prompts)} prompts, so "
                "no difference has a unit. Sample at a higher temperature, or take a judge who tells answers apart."
            )
        self.scale = unit[0]

    def unit_of(
        self, prompts: Sequence[Prompt], first: Sequence[str], second: Sequence[str], *, share: float = 0.5
    ) -> tuple[float, float] | None:
        """The standard deviation of scores within prompts, from two start samples of each of N prompts.

        Returns:
            With it its standard error, as a share of it. None where no more than a `share` of the prompts' samples
            are told apart: an average over many ties and a few differences of one size is no unit of either.
        """
        scores = self._scores(prompts, first, second)  # (2, N)
        scores = scores[:, np.isfinite(scores).all(axis=0)]
        if scores.shape[1] == 0 or np.mean(scores[0] != scores[1]) <= share:
            return None
        squares = (scores[0] - scores[1]) ** 2
        error = float(squares.std() / squares.mean() / 2 / np.sqrt(len(squares)))  # of a root: half of the square's
        return pooled_deviation(list(scores.T)), error

    def compare(
        self, asked: str, prompts: Sequence[Prompt], later: Sequence[str], earlier: Sequence[str]
    ) -> FloatArray:
        """See `PairJudge`."""
        if self.scale is None:
            raise ValueError("calibrate first")
        scores = self._scores(prompts, later, earlier)
        return np.asarray((scores[0] - scores[1]) / self.scale)

    def _scores(self, prompts: Sequence[Prompt], first: Sequence[str], second: Sequence[str]) -> FloatArray:
        """Scores of both, (2, N)."""
        asked, answers = as_rows(prompts, first)
        return self.judge.rewards([*asked, *asked], [*answers, *as_rows(prompts, second)[1]]).reshape(2, -1)


class WinJudge(ScoreJudge):
    """Which of a judge's two scores is higher: where most of them are equal, as passes and failures are."""

    unit = WINS
    limit = 1.0
    calibrates = False

    def compare(
        self, asked: str, prompts: Sequence[Prompt], later: Sequence[str], earlier: Sequence[str]
    ) -> FloatArray:
        """See `PairJudge`: 1, -1, or 0 where they are equal."""
        scores = self._scores(prompts, later, earlier)
        return np.sign(scores[0] - scores[1])


class OrderedPairJudge(PairJudge):
    """A language model in mode pairwise, which is shown each pair in both orders: 1, 1/2, 0, -1/2 or -1; NaN unread.

    Args:
        judge: whom to ask.
    """

    def __init__(self, judge: "LanguageModelJudge") -> None:
        self.name, self.judge = judge.name, judge

    def compare(
        self, asked: str, prompts: Sequence[Prompt], later: Sequence[str], earlier: Sequence[str]
    ) -> FloatArray:
        """See `PairJudge`."""
        return self.judge.compare(prompts, later, earlier)


class PeopleJudge(PairJudge):
    """People who fill in a column: 1 where the later response is preferred, -1 where the earlier one is, 0 for a tie.

    The files are those of `rm-opt data propose`, and do not say which response is whose.

    Args:
        folder: for the files.
    """

    name = "people"
    labels_per_pair = 1
    at_once = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def compare(
        self, asked: str, prompts: Sequence[Prompt], later: Sequence[str], earlier: Sequence[str]
    ) -> FloatArray:
        """See `PairJudge`. Two equal responses are a tie, and nobody is asked."""
        later, earlier, prompts = as_rows(prompts, later)[1], as_rows(prompts, earlier)[1], as_prompts(prompts)
        differing = [index for index, (new, old) in enumerate(zip(later, earlier, strict=True)) if differ(new, old)]
        later, earlier = ([EMPTY if is_blank(text) else text for text in texts] for texts in (later, earlier))
        differences = np.zeros(len(prompts))
        if not differing:
            return differences
        names = [f"{asked}-{index + 1}" for index in differing]
        pairs = {
            name: PreferencePair(prompt=prompts[index], chosen=later[index], rejected=earlier[index], pair_id=name)
            for name, index in zip(names, differing, strict=True)
        }
        file = self.folder / f"{asked}.csv"
        if not file.is_file():
            write_proposal(list(pairs.values()), file, seed=len(pairs))
            file.chmod(0o600)
        answers = read_preferences(file, pairs, ANSWER_AGAIN, ties=True)
        missing = [name for name in pairs if name not in answers]
        if missing:
            raise DataError(f"{file} lacks {len(missing)} of {len(pairs)} pairs, first {missing[0]}. {ANSWER_AGAIN}")
        unanswered = sum(answer is None for answer in answers.values())
        if unanswered:
            raise JudgementsWantedError(
                f"{unanswered} of {len(pairs)} pairs wait to be judged in {file}: write a, b or tie into the column "
                "preferred of each row and save it as CSV, then run the same command again, which resumes there."
            )
        differences[differing] = [answers[name] or 0.0 for name in pairs]
        return differences
