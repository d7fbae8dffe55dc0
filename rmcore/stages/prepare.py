"""Stage prepare: raw preference data in, audited and split pairs out.

Writes `train.parquet`, `validation.parquet`, `test.parquet`, with the synthetic benchmark also `ood.parquet` and
`label_ceiling.json`; `audit.json`; `rejected_rows.jsonl`; `summary.json`. Where a source says more than strict pairs
(`rmcore.data.observation`), `train_observations.parquet` and the like hold all that it says of the same prompts.
"""

import hashlib
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from rmcore.config.data import GOLD, DataConfig
from rmcore.core.errors import ConfigError
from rmcore.core.files import write_json
from rmcore.core.progress import Report, silent, within
from rmcore.core.tracking import Tracker
from rmcore.data.audit import audit
from rmcore.data.gold.world import generate_pairs, label_ceiling
from rmcore.data.observation import Observation
from rmcore.data.pair import PreferencePair
from rmcore.data.pairs_on_disk import RowsOnDisk
from rmcore.data.parquet_rows import Record, RecordSchema, write_records
from rmcore.data.readers.columns import ColumnMap
from rmcore.data.readers.sources import LoadedPairs, load_pairs, source_kind, write_rejected
from rmcore.data.splits import cap_prompts, exclude_held_out_conversations, split_together
from rmcore.data.table import OBSERVATIONS, PAIRS
from rmcore.stages.prepared import CEILING_FILE
from rmcore.stages.stages import PrepareStage

FILES = ("file", "cluster")
"""Kinds of sources that have no splits."""
Splits = dict[str, Sequence[PreferencePair]]
Said = dict[str, Sequence[Observation]]


class Prepared(NamedTuple):
    """All that was read, by split."""

    pairs: Splits
    observations: Said
    """All that a source says of the prompts of a split; of sources that say more than strict pairs."""
    loaded: list[LoadedPairs]
    """Outcome of reading each source; none for the synthetic benchmark."""


def run(settings: PrepareStage, out: Path, tracker: Tracker, report: Report) -> None:
    """Read, audit and split the pairs named in `settings.data`."""
    # What is mapped outlives its name, but for disks of other machines, which keep it until this process ends.
    with TemporaryDirectory(prefix=".pairs-", dir=out, ignore_cleanup_errors=True) as spool:
        _run(settings, out, Path(spool), report)


def _run(settings: PrepareStage, out: Path, spool: Path, report: Report) -> None:
    report(0, 3, "reading")
    reading = within(report, 0, 3, "reading")
    splits, observations, loaded = prepare(settings.data, seed=settings.seed, report=reading, spool=spool)
    report(1, 3, "writing the splits")
    for name, pairs in splits.items():
        _write(PAIRS, pairs, out / f"{name}.parquet")
    for name, said in observations.items():
        _write(OBSERVATIONS, said, out / f"{name}_observations.parquet")
    write_rejected(chain.from_iterable(one.rejected for one in loaded), out / "rejected_rows.jsonl")
    report(2, 3, "audit of all splits")
    findings = audit(splits, loaded, observations)
    if settings.data.source == GOLD:
        ceilings = {name: label_ceiling(pairs) for name, pairs in splits.items()}
        findings["label_ceiling"] = ceilings
        write_json(out / CEILING_FILE, ceilings)
    write_json(out / "audit.json", findings)
    counts = {f"eval/num_{name}_pairs": len(pairs) for name, pairs in splits.items()}
    counts |= {f"eval/num_{name}_observations": len(said) for name, said in observations.items()}
    write_json(out / "summary.json", {"metrics": counts})


def _write(schema: RecordSchema[Record], records: Sequence[Record], path: Path) -> None:
    if isinstance(records, RowsOnDisk):
        records.write_parquet(path)
    else:
        write_records(schema, records, path)


