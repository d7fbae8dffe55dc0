"""Everything that only a CUDA GPU can show, in one call of at most 490 s.

    benchmarks/gpu.sh --fetch-wheels              # where a package index is reached: .wheels, of what is usually absent
    benchmarks/gpu.sh --out DIR                   # on the machine with the GPU, .wheels in the tree
    benchmarks/gpu.sh --out NEW --resume DIR      # a second call: only what failed or had no time, compile caches kept
    benchmarks/gpu.sh --out DIR --only compile,ladder
    benchmarks/gpu.sh --smoke --out DIR           # the same path with small shapes on a CPU

`PLAN` is the order, the most important question first, with the most seconds that each part may take; a part that
exceeds them is stopped. All parts run in one process, so that libraries are imported and each model is built once.
Every measurement is a line of gpu.jsonl, written as soon as it is known, so a call that dies is continued by --resume;
gpu.md shows them as tables. No part needs a network. Weights are drawn at random: no number says anything about the
quality of a reward model.
"""

import argparse
import gc
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SECONDS = 490.0
CARRIED = ("gpu.jsonl", "compile_cache.bin")
"""Files of an earlier call that --resume takes over."""
LAST_LINES = 12
"""Lines of an error that a record keeps."""


@dataclass(frozen=True)
class Part:
    """One question: a function of a module, which is given a `Work`."""

    name: str
    module: str
    seconds: float
    """Most that it may take; the first one also pays for the imports."""


PLAN = (
    Part("machine", "gpu_training", 60),
    Part("compile", "gpu_training", 90),
    Part("ladder", "gpu_training", 50),
    Part("large", "gpu_training", 80),
    Part("scoring", "gpu_scoring", 70),
    Part("wide", "gpu_training", 60),
    Part("sharding", "gpu_sharding", 40),
    Part("trl", "gpu_training", 40),
)


class NotHereError(Exception):
    """What is to be measured is not on this machine; the message says what."""


class StoppedError(BaseException):
    """The time of a part is over, whatever it is doing."""


