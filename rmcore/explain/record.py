"""One record for page and report of all that explains a model's worst mistakes, single pairs and single answers."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from rmcore.core.arrays import FloatArray
from rmcore.core.errors import ConfigError, CurvatureError, DataError, ModelError
from rmcore.core.progress import Report, prefixed, silent
from rmcore.data.pair import PreferencePair, Prompt, prompt_text
from rmcore.ensembles.features import head_of, pair_features
from rmcore.ensembles.score import readable_pairs
from rmcore.explain.explanation import Answer, Behind, Explanation, TrainingPair, explain_answers, explain_pairs
from rmcore.explain.influence import FEWEST_HELD_OUT, influences
from rmcore.explain.kinds import FEWEST_MISTAKES, NUM_SIMULATED, Kind, kinds_of_mistakes
from rmcore.explain.representer import representers
from rmcore.models.reward_model import BradleyTerryRM

MOST_GROUPED = 400
"""Mistakes that are grouped into kinds, the worst ones: grouping takes a distance between every two."""
NUM_HELD_OUT = 100
"""Held-out pairs that choose the damping of the influence, and say how far the linearised model is the model."""
NUM_BEHIND = 5
"""Training pairs that are shown at each end."""
LEADS = (
    "That correlation is necessary and not enough: trained anew without pairs, models moved as foretold at 0.96 (the "
    "head alone), 0.4 to 0.6 (all weights, SGD) and 0.2 (AdamW), so these pairs are where to look first, not a proof."
)
"""Rank correlations of benchmarks/RESULTS.md, Influence of training pairs."""


@dataclass(frozen=True)
class TrainingData:
    """The training pairs whose influence is asked for.

    Attributes:
        pairs: N pairs that the model was trained on, or some of them.
        num_trained: how many it was trained on in all.
        label_smoothing: of its loss.
        memory_bytes: for gradients; None takes half of what is free.
        head_only: whether the reward head alone was trained.
    """

    pairs: Sequence[PreferencePair]
    num_trained: int
    label_smoothing: float = 0.0
    memory_bytes: int | None = None
    head_only: bool = False

    @classmethod
    def drawn(
        cls,
        pairs: Iterable[PreferencePair],
        number: int,
        *,
        most: int,
        seed: int,
        label_smoothing: float,
        memory_gib: float | None,
        head_only: bool = False,
    ) -> "TrainingData | None":
        """At most so many of the `number` pairs of a training, drawn at random; None where that leaves none.

        `pairs` may be a stream: memory holds those that are drawn.
        """
        drawn = set(np.random.default_rng(seed).permutation(number)[:most].tolist())
        if not drawn:
            return None
        kept = [pair for place, pair in enumerate(pairs) if place in drawn]
        memory = None if memory_gib is None else round(memory_gib * 2**30)
        return cls(kept, number, label_smoothing, memory, head_only)


@dataclass(frozen=True)
class Explained:
    """Everything that the page shows.

    Attributes:
        num_pairs: held-out pairs among which the mistakes were found; None where single ones were named.
        num_mistakes: of those, ranked against their label.
        kinds: of mistakes.
        kinds_note: how they were found, in words.
        pairs: explanations of pairs.
        kind_of: for each of them its kind's place in `kinds`, or None.
        answers: of answers that stand alone.
        influence_note: how far the influence is to be believed, or why there is none.
    """

    num_pairs: int | None = None
    num_mistakes: int = 0
    kinds: list[Kind] = field(default_factory=list)
    kinds_note: str = ""
    pairs: list[Explanation] = field(default_factory=list)
    kind_of: list[int | None] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    influence_note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready record."""
        pairs = [{**one.to_dict(), "kind": kind} for one, kind in zip(self.pairs, self.kind_of, strict=True)]
        rest = asdict(replace(self, pairs=[]))
        del rest["kind_of"]
        return {**rest, "pairs": pairs}


