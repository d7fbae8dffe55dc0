"""Everything that only a CUDA GPU can show, in one call of at most 490 s.

    benchmarks/gpu.sh --fetch-wheels              # where a package index is reached: .wheels
    benchmarks/gpu.sh --out DIR                   # on the machine with the GPU, .wheels next to the tree
    benchmarks/gpu.sh --out NEW --resume DIR      # a second call: only what failed or had no time, compile caches kept
    benchmarks/gpu.sh --out DIR --only compile,ladder
    benchmarks/gpu.sh --smoke --out DIR           # the same path with small shapes on a CPU

`PLAN` is the order, the most important question first, with the most seconds that each part may take. One worker
process imports the libraries once and runs the parts one after the other, so that each model is built once; a part that
exceeds its time or takes its process with it is ended, and a new worker goes on with the next one. Every measurement is
a line of gpu.jsonl, written as soon as it is known; gpu.md shows them as tables, gpu.log has what was printed. No part
needs a network. Weights are drawn at random: no number says anything about the quality of a reward model.
"""

import argparse
import ctypes
import gc
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpu_wheels

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
    """Most that it may take; the first part that needs torch also pays for the imports."""


PLAN = (
    Part("machine", "gpu_kernels", 60),
    Part("compile", "gpu_training", 90),
    Part("profile", "gpu_profile", 35),
    Part("ladder", "gpu_training", 40),
    Part("large", "gpu_training", 60),
    Part("scoring", "gpu_scoring", 50),
    Part("wide", "gpu_training", 45),
    Part("ceilings", "gpu_kernels", 15),
    Part("exactness", "gpu_exactness", 20),
    Part("sharding", "gpu_sharding", 25),
    Part("trl", "gpu_training", 25),
    Part("fp8", "gpu_training", 25),
)


class NotHereError(Exception):
    """What is to be measured is not on this machine; the message says what."""


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
    """What the parts of one worker share: where results go, what is done, and the models that were built."""

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
        self.records.write(part=self.part, unit=unit, status="begun")
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


def free_memory() -> None:
    """Give what the last measurement left behind back to the GPU."""
    gc.collect()
    torch = sys.modules.get("torch")  # imported by the parts that use it
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def main() -> int:
    """Run the parts that are not done; 1 if something failed."""
    given = parse()
    if given.fetch_wheels:
        return gpu_wheels.fetch(given.wheels)
    deadline = time.monotonic() + given.seconds
    given.out.mkdir(parents=True, exist_ok=True)
    for name in CARRIED:
        if given.resume and (given.resume / name).is_file() and not (given.out / name).exists():
            shutil.copyfile(given.resume / name, given.out / name)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as stages do
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory(prefix="gpu-site-") as site:
        if lacking := gpu_wheels.install(gpu_wheels.missing(), given.wheels, Path(site)):
            print(f"missing, and no wheel of it in {given.wheels}: {', '.join(lacking)}", flush=True)
        run = Run(given.out, deadline, smoke=given.smoke)
        try:
            statuses = [run.part(part) for part in PLAN if not given.only or part.name in given.only]
        finally:
            run.end_worker()
    print(f"results: {given.out / 'gpu.jsonl'}, {given.out / 'gpu.md'}; what was printed: gpu.log", flush=True)
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
    parser.add_argument("--wheels", type=Path, default=ROOT / ".wheels", help="default: .wheels")
    parser.add_argument("--fetch-wheels", action="store_true", help="download what a bare machine lacks, and end")
    given = parser.parse_args()
    if unknown := set(given.only or ()) - set(names):
        parser.error(f"--only {','.join(sorted(unknown))} is none of {', '.join(names)}")
    if given.resume and not (given.resume / "gpu.jsonl").is_file():
        parser.error(f"--resume {given.resume} has no gpu.jsonl")
    given.out, given.wheels = given.out.absolute(), given.wheels.absolute()
    return given