def prepare(config: DataConfig, *, seed: int, report: Report = silent, spool: Path | None = None) -> Prepared:
    """Read all sources and split by prompt: train, validation, test, and ood where the synthetic benchmark gives one.

    A prompt's observations are in the split of its pairs. With a folder `spool` what is read is there, and not in
    memory, while it is used.
    """
    if config.source == GOLD:
        world = generate_pairs(config.gold, seed if config.test_seed is None else config.test_seed)
        splits, _ = _carve(world.pairs[: config.limit], (), config, seed=seed, test=config.test_fraction)
        return Prepared({**splits, "ood": world.ood_pairs[: config.eval_limit]}, {}, [])
    loaded = load_sources(config, report, spool)
    test = config.test_fraction if len(loaded) == 1 else 0.0
    if test and config.pairs_per_prompt is not None:  # held out whole: runs with another cap then share their test
        every, said = _carve(loaded[0].pairs, loaded[0].observations, config, seed=seed, test=test)
        most, spared = config.pairs_per_prompt, every["test"]
        loaded = [cap_prompts(loaded[0], most, spared=spared, spared_observations=said["test"])]
    splits, said = _carve(loaded[0].pairs, loaded[0].observations, config, seed=seed, test=test)
    said = said if loaded[0].observations else {}
    for held_out in loaded[1:]:
        splits["test"] = held_out.pairs
        said |= {"test": held_out.observations} if held_out.observations else {}
    return Prepared(splits, said, loaded)


def load_sources(
    config: DataConfig, report: Report = silent, spool: Path | None = None, *, holds_out: bool = True
) -> list[LoadedPairs]:
    """Read the training source and, where one is named, the held-out source; into the folder `spool` if there is one.

    Training pairs whose prompt or conversation is held out are taken out and counted: held-out numbers would flatter a
    model that was trained on them. With `holds_out`, pairs of a source that is still to be split are not capped by
    `pairs_per_prompt`, as held-out prompts keep all.

    Raises:
        ConfigError: the held-out pairs would be the training pairs.
        DataError: see `rmcore.data.splits.exclude_held_out_conversations` and `rmcore.data.readers.sources.load_pairs`.
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
        attribute_weights=config.attribute_weights,
        report=report,
    )
    measures_elsewhere = config.eval_source is not None or config.eval_split is not None
    places = (None, None) if spool is None else (spool / "training.arrow", spool / "held_out.arrow")
    everything = load(
        config.source,
        split=config.split,
        limit=config.limit,
        spool=places[0],
        require_pairs=holds_out and not measures_elsewhere,
    )
    if holds_out and not measures_elsewhere:
        return [everything]
    training = cap_prompts(everything, config.pairs_per_prompt)
    if not measures_elsewhere:
        return [training]
    source, split = config.eval_source or config.source, config.eval_split or config.split
    held_out = load(source, split=split, limit=config.eval_limit, spool=places[1])
    return [exclude_held_out_conversations(training, held_out), held_out]


def _carve(
    pairs: Sequence[PreferencePair], observations: Sequence[Observation], config: DataConfig, *, seed: int, test: float
) -> tuple[Splits, Said]:
    validation = config.validation_fraction
    if test and config.test_seed is not None:  # a test of its own; the other prompts are dealt by the run's seed
        shares = {"train": 1 - test, "test": test}
        first, first_said = split_together(pairs, observations, fractions=shares, seed=config.test_seed)
        rest = {"train": 1 - validation / (1 - test), "validation": validation / (1 - test)}
        rest = {name: share for name, share in rest.items() if share}
        # Dealt by a hash of its own: under test_seed itself the places of the training prompts are cut already.
        own = int.from_bytes(hashlib.sha256(f"validation {seed}".encode()).digest()[:4], "big")
        splits, said = split_together(first["train"], first_said["train"], fractions=rest, seed=own)
        splits, said = {**splits, "test": first["test"]}, {**said, "test": first_said["test"]}
    else:
        fractions = {"train": 1 - validation - test, "validation": validation, "test": test}
        fractions = {name: share for name, share in fractions.items() if share}
        splits, said = split_together(pairs, observations, fractions=fractions, seed=seed)
    if "test" in splits:
        splits["test"] = splits["test"][: config.eval_limit]
        said["test"] = said["test"][: config.eval_limit]
    return splits, said