def explain_mistakes(
    rm: BradleyTerryRM,
    held_out: Sequence[PreferencePair],
    training: TrainingData | None,
    *,
    most: int,
    seed: int,
    report: Report = silent,
) -> Explained:
    """Explain the held-out pairs with the largest wrong margins, one a prompt, and group mistakes into kinds.

    Args:
        rm: the reward model.
        held_out: pairs that it was not trained on; those that it cannot read are left out and said on stderr.
        training: pairs that it was trained on; None leaves their influence out.
        most: mistakes that are explained.
        seed: of edits, grouping, and the pairs that choose the damping.
        report: told of each part.

    Raises:
        DataError: there are no pairs, or none can be read.
        ModelError: a reward is not finite.
    """
    if not held_out:
        raise DataError("there are no held-out pairs, so there is no mistake to explain; give some.")
    pairs = readable_pairs(rm, held_out)
    rewards = rm.score_pairs(pairs, report=prefixed(report, "held-out pairs")).astype(np.float64)
    margins = rewards[:, 0] - rewards[:, 1]
    wrong = np.flatnonzero(margins < 0)
    wrong = wrong[np.argsort(margins[wrong], kind="stable")]
    grouped = [pairs[place] for place in wrong[:MOST_GROUPED]]
    kinds, note = _kinds(rm, grouped, len(wrong), pairs, seed, report)
    first_of_prompt: dict[str, int] = {}
    for place in wrong:
        first_of_prompt.setdefault(pairs[place].prompt_id, int(place))
    worst = list(first_of_prompt.values())[:most]
    at = {int(place): rank for rank, place in enumerate(wrong)}
    kind_of = [next((k for k, kind in enumerate(kinds) if at[place] in kind.members), None) for place in worst]
    found = explain_named(rm, [pairs[place] for place in worst], pairs, training, seed=seed, report=report)
    return replace(found, num_pairs=len(pairs), num_mistakes=len(wrong), kinds=kinds, kinds_note=note, kind_of=kind_of)


def explain_named(
    rm: BradleyTerryRM,
    pairs: Sequence[PreferencePair],
    held_out: Sequence[PreferencePair],
    training: TrainingData | None,
    *,
    seed: int,
    report: Report = silent,
) -> Explained:
    """Explain P pairs.

    Args:
        rm: the reward model.
        pairs: P pairs, whichever side it prefers.
        held_out: pairs that it was not trained on; for the influence at least `FEWEST_HELD_OUT` of them share no prompt
            with `pairs` and the training.
        training: as `explain_mistakes`.
        seed: as there.
        report: as there.

    Raises:
        DataError: a pair cannot be read.
        ModelError: a reward is not finite.
    """
    if not pairs:
        return Explained()
    found = explain_pairs(rm, pairs, seed=seed, report=report)
    behind, note = _behind(rm, pairs, held_out, training, seed, report)
    found = [replace(one, behind=moved) for one, moved in zip(found, behind, strict=True)]
    return Explained(pairs=found, kind_of=[None] * len(found), influence_note=note)


def explain_alone(rm: BradleyTerryRM, prompt: Prompt, answer: str, *, report: Report = silent) -> Explained:
    """Take one answer apart that there is no other to compare with.

    Raises:
        DataError: the model cannot read it.
        ModelError: a reward is not finite.
    """
    return Explained(answers=explain_answers(rm, [(prompt, answer)], report=report))


def _choosing(
    rm: BradleyTerryRM,
    held_out: Sequence[PreferencePair],
    targets: Sequence[PreferencePair],
    training: TrainingData,
    seed: int,
) -> list[PreferencePair]:
    """Some held-out pairs, drawn at random, of prompts that are neither explained nor among the training pairs."""
    taken = {pair.prompt_id for pair in (*targets, *training.pairs)}
    rest = [pair for pair in held_out if pair.prompt_id not in taken]
    drawn = np.sort(np.random.default_rng(seed).permutation(len(rest))[:NUM_HELD_OUT])
    return readable_pairs(rm, [rest[place] for place in drawn])


def _kinds(
    rm: BradleyTerryRM,
    mistakes: Sequence[PreferencePair],
    num_mistakes: int,
    held_out: Sequence[PreferencePair],
    seed: int,
    report: Report,
) -> tuple[list[Kind], str]:
    """Kinds of the worst mistakes, and how they were found; none where the head is not linear in features."""
    if not mistakes:
        return [], ""
    try:
        head = head_of(rm).weight.detach().double().cpu().numpy()[0]
        chosen, rejected = pair_features(rm, mistakes, report=prefixed(report, "kinds of mistakes"))
    except ModelError as refusal:
        return [], f"No kinds were looked for: {refusal}"
    found = kinds_of_mistakes(mistakes, chosen - rejected, head, held_out, seed=seed)
    of = "All mistakes" if len(mistakes) == num_mistakes else f"The {len(mistakes)} worst mistakes"
    num_prompts = len({pair.prompt_id for pair in mistakes})
    if num_prompts < FEWEST_MISTAKES:
        how = f"{of} are of {num_prompts} prompts, too few to look for groups ({FEWEST_MISTAKES} are needed)."
    elif len(found) > 1:
        how = (
            f"{of} fall into {len(found)} groups by what the model sees of them, more distinct than in "
            f"{NUM_SIMULATED} simulations without groups."
        )
    else:
        how = f"{of} are one kind: no groups stand out by what the model sees of them."
    counts = "Numbers are prompts with the word on that side alone : on the other alone; of prompts, here : elsewhere."
    return found, f"{how} {counts}"


