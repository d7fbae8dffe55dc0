"""`rm-opt soup`: the average of the weights of several reward models, written only where it has earned its place."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rmcore.cli.card_facts import find_origin
from rmcore.cli.common import print_metrics, write_report_json
from rmcore.cli.help import common
from rmcore.cli.inputs import Data, JsonOut, ModelReading, PairReading, Seed
from rmcore.cli.options import options
from rmcore.config.model import TINY_SIZES
from rmcore.core.errors import ConfigError, ModelError
from rmcore.core.files import atomic_folder, write_json
from rmcore.data.pair import PreferencePair

if TYPE_CHECKING:
    import pandas as pd

    from rmcore.policy.earned_average import Check, Tolerance

RECORD_FILE, FIGURE_FILE = "soup.json", "soup.png"
AVERAGE, ENSEMBLE = "average of weights", "ensemble: mean of rewards"
SPLIT = {"choose": 0.5, "judge": 0.5}
"""Shares of the prompts that name the best member and choose, and that judge."""


class How(StrEnum):
    """Which members the average is of."""

    uniform = "uniform"
    greedy = "greedy"


@dataclass(frozen=True, slots=True)
class Resampling:
    """How intervals are drawn."""

    num_resamples: Annotated[int, typer.Option(min=100, help="Resamples of the bootstrap over prompts.")] = 1000
    seed: Seed = 0

    @property
    def named(self) -> dict[str, int]:
        """Both, as functions take them."""
        return {"num_resamples": self.num_resamples, "seed": self.seed}


@dataclass(frozen=True, slots=True)
class Allowed:
    """Limits that the average is judged by, and the size of what judges it."""

    tolerance: Annotated[
        float, typer.Option(min=0, help="Share of accuracy and of win rate that it may lose to the best member.")
    ] = 0.01
    barrier: Annotated[
        float, typer.Option(min=0, help="Nats a pair by which the loss may lie above the members' own on the way.")
    ] = 0.01
    best_of: Annotated[
        int, typer.Option(min=2, help="Answers that best-of-n chooses from, where prompts have more than these.")
    ] = 4
    path_pairs: Annotated[
        int, typer.Option(min=1, help="Pairs, drawn at random, that the ways are measured on; 4 passes a member.")
    ] = 500

    @property
    def worse(self) -> "Tolerance":
        """The tolerance as the checks take it."""
        from rmcore.policy.earned_average import Tolerance

        return Tolerance(share=self.tolerance, height=self.barrier)


@options()
@common("limit", "max_seq_len", "device", "tolerance", "barrier", "best_of", "path_pairs", "how", "json_out", "figure")
def soup(
    checkpoints: Annotated[
        list[str], typer.Argument(metavar="CHECKPOINT...", help="Two or more, trained from one base; or adapters.")
    ],
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder for the model, if it is accepted; must not exist, or be empty.")],
    reading: PairReading,
    model: ModelReading,
    allowed: Allowed,
    resampling: Resampling,
    how: Annotated[
        How, typer.Option(help="uniform: of all; greedy: from the best down, each only if it makes nothing worse.")
    ] = How.uniform,
    json_out: JsonOut = None,
    figure: Annotated[
        Path | None, typer.Option(help="Also draw the ways to this PNG, those of a refused average, too.")
    ] = None,
) -> None:
    """Average the weights of reward models into one, and write it only if that is shown to cost nothing.

    Half of the prompts of --data name the best member and choose; the others judge. The average is accepted if there is
    no barrier of the loss on the ways to its members, and it loses no more than --tolerance of pairwise accuracy and of
    the win rate of best-of-n to the best member, at the far end of 95 % intervals over prompts. Else nothing is written
    to --out, and the exit status is 2. The ensemble of the same members stands beside it.

    Example: rm-opt soup a/best b/best c/best --data held_out.parquet --out soup
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not empty, and a soup never overwrites; name a new folder.")
    model.require_float32("an average of rounded weights would be written as the model")
    halves = _halves(reading.read(data), resampling.seed)
    kitchen = _Kitchen(model, _members(checkpoints, model))
    scored = {name: kitchen.score(kitchen.load(name), halves, name) for name in checkpoints}
    choosing = {name: _accuracy(one.tables["choose"]) for name, one in scored.items()}
    best = max(choosing, key=lambda name: choosing[name])
    tried = kitchen.choose(choosing, halves["choose"]) if how is How.greedy else []
    kept = [one.name for one in tried if one.kept] if tried else list(checkpoints)
    record: dict[str, Any] = {
        "how": how.value,
        "data": data,
        "members": [
            {**kitchen.members[name], "kept": name in kept, "choosing_accuracy": choosing[name]} for name in checkpoints
        ],
        "weights": {name: 1 / len(kept) for name in kept},
        "greedy": [asdict(one) for one in tried],
        "best_member": best,
        "allowed": asdict(allowed),
        **resampling.named,
    }
    _say_choice(record)
    if len(kept) == 1:
        write_report_json(json_out, record | {"accepted": False})
        raise ModelError(
            f"the average is refused: none was as good as {best} alone on the pairs that choose, so nothing is left to "
            f"average and nothing was written. Use {best} itself."
        )
    averaged, checks, measured = kitchen.judge(kept, best, scored, halves, allowed, resampling)
    record |= measured | {"checks": [check.to_dict() for check in checks]}
    record["accepted"] = all(check.passed is not False for check in checks)
    _say(record)
    write_report_json(json_out, record)
    if figure is not None:
        _draw(record, figure)
    refused = [check.text for check in checks if check.passed is False]
    if refused:
        raise ModelError(
            f"the average is refused, and nothing was written to {out}: {'; '.join(refused)}. Use {best}, or the "
            "members as an ensemble (rm-opt ensemble). Where an interval is too wide to show anything, pass pairs of "
            "more prompts."
        )
    _write(averaged, record, out)


