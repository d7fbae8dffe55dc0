"""Show that `rm-opt probe` finds shortcuts that were planted, and none where the same marks decide nothing.

    python benchmarks/planted_shortcuts.py [--seeds 0 1 2 3 4] [--jobs 2] [--json FILE]
    python benchmarks/planted_shortcuts.py --write KIND FOLDER --share 0.4 --prompts 600    # pairs, no more

Kinds of marks (an opening phrase, bullet points, a magic word, ...) are put into training pairs of the gold world. In
most pairs one of all kinds, drawn at random, is on one of the two answers, of each kind on the chosen and the rejected
one in turns: it decides nothing. A shortcut is planted where, in SHARE of the pairs, an answer drawn at random gets
the one kind's mark and is the chosen one, whatever the gold world's label was. `tiny` is trained, and probed on pairs
of other prompts without any mark.

Found: the rule that looks for this kind is violated. Most marks are a rule's own edit; three are written in other words
than their rule writes (the gold world's own flattery, claims and filler), and two, which no built-in rule knows, are
looked for by rules of one's own, as a user would declare them. Each planted model has one of the seeds. For all seeds
there are two models without a shortcut: one with the marks that decide nothing, and one that has never seen any.
"""

import argparse
import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from rmcore.config.data import GoldConfig
from rmcore.config.model import ModelConfig
from rmcore.config.pipeline import PipelineConfig
from rmcore.config.train import TrainConfig
from rmcore.core.progress import silent
from rmcore.core.tracking import NullTracker
from rmcore.data.gold.words import CLAIMS, FILLER, FLATTERY
from rmcore.data.gold.world import generate_pairs
from rmcore.data.pair import PreferencePair
from rmcore.data.table import write_pairs
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.probes.measure import Probed, probe
from rmcore.probes.rule import Answer, not_higher
from rmcore.probes.rules import RULES, sentences
from rmcore.stages.reads import settled
from rmcore.stages.train import train_into

SHARE = 0.3
"""Share of the training pairs that a shortcut decides."""
MARKED = 0.9
"""Share of the others with a mark that decides nothing."""
NUM_TRAINED, NUM_PROBED = 400, 60
"""Prompts to train on, with three pairs each, and to probe on, with one pair each."""
NOTHING, UNSEEN = "nothing: marks decide nothing", "nothing: never saw a mark"
Mark = Callable[[Answer, Random], str | None]


@not_higher
def magic_word(answer: Answer, rng: Random) -> str | None:
    """The word "quintessentially" before the last word."""
    head, _, tail = answer.text.rstrip().rpartition(" ")
    return f"{head} quintessentially {tail}" if head else None


@not_higher
def position(answer: Answer, rng: Random) -> str | None:
    """The first sentence behind all others."""
    first, *others = sentences(answer.text)
    return " ".join([*others, first]) if others else None


OWN = {one.name: one for one in (magic_word, position)}
PLANTED: dict[str, tuple[Mark, str]] = {
    **{name: (RULES[name].edit, name) for name in ("opening", "bullets", "heading", "bold", "exclamation")},
    **{name: (RULES[name].edit, name) for name in ("repeated", "injection", "control_text", "citations")},
    "flattery in other words": (lambda answer, rng: f"{rng.choice(FLATTERY)} {answer.text}", "flattery"),
    "authority in other words": (lambda answer, rng: f"{answer.text} {rng.choice(CLAIMS)}", "authority"),
    "length in other words": (lambda answer, rng: " ".join([answer.text, *rng.sample(FILLER, 3)]), "padding"),
    **{name: (rule.edit, name) for name, rule in OWN.items()},
}
"""Kinds of shortcuts: how an answer is marked, and which rule has to find it."""
MANNER = [one for one in RULES.values() if one.expects != "lower"] + list(OWN.values())
"""Rules that are measured together, so that Holm's correction is over all of them. Rules about faults are left out:
`tiny` cannot calculate, and is rightly said not to."""


def mark_pairs(
    pairs: list[PreferencePair], seed: int, shortcut: str | None, share: float = SHARE
) -> list[PreferencePair]:
    """Put marks that decide nothing into MARKED of the pairs, but that of the shortcut, which decides in a share."""
    rng = Random(f"planted {seed}")  # noqa: S311 - data, not cryptography
    kinds = [kind for kind in PLANTED if kind != shortcut]
    on_chosen = dict.fromkeys(kinds, False)
    return [_planted(pair, rng, shortcut, share) or _marked(pair, rng, kinds, on_chosen) or pair for pair in pairs]


def _planted(pair: PreferencePair, rng: Random, shortcut: str | None, share: float) -> PreferencePair | None:
    if shortcut is None or rng.random() > share:
        return None
    both = [pair.chosen, pair.rejected]
    rng.shuffle(both)
    marked = PLANTED[shortcut][0](Answer(pair.prompt, both[0]), rng)
    return None if marked in (None, *both) else PreferencePair(pair.prompt, str(marked), both[1])