class Run:
    """One call: the parts in order, and the worker that computes them."""

    def __init__(self, out: Path, deadline: float, *, smoke: bool) -> None:
        self.out, self.deadline, self.smoke = out, deadline, smoke
        self.records = Records(out / "gpu.jsonl", card() + (", smoke" if smoke else ""))
        self._processes = multiprocessing.get_context("spawn")
        self._worker: Any = None
        self._pipe: Any = None

    def part(self, part: Part) -> str:
        """Run one part unless it is done; its status."""
        end = self.records.latest().get((part.name, ""))
        if end and end["status"] == "done":
            print(f"{part.name}: done before", flush=True)
            return "done"
        started, left = time.monotonic(), self.deadline - time.monotonic()
        if left < 1:
            print(f"{part.name}: not begun, no time is left", flush=True)
            return "not begun"
        status, reason = self._ask(part, left if self.smoke else min(part.seconds, left))
        for (name, unit), one in self.records.latest().items():
            if name == part.name and one["status"] == "begun":
                self.records.write(part=name, unit=unit, status=status, reason=reason)
        seconds = round(time.monotonic() - started, 1)
        self.records.write(part=part.name, status=status, reason=reason, seconds=seconds)
        (self.out / "gpu.md").write_text(page(self.records, [part.name for part in PLAN]))
        print(f"{part.name}: {status} in {seconds:.0f} s {reason}", flush=True)
        return status

    def _ask(self, part: Part, seconds: float) -> tuple[str, str]:
        """Have the worker run a part; one that does not answer in time, or ends, is replaced for the next part."""
        if self._worker is None:
            self._pipe, theirs = self._processes.Pipe()
            self._worker = self._processes.Process(target=worker, args=(theirs, self.records, self.smoke))
            self._worker.start()
            theirs.close()
        self._pipe.send(part)
        try:
            if self._pipe.poll(seconds):
                return self._pipe.recv(), ""
            status, reason = "stopped", f"not done within {seconds:.0f} s"
        except (EOFError, ConnectionError):
            self._worker.join(5)
            status, reason = "failed", f"its process ended with status {self._worker.exitcode}; see gpu.log"
        self.end_worker()
        return status, reason

    def end_worker(self) -> None:
        """End the worker with all that it started."""
        if self._worker is None:
            return
        self._pipe.close()  # at which an idle worker ends by itself
        self._worker.join(1)
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._worker.pid, number)
            except ProcessLookupError:
                break
            self._worker.join(3)
        self._worker = None


def card() -> str:
    """Name of the GPU, or cpu. Not asked of torch, which takes seconds to import."""
    if shutil.which("nvidia-smi") is None:
        return "cpu"
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return next(iter(found.stdout.splitlines()), "cpu") if found.returncode == 0 else "cpu"


def worker(pipe: Any, records: Records, smoke: bool) -> None:
    """Run the parts that come through `pipe`, and answer each with its status."""
    os.setpgrp()
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # ended with the process that started it
    with (records.file.parent / "gpu.log").open("ab", buffering=0) as log:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(log.fileno(), stream.fileno())
    work = Work(smoke, records)
    while True:
        try:
            part = pipe.recv()
        except EOFError:
            return
        print(f"\n===== {part.name}", flush=True)
        work.part = part.name
        getattr(importlib.import_module(part.module), part.name)(work)
        statuses = {one["status"] for (name, unit), one in records.latest().items() if name == part.name and unit}
        pipe.send("failed" if statuses - {"done", "skipped"} else "done")


OF_THE_RECORD = ("part", "unit", "on", "status", "reason", "error", "lines", "seconds")


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
        lines += ["", *(f"- {unit}: {line}" for unit, one in units.items() for line in one.get("lines", ()))]
        for unit, one in units.items():
            lines += ["", f"{unit}:", "", "```", one["error"], "```"] if "error" in one else []
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_cell, value))
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value).replace("|", "/").replace("\n", " ")