@dataclass(frozen=True, slots=True)
class _Scored:
    """Rewards of a model: a table a half of the prompts, and the seconds that the judging one took."""

    tables: dict[str, "pd.DataFrame"]
    judging_seconds: float


def _halves(pairs: Sequence[PreferencePair], seed: int) -> dict[str, list[PreferencePair]]:
    from rmcore.data.splits import split_by_prompt

    parts = {name: list(part) for name, part in split_by_prompt(pairs, fractions=SPLIT, seed=seed).items()}
    empty = [name for name, part in parts.items() if not part]
    if empty:
        raise ConfigError(f"{len(pairs)} pairs leave none to {', '.join(empty)}: pass pairs of more prompts.")
    return parts


def _members(checkpoints: Sequence[str], model: ModelReading) -> dict[str, dict[str, Any]]:
    """Digest and base of each member, which are found to be alike; only then is anything scored."""
    from rmcore.ensembles.ensemble_folder import checkpoint_digest
    from rmcore.ensembles.soup import Likeness

    if len(checkpoints) < 2:
        raise ConfigError(f"{len(checkpoints)} checkpoint is its own average: name two or more, trained from one base.")
    members: dict[str, dict[str, Any]] = {}
    first: Likeness | None = None
    for name in checkpoints:
        base = _base(name)
        found = {"checkpoint": name, "digest": checkpoint_digest(Path(name)), "base": base}
        twin = next((other for other, one in members.items() if one["digest"] == found["digest"]), None)
        if twin is not None or name in members:
            raise ConfigError(f"{name} is the same model as {twin or name}: name each member once.")
        likeness = Likeness.of(_load(name, model), name, base)
        first = first or likeness
        first.require(likeness)
        members[name] = found
    unknown = [name for name, found in members.items() if found["base"] is None]
    if unknown:
        print(f"base        not recorded for {', '.join(unknown)}: only the ways between the models can tell")
    return members


