"""Measured throughput for estimates: probes in child processes, remembered under `$RM_OPT_HOME/throughput`."""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rmcore.config.model import FROM_POLICY
from rmcore.config.pipeline import PipelineConfig
from rmcore.core.child_process import ForkedProcess
from rmcore.core.files import exclusive, write_json
from rmcore.core.manifests import make_key
from rmcore.core.store import Store
from rmcore.study.estimates import Estimates, SpeedProbe, probe_kind
from tasks.device import as_seen, free_slots, holders, slots_environment


def estimates(store: Store, folder: Path) -> Estimates:
    """Gather what is known about run times: finished artifacts, and the probes kept in `folder`."""
    probes = {}
    for path in folder.glob("*.json"):
        try:
            record = json.loads(path.read_text())
            probes[record["kind"]] = SpeedProbe(**record["probe"])
        except (ValueError, KeyError, TypeError):
            continue  # cut short: it is measured again
    return Estimates(store.entries(), probes)


@dataclass(frozen=True, slots=True)
class Probed:
    """Outcome of timing two steps of each kind of training that nothing was known about."""

    problems: tuple[str, ...] = ()
    """Why some could not be timed, one line each."""
    is_device_held: bool = False
    """Whether that was because another run held the device."""


def probe_unknown(store: Store, folder: Path, configs: Iterable[PipelineConfig]) -> Probed:
    """Time two steps for each kind of training that nothing is known about.

    While another run holds the device nothing is timed: it would wait for hours, or measure both. One that cannot be
    timed (it diverges, say) speaks for itself alone: the next of its kind is tried.
    """
    known, problems = estimates(store, folder), list[str]()
    unknown: dict[str, list[PipelineConfig]] = {}
    for config in configs:
        if not known.knows(config):
            unknown.setdefault(probe_kind(config), []).append(config)
    for name, alike in unknown.items():
        if alike[0].model.name == FROM_POLICY:
            problems.append("the reward model starts from a policy that is not trained yet, so no step can be timed")
            continue
        model = Path(alike[0].model.name).name
        for config in _distinct(alike):
            if busy := holders(store):
                return _held(busy)
            with free_slots(store, f"a probe of {model}'s speed", config.device) as slots:
                if slots is None:  # taken since it was looked at
                    return _held(holders(store))
                print(f"measuring two steps of {model}: nothing like it has run here yet", file=sys.stderr)
                outcome = _run(config, slots)
            if "probe" in outcome:
                _remember(folder, name, outcome["probe"])
                break
        else:
            problems.append(f"{model}: {outcome['error']}")
    return Probed(tuple(problems))


def _held(busy: list[str]) -> Probed:
    by = " and ".join(busy) or "another run"
    return Probed((f"the device is held by {by}, so no speed was measured; ask again when it is free",), True)


def _distinct(configs: Iterable[PipelineConfig]) -> list[PipelineConfig]:
    """Those that differ in more than the seed, in order."""
    return list({config.model_copy(update={"seed": 0}).model_dump_json(): config for config in configs}.values())


def _remember(folder: Path, name: str, probe: dict) -> None:
    with exclusive(folder / ".lock"):  # two plans may measure the same
        write_json(folder / f"{make_key({'kind': name})[:12]}.json", {"kind": name, "probe": probe})


def _run(config: PipelineConfig, slots: list[int]) -> dict:
    with tempfile.TemporaryDirectory(prefix="rm-opt-") as scratch:
        out, spec, log = (Path(scratch) / name for name in ("out.json", "spec.json", "log.txt"))
        seen = config.model_copy(update={"device": as_seen(config.device)})
        record = {"config": seen.model_dump(mode="json"), "out": str(out)}
        spec.write_text(json.dumps(record | {"started": time.time()}))
        with log.open("w") as output:
            process = ForkedProcess(
                "rmcore.study.probe", spec, output, os.environ | slots_environment(slots, config.device)
            )
            try:
                status = process.wait()
            finally:  # interrupted, it has nothing to save
                process.kill()
                process.wait()
        if status or not out.is_file():
            said = log.read_text(errors="replace").strip().splitlines() or ["no message"]
            return {"error": f"its process ended with status {status}: {said[-1]}"}
        outcome: dict = json.loads(out.read_text())
        return outcome
