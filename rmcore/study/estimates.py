"""How long a stage would take, from what such stages took before on this machine.

Training time is the pairs that it sees over the throughput of the nearest training in the store, plus what that one
spent outside of its steps. Where the store has none of the same kind, a probe of two real steps stands in
(rmcore/study/probe.py).
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rmcore.config.pipeline import PipelineConfig
from rmcore.core.manifests import Entry, canonical_json
from rmcore.core.metrics import CELL_STAGES
from rmcore.stages.order import section, stage_of
from rmcore.stages.stages import OPTIONAL, STAGES
from rmcore.training.record import passes
from rmcore.training.resume import FINISHED_FILE

KIND_FIELDS = ("precision", "compile", "batching", "packing", "gradient_checkpointing", "pairs_per_step")
"""Settings of training that change its throughput; what is left out moves it by some percent."""
FORWARD_SHARE = 1 / 3
"""Share of a training pass: backward costs two forward passes (Kaplan et al. 2020, arXiv:2001.08361, section 2.1)."""


@dataclass(frozen=True, slots=True)
class SpeedProbe:
    """Two real steps of a training, and the size of its data."""

    pairs_per_second: float
    start_seconds: float
    """Until the first step: imports, loading, tokenizing."""
    num_train: int
    num_scored: int
    """Test and validation pairs."""


def kind(config: PipelineConfig) -> str:
    """Describe, as canonical JSON, what trainings of about the same throughput share."""
    return _kind(stage_of("train", config).settings)


def probe_kind(config: PipelineConfig) -> str:
    """The same for a probe, which also counts the pairs of its data set."""
    return canonical_json({"kind": kind(config), "data": stage_of("prepare", config).settings["data"]})


def _kind(settings: Mapping[str, Any]) -> str:
    """Describe the same from the settings of a training as its key has them."""
    model, train = settings["model"], settings["train"]
    shared = {field: train.get(field) for field in KIND_FIELDS}
    sides = {"max_seq_len": model["max_seq_len"], "lora": model["lora"] is not None}
    named = {"model": model["name"], "device": settings["device"]}
    return canonical_json({**named, "twice": train["optimizer"] == "sam", **sides, **shared})


@dataclass
class Estimates:
    """Expected seconds of stages, from store entries and probes by `probe_kind`."""

    entries: Sequence[Entry]
    probes: Mapping[str, SpeedProbe]

    def knows(self, config: PipelineConfig) -> bool:
        """Whether the time of every stage that a cell may run can be told."""
        return all(self.seconds(config, stage) is not None for stage in CELL_STAGES)

    def seconds(self, config: PipelineConfig, stage: str) -> float | None:
        """Expected wall seconds of one stage; None: nothing like it was measured."""
        if stage == "prepare":
            taken = self._newest(entry for entry in self._of("prepare") if _same_source(entry, config))
            return taken if taken is not None else self._start(config)
        if stage not in CELL_STAGES:  # as long as it took with the same settings
            settings = stage_of(stage, config).settings
            return self._newest(entry for entry in self._of(stage) if entry.inputs["config"] == settings)
        trained = self._trained.get(kind(config), [])
        if stage == "train":
            return self._train_seconds(config, trained)
        outcomes, settings = {entry.digest for entry in trained}, stage_of(stage, config).settings[stage]
        measured = self._newest(
            entry
            for entry in self._of(stage)
            if entry.inputs["upstream"].get("train") in outcomes and entry.inputs["config"].get(stage) == settings
        )
        return measured if measured is not None else self._from_probe(config, stage)

    def _train_seconds(self, config: PipelineConfig, trained: Sequence[Entry]) -> float | None:
        known = [(entry, _read_record(entry)) for entry in trained]
        # One that was resumed has done some steps twice.
        whole = [(entry, record) for entry, record in known if record is not None and not record.get("resumed_from")]
        for entry, record in whole or known:
            pairs = self._planned_pairs(config)
            if record is None or pairs is None:
                continue
            outside = max(0.0, entry.wall_seconds - record["train_seconds"])
            return pairs / record["pairs_per_second"] + outside
        probe, pairs = self.probes.get(probe_kind(config)), self._planned_pairs(config)
        if probe is None or pairs is None:
            return None
        return probe.start_seconds + pairs / probe.pairs_per_second

    def _planned_pairs(self, config: PipelineConfig) -> float | None:
        """Pairs that a training would see; None where it counts epochs of data that no probe has counted."""
        if config.train.steps is not None:
            return config.train.steps * config.train.pairs_per_step
        probe = self.probes.get(probe_kind(config))
        return None if probe is None else passes(config.train, probe.num_train) * probe.num_train

    def _from_probe(self, config: PipelineConfig, stage: str) -> float | None:
        probe = self.probes.get(probe_kind(config))
        if probe is None:
            return None
        if stage in OPTIONAL:
            passes = STAGES[stage].training_passes(section(config, stage))
        else:
            passes = FORWARD_SHARE * (probe.num_scored + min(config.evaluate.train_pairs, probe.num_train))
        return None if passes is None else probe.start_seconds + passes / probe.pairs_per_second

    def _start(self, config: PipelineConfig) -> float | None:
        probe = self.probes.get(probe_kind(config))
        return None if probe is None else probe.start_seconds

    def _of(self, stage: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.stage == stage]

    def _newest(self, entries: Iterable[Entry]) -> float | None:
        newest = max(entries, key=lambda entry: entry.created, default=None)
        return None if newest is None else newest.wall_seconds

    @cached_property
    def _trained(self) -> dict[str, list[Entry]]:
        """Finished trainings by kind, newest first."""
        by_kind: dict[str, list[Entry]] = {}
        for entry in sorted(self._of("train"), key=lambda entry: entry.created, reverse=True):
            by_kind.setdefault(_kind(entry.inputs["config"]), []).append(entry)
        return by_kind


def _read_record(entry: Entry) -> dict[str, Any] | None:
    """How a training ended; None where the artifact is damaged, which is no reason to refuse a plan."""
    try:
        record: dict[str, Any] = json.loads((entry.path / FINISHED_FILE).read_text())
    except (OSError, ValueError):
        return None
    return record


def _same_source(entry: Entry, config: PipelineConfig) -> bool:
    source = stage_of("prepare", config).settings["data"]["source"]
    return bool(source == entry.inputs["config"]["data"]["source"])