@dataclass(frozen=True)
class Records:
    """The lines of gpu.jsonl that were measured on one card: those of an H100 and of an H200 are never mixed."""

    file: Path
    on: str
    """Name of the card."""

    def write(self, **record: Any) -> None:
        """Append one line; it is on the disk when this returns."""
        with self.file.open("a") as file:
            file.write(json.dumps(record | {"on": self.on}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def latest(self) -> dict[tuple[str, str], dict[str, Any]]:
        """The last record of each measurement, by part and unit; a part's own end is under the unit ""."""
        found = {}
        for line in self.file.read_text().splitlines() if self.file.is_file() else ():
            try:
                record = json.loads(line)
            except ValueError:
                continue  # cut off while it was written
            if record["on"] == self.on:
                found[record["part"], record.get("unit", "")] = record
        return found


@dataclass
class Work:
    """What the parts share: where results go, what is done, and the models that were built."""

    smoke: bool
    records: Records
    part: str = ""
    built: dict[str, Any] = field(default_factory=dict)
    """Models by size, kept from part to part as long as none of their layers are exchanged."""

    def measure(self, unit: str, call: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """Run one measurement and write its record; what was measured before is returned as it is in the file.

        A measurement that fails stops no other. None: it failed, or is not possible here.
        """
        before = self.records.latest().get((self.part, unit))
        if before and before["status"] in ("done", "skipped"):
            return before if before["status"] == "done" else None
        started = time.monotonic()
        try:
            record = {"status": "done"} | call()
        except (NotHereError, ModuleNotFoundError) as error:
            record = {"status": "skipped", "reason": str(error)}
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a result, and the rest is still wanted
            first = next(iter(str(error).strip().splitlines()), "")
            last = "\n".join(traceback.format_exc().strip().splitlines()[-LAST_LINES:])
            record = {"status": "failed", "reason": f"{type(error).__name__}: {first}"[:300], "error": last}
        self.records.write(part=self.part, unit=unit, seconds=round(time.monotonic() - started, 2), **record)
        free_memory()
        return record if record["status"] == "done" else None

    def run(self, part: Part, seconds: float) -> str:
        """Run one part unless it is done, for so many seconds at most; its status."""
        end = self.records.latest().get((part.name, ""))
        if end and end["status"] == "done":
            print(f"{part.name}: done before", flush=True)
            return "done"
        if seconds < 1:
            print(f"{part.name}: not begun, no time is left", flush=True)
            return "not begun"
        self.part, started, reason = part.name, time.monotonic(), ""
        before = signal.signal(signal.SIGALRM, _stop)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            getattr(importlib.import_module(part.module), part.name)(self)
            units = [one for (name, unit), one in self.records.latest().items() if name == part.name and unit]
            status = "failed" if any(one["status"] == "failed" for one in units) else "done"
        except StoppedError:
            status, reason = "stopped", f"not done within {seconds:.0f} s"
            self.built.clear()
            free_memory()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        took = round(time.monotonic() - started, 1)
        self.records.write(part=part.name, status=status, reason=reason, seconds=took)
        print(f"{part.name}: {status} in {took:.0f} s {reason}", flush=True)
        return status


def _stop(*_: object) -> None:
    raise StoppedError


def free_memory() -> None:
    """Give what the last measurement left behind back to the GPU."""
    gc.collect()
    torch = sys.modules.get("torch")  # imported by the parts
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def main() -> int:
    """Run the parts that are not done; 1 if something failed."""
    given = parse()
    deadline = time.monotonic() + given.seconds
    given.out.mkdir(parents=True, exist_ok=True)
    for name in CARRIED:
        if given.resume and (given.resume / name).is_file() and not (given.out / name).exists():
            shutil.copyfile(given.resume / name, given.out / name)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as stages do
    os.chdir(ROOT)
    work = Work(given.smoke, Records(given.out / "gpu.jsonl", card() + (", smoke" if given.smoke else "")))
    statuses = []
    for part in PLAN:
        if not given.only or part.name in given.only:
            left = deadline - time.monotonic()
            statuses.append(work.run(part, left if given.smoke else min(part.seconds, left)))
            (given.out / "gpu.md").write_text(page(work.records, [part.name for part in PLAN]))
    print(f"results: {given.out / 'gpu.jsonl'}, {given.out / 'gpu.md'}", flush=True)
    return int("failed" in statuses)


def parse() -> argparse.Namespace:
    """Read the command line."""
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.sh", description=__doc__, formatter_class=how)
    names = [part.name for part in PLAN]
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"most of the whole call (default: {SECONDS:g})")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-out")), help="default: $OUT")
    parser.add_argument("--resume", type=Path, help="the --out of an earlier call: what is done there is not repeated")
    parser.add_argument("--only", type=lambda text: text.split(","), help=f"of {','.join(names)}")
    parser.add_argument("--smoke", action="store_true", help="small shapes: is everything wired?")
    given = parser.parse_args()
    if unknown := set(given.only or ()) - set(names):
        parser.error(f"--only {','.join(sorted(unknown))} is none of {', '.join(names)}")
    if given.resume and not (given.resume / "gpu.jsonl").is_file():
        parser.error(f"--resume {given.resume} has no gpu.jsonl")
    given.out = given.out.absolute()
    return given


def card() -> str:
    """Name of the GPU, or cpu. Not asked of torch, which takes seconds to import."""
    if shutil.which("nvidia-smi") is None:
        return "cpu"
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return next(iter(found.stdout.splitlines()), "cpu") if found.returncode == 0 else "cpu"


OF_THE_RECORD = ("part", "unit", "on", "status", "reason", "error", "seconds")


def page(records: Records, parts: Sequence[str]) -> str:
    """What gpu.jsonl says of this card as Markdown: a table a part."""
    lines = [f"# {records.on}", "", "Written by `benchmarks/gpu.sh`; gpu.jsonl has the same numbers unrounded."]
    found = records.latest()
    for part in parts:
        if (part, "") not in found:
            continue
        end = found[part, ""]
        units = {unit: one for (name, unit), one in found.items() if name == part and unit}
        lines += ["", f"## {part}: {end['status']}, {end['seconds']} s {end['reason']}", ""]
        columns = list(dict.fromkeys(key for one in units.values() for key in one if key not in OF_THE_RECORD))
        lines += [f"| {' | '.join(['measurement', 's', *columns])} |", "| --- |" + " --- |" * (len(columns) + 1)]
        for unit, one in units.items():
            status = "" if one["status"] == "done" else f": {one['status']}, {one.get('reason', '')}"
            cells = [unit + status, one.get("seconds", ""), *(one.get(name, "") for name in columns)]
            lines.append(f"| {' | '.join(map(_cell, cells))} |")
        for unit, one in units.items():
            lines += ["", f"{unit}:", "", "```", one["error"], "```"] if "error" in one else []
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_cell, value))
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value).replace("|", "/").replace("\n", " ")