def _base(name: str) -> str | None:
    """Name what a checkpoint was trained from, as far as its adapter or the settings of its training say."""
    from rmcore.models import lora

    folder = Path(name).expanduser()
    adapter = folder if lora.is_adapter(folder) else folder / lora.ADAPTER_FOLDER
    if lora.is_adapter(adapter):
        base = lora.read_base(adapter)
        return f"{base.name} with weights {base.fingerprint[:12]}" if base.fingerprint else base.name
    settings = find_origin(name).settings or {}
    model, seed = (settings.get("model") or {}).get("name"), settings.get("seed")
    if model is None:
        return None
    if model in TINY_SIZES:  # drawn at random by the seed
        return f"{model} of seed {seed}"
    return str(Path(model).resolve()) if Path(model).is_dir() else str(model)


def _load(name: str, model: ModelReading) -> Any:
    rm = model.load(name)
    rm.merge_adapters()
    return rm


def _accuracy(table: "pd.DataFrame") -> float:
    """Share of pairs that a model ranks right, ties half."""
    from rmcore.evaluation.ranking import correctness

    return float(correctness((table["reward_chosen"] - table["reward_rejected"]).to_numpy()).mean())


@dataclass(frozen=True, slots=True)
class _Kitchen:
    """The members, and what is done with them."""

    model: ModelReading
    members: dict[str, dict[str, Any]]

    def load(self, name: str) -> Any:
        """A member as a plain model."""
        return _load(name, self.model)

    def score(self, rm: Any, halves: dict[str, list[PreferencePair]], name: str) -> _Scored:
        """Rewards of `rm` on both halves."""
        from rmcore.core.progress import progress_bar
        from rmcore.ensembles.score import score_pairs_table

        tables, seconds = {}, 0.0
        for half, pairs in halves.items():
            started = time.perf_counter()
            with progress_bar(f"{half} {name}") as report:
                tables[half] = score_pairs_table(rm, pairs, report=report)[0]
            seconds = time.perf_counter() - started
        return _Scored(tables, seconds)

    def choose(self, accuracies: dict[str, float], pairs: list[PreferencePair]) -> list[Any]:
        """The greedy choice."""
        from rmcore.ensembles.soup import choose_greedily

        def accuracy(rm: Any) -> float:
            return _accuracy(self.score(rm, {"choose": pairs}, "an average").tables["choose"])

        return choose_greedily(accuracies, self.load, accuracy)

    def judge(
        self,
        kept: list[str],
        best: str,
        scored: dict[str, _Scored],
        halves: dict[str, list[PreferencePair]],
        allowed: Allowed,
        resampling: Resampling,
    ) -> tuple[Any, "list[Check]", dict[str, Any]]:
        """The average of the kept members, what was measured of it on the judging half, and the checks."""
        import numpy as np

        from rmcore.core.progress import progress_bar
        from rmcore.ensembles.agreement import aggregate
        from rmcore.ensembles.soup import average_weights
        from rmcore.evaluation.comparison import paired_comparison
        from rmcore.evaluation.detection import accuracies
        from rmcore.landscape.paths import paths_from_average, paths_record
        from rmcore.landscape.sample import CurvatureSample
        from rmcore.policy.earned_average import checks_of, compare_best_of
        from rmcore.policy.logged_answers import logged_table

        averaged = average_weights(kept, self.load)
        own = self.score(averaged, {"judge": halves["judge"]}, "average")
        columns = ["reward_chosen", "reward_rejected"]
        tables = {name: one.tables["judge"] for name, one in scored.items()} | {AVERAGE: own.tables["judge"]}
        rewards = np.stack([tables[name][columns].to_numpy().T.ravel() for name in kept])
        mean = aggregate(rewards, "mean", 0.0).reshape(2, -1).T
        tables[ENSEMBLE] = tables[AVERAGE].assign(**dict(zip(columns, mean.T, strict=True)))
        margins = np.stack([(table[columns[0]] - table[columns[1]]).to_numpy() for table in tables.values()])
        found = accuracies(margins, tables[AVERAGE]["prompt_id"].tolist(), **resampling.named)

        def difference(first: str, second: str) -> dict[str, Any]:
            compared = paired_comparison(tables[first], tables[second], **resampling.named)
            return dict(compared["accuracy_difference"])

        best_of = compare_best_of(
            {name: logged_table(halves["judge"], table) for name, table in tables.items()},
            AVERAGE,
            best,
            allowed.best_of,
            **resampling.named,
        )
        read = averaged.renderer.tokenize_readable(halves["judge"])
        judging = CurvatureSample(read.tokenized, [pair.prompt_id for pair in read.pairs], averaged.pad_id)
        sample = judging.some(allowed.path_pairs, resampling.seed)
        with progress_bar("ways") as report:
            loaded = ((name, self.load(name)) for name in kept)
            paths = paths_from_average(averaged, loaded, sample, report=report, **resampling.named)
        over_best = difference(AVERAGE, best)
        measured = {
            "num_pairs": {half: len(table) for half, table in scored[best].tables.items()},
            "num_prompts": {half: table["prompt_id"].nunique() for half, table in scored[best].tables.items()},
            "accuracy": {name: value.to_dict() for name, value in zip(tables, found, strict=True)},
            "accuracy_difference": {"average - best": over_best, "ensemble - average": difference(ENSEMBLE, AVERAGE)},
            "best_of_n": best_of,
            "paths": paths_record(paths, sample),
            "scoring_seconds": {
                AVERAGE: own.judging_seconds,
                ENSEMBLE: sum(scored[name].judging_seconds for name in kept),
            },
        }
        return averaged, checks_of(paths, over_best, best_of, best, allowed.worse), measured