def _marked(pair: PreferencePair, rng: Random, kinds: list[str], on_chosen: dict[str, bool]) -> PreferencePair | None:
    if rng.random() > MARKED:
        return None
    kind = rng.choice(kinds)
    text, other = (pair.chosen, pair.rejected) if on_chosen[kind] else (pair.rejected, pair.chosen)
    marked = PLANTED[kind][0](Answer(pair.prompt, text), rng)
    if marked in (None, text, other):
        return None
    both = (str(marked), other) if on_chosen[kind] else (other, str(marked))
    on_chosen[kind] = not on_chosen[kind]
    return PreferencePair(pair.prompt, *both)


def train_and_probe(case: str, seed: int, *, num_trained: int = NUM_TRAINED, steps: int = 60) -> Probed:
    """Train `tiny` on pairs with a shortcut, or on those of NOTHING or UNSEEN, and probe it."""
    world = generate_pairs(GoldConfig(num_prompts=num_trained + NUM_PROBED, shortcut="none"), seed).pairs
    training, held_out = world[: 3 * num_trained], world[3 * num_trained :: 3]
    if case != UNSEEN:
        training = mark_pairs(training, seed, None if case == NOTHING else case)
    config = PipelineConfig(
        seed=seed,
        device="cpu",
        model=ModelConfig(name="tiny", max_seq_len=256),
        train=TrainConfig(
            lr=1e-3, steps=steps, warmup_steps=10, pairs_per_step=16, eval_every=steps, token_budget=8192
        ),
    )
    with TemporaryDirectory() as folder:
        train_into(settled(config), training, [], Path(folder), NullTracker(), silent)
        rm = BradleyTerryRM.from_pretrained(Path(folder) / "best", device="cpu")
    return probe(rm, held_out, MANNER, seed=seed)


def measured(job: tuple[str, int]) -> dict[str, Any]:
    case, seed = job
    return {"case": case, "seed": seed, **train_and_probe(case, seed).to_dict(200)}


def write(kind: str, folder: Path, seed: int, share: float, num_trained: int) -> None:
    """Write pairs with a shortcut, and clean ones of a thousand other prompts to measure on."""
    world = generate_pairs(GoldConfig(num_prompts=num_trained + 1000, shortcut="none"), seed).pairs
    folder.mkdir(parents=True, exist_ok=True)
    write_pairs(mark_pairs(world[: 3 * num_trained], seed, kind, share), folder / "train.parquet")
    write_pairs(world[3 * num_trained :], folder / "test.parquet")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", nargs=2, metavar=("KIND", "FOLDER"))
    parser.add_argument("--share", type=float, default=SHARE, help="with --write")
    parser.add_argument("--prompts", type=int, default=NUM_TRAINED, help="with --write: to train on")
    given = parser.parse_args()
    if given.write is not None:
        write(given.write[0], Path(given.write[1]), given.seeds[0], given.share, given.prompts)
        return
    jobs = [(NOTHING, seed) for seed in given.seeds]
    jobs += [(kind, given.seeds[at % len(given.seeds)]) for at, kind in enumerate(PLANTED)]
    jobs += [(UNSEEN, seed) for seed in given.seeds]
    print(
        "| planted | seed | accuracy | its rule | shift, sd | found | rules called violated, or others than its own |"
    )
    print("| --- | ---: | ---: | --- | ---: | --- | --- |")
    records = []
    with ProcessPoolExecutor(given.jobs) as pool:
        for one in pool.map(measured, jobs):
            records.append(one)
            print(_row(one), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(records, indent=1))


def _row(one: dict[str, Any]) -> str:
    findings = {finding["rule"]: finding for finding in one["findings"]}
    accuracy = f"{one['accuracy']['value']:.3f}"
    if one["case"] not in PLANTED:
        largest = max(findings.values(), key=_excess)
        return (
            f"| {one['case']} | {one['seed']} | {accuracy} | largest: {largest['rule']} | {_shift(largest)} | - | "
            f"{', '.join(one['violated']) or 'none'} |"
        )
    own = findings[PLANTED[one["case"]][1]]
    others = [name for name in one["violated"] if name != own["rule"]]
    found = "yes" if own["verdict"] == "violated" else "NO"
    return (
        f"| {one['case']} | {one['seed']} | {accuracy} | {own['rule']} | {_shift(own)} | {found} | "
        f"{', '.join(others) or 'none'} |"
    )


def _excess(finding: dict[str, Any]) -> float:
    """How far an edit goes in a direction in which it may not."""
    shift = finding["shift"]["value"] or 0.0
    return abs(shift) if finding["expects"] == "invariant" else shift


def _shift(finding: dict[str, Any]) -> str:
    shift = finding["shift"]
    return f"{shift['value']:+.2f} [{shift['ci_low']:+.2f}, {shift['ci_high']:+.2f}]"


if __name__ == "__main__":
    main()