def _behind(
    rm: BradleyTerryRM,
    targets: Sequence[PreferencePair],
    held_out: Sequence[PreferencePair],
    training: TrainingData | None,
    seed: int,
    report: Report,
) -> tuple[list[dict[str, Behind]], str]:
    """For each target the training pairs that moved it most, by way of computing it; and what is to be said of that."""
    none: list[dict[str, Behind]] = [{} for _ in targets]
    if training is None:
        return none, "No training pairs were given, so their influence was not computed."
    train = readable_pairs(rm, training.pairs)
    choosing = _choosing(rm, held_out, targets, training, seed)
    if len(choosing) < FEWEST_HELD_OUT:
        return none, (
            f"The influence of training pairs was not computed: it takes {FEWEST_HELD_OUT} held-out pairs of prompts "
            f"that are neither explained nor trained on to choose its damping, and there are {len(choosing)}."
        )
    smoothing = training.label_smoothing
    told: list[str] = []
    trained_on = {pair.prompt_id for pair in training.pairs}
    if seen := sum(pair.prompt_id in trained_on for pair in targets):
        told.append(f"{seen} of the explained pairs are of prompts that the model was trained on.")
    found: dict[str, FloatArray] = {}
    # The mean loss is divided by all pairs of the training, of which these are a part.
    part = len(train) / training.num_trained
    drawn = "" if part == 1 else f", drawn from {training.num_trained:,}"
    try:
        whole = influences(
            rm, train, targets, choosing, parameters="head" if training.head_only else "all",
            label_smoothing=smoothing, memory_bytes=training.memory_bytes, report=prefixed(report, "influence"),
        )  # fmt: skip
        found["weights"], own = whole.effect * part, whole.train_margins
        told.append(
            f"By all weights: Gauss-Newton influence of {len(train):,} training pairs{drawn}, to first order; the "
            f"linearised model's margins correlate with the model's at {whole.held_out_correlation:.2f} on "
            f"{whole.num_held_out} held-out pairs. {LEADS}"
        )
    except (ConfigError, CurvatureError, DataError, ModelError) as refusal:
        told.append(f"By all weights: not computed, {refusal}")
    try:
        heads = representers(
            rm, train, targets, choosing, label_smoothing=smoothing, report=prefixed(report, "representers")
        )
        found["head"], own = heads.effect, heads.train_margins
        told.append(
            "By the reward head: exact parts of the margin of a head refitted on these pairs, whose margins correlate "
            f"with the model's at {heads.held_out_correlation:.2f}."
        )
    except (ConfigError, DataError, ModelError) as refusal:
        told.append(f"By the reward head: not computed, {refusal}")
    if not found:
        return none, " ".join(told)
    told.append(
        f"The loss is taken as that of pairs, with a label smoothing of {smoothing:g}; weights of pairs and other "
        "terms of the training are not in it."
    )
    behind = [
        {name: _most(effect[place], train, own) for name, effect in found.items()} for place in range(len(targets))
    ]
    return behind, " ".join(told)


def _most(effect: FloatArray, train: Sequence[PreferencePair], margins: FloatArray) -> Behind:
    order = np.argsort(-effect, kind="stable")

    def pair_at(place: int) -> TrainingPair:
        pair = train[place]
        return TrainingPair(
            pair.pair_id,
            prompt_text(pair.prompt),
            pair.chosen,
            pair.rejected,
            float(effect[place]),
            float(margins[place]),
        )

    return Behind(
        helpful=tuple(pair_at(place) for place in order[:NUM_BEHIND] if effect[place] > 0),
        harmful=tuple(pair_at(place) for place in order[::-1][:NUM_BEHIND] if effect[place] < 0),
    )