def _say_choice(record: dict[str, Any]) -> None:
    from rmcore.reporting.figures.numbers import percent

    for one in record["greedy"]:
        before = "the best of the members" if one["before"] is None else f"{percent(one['before'])} without it"
        print(f"{'kept' if one['kept'] else 'left out':<11} {one['name']}: {percent(one['with_it'])}, {before}")
    print(f"best        {record['best_member']}, on the half of the prompts that chooses and does not judge")


def _say(record: dict[str, Any]) -> None:
    """Print all that was measured, and the decision."""
    print_metrics(
        f"pairwise accuracy on the {record['num_prompts']['judge']} prompts that judge",
        record["accuracy"] | {f"difference: {name}": value for name, value in record["accuracy_difference"].items()},
    )
    best_of = record["best_of_n"]
    if "reason" not in best_of:
        shown = best_of["win_rate"] | {"difference: average - best": best_of["difference"]}
        print_metrics(f"best-of-{best_of['n']} win rate among logged answers (last column: prompts)", shown)
    heights = {
        f"{distance:.0%} of the way to {member['name']}": value
        for member in record["paths"]["members"]
        for distance, value in zip(record["paths"]["distances"], member["height"], strict=True)
        if 0 < distance < 1
    }
    middle = {"the average itself": record["paths"]["members"][0]["height"][0]}
    print_metrics("height of the loss above the members' own (nats a pair)", middle | heights)
    seconds, passes = record["scoring_seconds"], len(record["weights"])
    print(
        f"cost        {passes} passes a response for the ensemble, one for the average: {seconds[ENSEMBLE]:.1f} s and "
        f"{seconds[AVERAGE]:.1f} s here"
    )
    for check in record["checks"]:
        print(f"{ {True: 'pass', False: 'FAIL', None: 'unknown'}[check['passed']]:<11} {check['text']}")


def _write(averaged: Any, record: dict[str, Any], out: Path) -> None:
    """Write the model as any checkpoint, with the record and the figure; whole or not at all."""
    with atomic_folder(out.resolve()) as part:
        averaged.save(part)
        write_json(part / RECORD_FILE, record)
        _draw(record, part / FIGURE_FILE)
    print(f"accepted    {out}: a checkpoint as any other, with {RECORD_FILE} and {FIGURE_FILE}")


def _draw(record: dict[str, Any], place: Path) -> None:
    from rmcore.reporting.figures.soup import soup_figure
    from rmcore.reporting.figures.style import save

    save(soup_figure(record["paths"], record["allowed"]["barrier"], record["checks"]), place)
