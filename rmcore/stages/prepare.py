"""Stage prepare: raw preference data in, audited and split pairs out.

Writes `train.parquet`, `validation.parquet`, `test.parquet`, with the gold world also `ood.parquet` and
`label_ceiling.json`; `audit.json`; `rejected_rows.jsonl`; `summary.json`.
"""

import hashlib
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

from rmcore.config.data import DataConfig
from rmcore.core.errors import ConfigError
from rmcore.core.files import write_json
from rmcore.core.progress import Report, silent, within
from rmcore.core.tracking import Tracker
from rmcore.data.audit import audit
from rmcore.data.gold.world import generate_pairs, label_ceiling
from rmcore.data.pair import PreferencePair
from rmcore.data.pairs_on_disk import PairsOnDisk
from rmcore.data.readers.columns import ColumnMap
from rmcore.data.readers.sources import LoadedPairs, cap_prompts, load_pairs, source_kind, take_out, write_rejected
from rmcore.data.splits import split_by_prompt
from rmcore.data.table import write_pairs
from rmcore.stages.interface import CEILING_FILE, Upstream
from rmcore.stages.settings import PrepareSettings

FILES = ("file", "cluster")
"""Kinds of sources that have no splits."""
Splits = dict[str, Sequence[PreferencePair]]


def run(settings: PrepareSettings, upstream: Upstream, out: Path, tracker: Tracker, report: Report) -> None:
    """Read, audit and split the pairs named in `settings.data`."""
    # What is mapped outlives its name, but for disks of other machines, which keep it until this process ends.
    with TemporaryDirectory(prefix=".pairs-", dir=out, ignore_cleanup_errors=True) as spool:
        _run(settings, out, Path(spool), report)


def _run(settings: PrepareSettings, out: Path, spool: Path, report: Report) -> None:
    report(0, 3, "reading")
    reading = within(report, 0, 3, "reading")
    splits, loaded = load_splits(settings.data, seed=settings.seed, report=reading, spool=spool)
    report(1, 3, "writing the splits")
    for name, pairs in splits.items():
        _write(pairs, out / f"{name}.parquet")
    write_rejected(chain.from_iterable(one.rejected for one in loaded), out / "rejected_rows.jsonl")
    report(2, 3, "audit of all splits")
    findings = audit(splits, loaded)
    if settings.data.source == "gold":
        ceilings = {name: label_ceiling(pairs) for name, pairs in splits.items()}
        findings["label_ceiling"] = ceilings
        write_json(out / CEILING_FILE, ceilings)
    write_json(out / "audit.json", findings)
    counts = {f"eval/num_{name}_pairs": len(pairs) for name, pairs in splits.items()}
    write_json(out / "summary.json", {"metrics": counts})


def _write(pairs: Sequence[PreferencePair], path: Path) -> None:
    if isinstance(pairs, PairsOnDisk):
        pairs.write_parquet(path)
    else:
        write_pairs(pairs, path)


def load_splits(
    config: DataConfig, *, seed: int, report: Report = silent, spool: Path | None = None
) -> tuple[Splits, list[LoadedPairs]]:
    """Read all sources and split by prompt: train, validation, test, and ood where the gold world gives one.

    With a folder `spool` the pairs of sources lie there, and not in memory, while they are used.

    Returns:
        The splits in that order and what reading each source found (nothing for the gold world).
    """
    if config.source == "gold":
        world = generate_pairs(config.gold, seed if config.test_seed is None else config.test_seed)
        splits = _carve(world.pairs[: config.limit], config, seed=seed, test=config.test_fraction)
        return {**splits, "ood": world.ood_pairs[: config.eval_limit]}, []
    loaded = load_sources(config, report, spool)
    if len(loaded) == 1:
        return _carve(loaded[0].pairs, config, seed=seed, test=config.test_fraction), loaded
    splits = _carve(loaded[0].pairs, config, seed=seed, test=0.0)
    return {**splits, "test": loaded[1].pairs}, loaded


def load_sources(config: DataConfig, report: Report = silent, spool: Path | None = None) -> list[LoadedPairs]:
    """Read the training source and, where one is named, the held-out source; into the folder `spool` if there is one.

    Training pairs whose prompt or conversation is held out are taken out and counted: held-out numbers would flatter a
    model that was trained on them.

    Raises:
        ConfigError: the held-out pairs would be the training pairs.
        DataError: see `rmcore.data.readers.sources.take_out` and `rmcore.data.readers.sources.load_pairs`.
    """
    columns = ColumnMap.from_config(config)
    if config.eval_source is None and config.eval_split is not None and source_kind(config.source) in FILES:
        raise ConfigError(
            f"eval_split={config.eval_split} names a split of {config.source}, and a file has none, so the test pairs "
            "would be the training pairs; name a file in eval_source, or leave both out to hold out some prompts."
        )
    load = partial(
        load_pairs,
        columns=columns,
        require_complete_pairs=config.require_complete_pairs,
        pairs_per_row=config.pairs_per_row,
        report=report,
    )
    places = (None, None) if spool is None else (spool / "training.arrow", spool / "held_out.arrow")
    everything = load(config.source, split=config.split, limit=config.limit, spool=places[0])
    training = cap_prompts(everything, config.pairs_per_prompt)
    if config.eval_source is None and config.eval_split is None:
        return [training]
    source, split = config.eval_source or config.source, config.eval_split or config.split
    everything = load(source, split=split, limit=config.eval_limit, spool=places[1])
    held_out = cap_prompts(everything, config.eval_pairs_per_prompt)
    return [take_out(training, held_out), held_out]


def _carve(pairs: Sequence[PreferencePair], config: DataConfig, *, seed: int, test: float) -> Splits:
    validation = config.validation_fraction
    if test and config.test_seed is not None:  # a test of its own; the other prompts are dealt by the run's seed
        shares = {"train": 1 - test, "test": test}
        first = split_by_prompt(pairs, fractions=shares, seed=config.test_seed)
        rest = {"train": 1 - validation / (1 - test), "validation": validation / (1 - test)}
        rest = {name: share for name, share in rest.items() if share}
        # Dealt by a hash of its own: under test_seed itself the places of the training prompts are cut already.
        own = int.from_bytes(hashlib.sha256(f"validation {seed}".encode()).digest()[:4], "big")
        splits = {**split_by_prompt(first["train"], fractions=rest, seed=own), "test": first["test"]}
    else:
        fractions = {"train": 1 - validation - test, "validation": validation, "test": test}
        fractions = {name: share for name, share in fractions.items() if share}
        splits = split_by_prompt(pairs, fractions=fractions, seed=seed)
    if "test" in splits:
        splits["test"] = splits["test"][: config.eval_limit]
    return splits
