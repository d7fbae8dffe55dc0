"""Everything that only a CUDA GPU can show, in one command, in order of worth, stopping in time.

    benchmarks/gpu.sh --fetch-wheels                     # where a package index is reached: .wheels
    benchmarks/gpu.sh --out DIR                          # on the machine with the GPU, .wheels beside the tree
    benchmarks/gpu.sh --out DIR --only throughput,profile
    benchmarks/gpu.sh --out NEW --resume DIR/gpu.jsonl   # on another machine: what is there already is not repeated
    benchmarks/gpu.sh --smoke --out DIR                  # the same path with small shapes on a CPU

Each part is a process of its own with its own time limit, forked from this one, which has imported the libraries once.
Every result is appended to gpu.jsonl as it comes, and gpu.md is written anew; gpu.log has all that was printed. A part
that fails leaves its error's last lines and the rest is run. Run again with the same --out, what is done is skipped and
what failed, or had no time, is tried again. No part needs a network: weights are random, shapes are from configs.

Weights are drawn, so no number here says anything about a reward model's quality.
"""

import argparse
import ctypes
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import gpu_wheels  # noqa: E402
from gpu_report import report  # noqa: E402
from gpu_work import NotHereError, TimeUpError, UnitsFailedError, Work, last_lines  # noqa: E402


@dataclass(frozen=True)
class Part:
    """What is run as one process."""

    name: str
    module: str
    limit_s: float
    """Most seconds it may take."""
    least_s: float
    """With fewer seconds left it is not begun."""


PARTS = (
    Part("machine", "gpu_machine", 40, 10),
    Part("tests", "gpu_tests", 180, 40),
    Part("exactness", "gpu_exactness", 90, 25),
    Part("throughput", "gpu_throughput", 420, 40),
    Part("scoring", "gpu_scoring", 120, 25),
    Part("curvature", "gpu_curvature", 240, 30),
    Part("profile", "gpu_profile", 60, 25),
    Part("sharding", "gpu_sharding", 90, 40),
    Part("weights", "gpu_weights", 240, 20),
)
"""In order of worth."""
LIBRARIES = ("torch", "transformers", "train_throughput", "landscape")
"""Imported once, before the first part; a failure shows in the parts that need it."""
ENDING_SECONDS = 5.0
"""Kept of --minutes for the last lines."""


def main() -> int:
    """Run what is asked for and not done; 1 if something failed."""
    given = parse()
    if given.list_missing:
        print("\n".join(gpu_wheels.pinned(gpu_wheels.missing())) or "nothing is missing", flush=True)
        return 0
    if given.fetch_wheels:
        return gpu_wheels.fetch(given.wheels)
    deadline = time.monotonic() + 60 * given.minutes - ENDING_SECONDS
    given.out.mkdir(parents=True, exist_ok=True)
    if given.resume and not (given.out / "gpu.jsonl").exists():
        shutil.copyfile(given.resume, given.out / "gpu.jsonl")
    prepare_environment()
    with tempfile.TemporaryDirectory(prefix="gpu-site-") as site:
        lacking = gpu_wheels.install(gpu_wheels.missing(), given.wheels, Path(site))
        if lacking:
            print(f"missing, and no wheel of it in {given.wheels}: {', '.join(lacking)}", flush=True)
        run = Run(given.out, given.smoke, deadline, lacking, spawn=given.spawn)
        statuses = [run.part(part) for part in PARTS if not given.only or part.name in given.only]
    print(run.summary(), flush=True)
    return int("failed" in statuses)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="most of all parts together (default: 9)")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-out")), help="default: $OUT")
    parser.add_argument("--resume", type=Path, help="a gpu.jsonl of before, to begin --out with")
    parser.add_argument("--only", type=lambda text: text.split(","), help=f"of {','.join(p.name for p in PARTS)}")
    parser.add_argument("--smoke", action="store_true", help="small shapes: is everything wired?")
    parser.add_argument("--spawn", action="store_true", help="start parts anew, if forked ones fail on some driver")
    parser.add_argument("--wheels", type=Path, default=HERE.parent / ".wheels", help="default: .wheels")
    parser.add_argument("--list-missing", action="store_true", help="print the packages that are missing here and end")
    parser.add_argument("--fetch-wheels", action="store_true", help="download what a bare machine lacks and end")
    given = parser.parse_args()
    if unknown := set(given.only or ()) - {part.name for part in PARTS}:
        parser.error(f"--only {','.join(sorted(unknown))} is none of {', '.join(part.name for part in PARTS)}")
    if given.resume and not given.resume.is_file():
        parser.error(f"--resume {given.resume} is no file")
    given.out, given.wheels = given.out.absolute(), given.wheels.absolute()
    return given


def prepare_environment() -> None:
    """For this process and all it starts."""
    paths = [str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")]
    os.environ |= {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking for a GPU must not begin with CUDA before the fork
        "PYTHONUNBUFFERED": "1",
    }
    warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
    os.chdir(HERE.parent)


class Run:
    """One call: which results are there, and a process for each part that is not done."""

    def __init__(self, out: Path, smoke: bool, deadline: float, lacking: list[str], *, spawn: bool = False) -> None:
        self.out, self.smoke, self.deadline, self.lacking = out, smoke, deadline, lacking
        self.file = out / "gpu.jsonl"
        self.records = self._read()
        self._imported = False
        self._processes = multiprocessing.get_context("spawn" if spawn else "fork")
        if not self.records:
            self._import()  # what is forked to look for a GPU then has torch already
        self.on = self._device()

    def _read(self) -> list[dict[str, Any]]:
        """What earlier calls wrote; a last line that was cut off is left out."""
        records = []
        for line in self.file.read_text().splitlines() if self.file.is_file() else ():
            try:
                records.append(json.loads(line))
            except ValueError:
                print(f"{self.file} has a line that is cut off; it is left out", flush=True)
        return records

    def _device(self) -> str:
        """What is measured on. A fork that finds no GPU where there is one is given up for processes begun anew."""
        found = self._ask_device()
        if found is None and shutil.which("nvidia-smi"):
            print("a forked process sees no GPU: parts are started anew, some seconds more each", flush=True)
            self._processes = multiprocessing.get_context("spawn")
            found = self._ask_device()
        return (found or "cpu") + (", smoke" if self.smoke else "")

    def _ask_device(self) -> str | None:
        ours, theirs = self._processes.Pipe(duplex=False)
        asking = self._processes.Process(target=tell_device, args=(theirs,))
        asking.start()
        theirs.close()
        try:
            name = ours.recv() if ours.poll(60) else None
        except EOFError:
            name = None
        asking.join(10)
        return name

    def part(self, part: Part) -> str:
        """Run it unless it is done; its status."""
        own = [one for one in self.records if one["part"] == part.name and one["on"] == self.on]
        ends = [one for one in own if "unit" not in one]
        if ends and ends[-1]["status"] in ("done", "skipped"):
            print(f"{part.name}: {ends[-1]['status']} before", flush=True)
            return str(ends[-1]["status"])
        if lacking := [name for name in gpu_wheels.missing(part.name) if name in self.lacking]:
            return self._end(part, "skipped", f"missing here: {', '.join(lacking)}", 0)
        self._import()
        left = self.deadline - time.monotonic()
        if left < part.least_s:
            print(f"{part.name}: not begun, {max(0, left):.0f} s are left", flush=True)
            return "not begun"
        before = {one["unit"]: one for one in own if "unit" in one}
        started = time.monotonic()
        status, reason = self._watch(part, before, min(part.limit_s, left))
        return self._end(part, status, reason, time.monotonic() - started)

    def _import(self) -> None:
        """Once, and not where nothing is left to do."""
        for name in () if self._imported else LIBRARIES:
            try:
                importlib.import_module(name)
            except Exception as error:  # noqa: BLE001 - the part that needs it will say so
                print(f"{name} cannot be imported: {error}", flush=True)
        self._imported = True

    def _watch(self, part: Part, before: dict[str, Any], limit: float) -> tuple[str, str]:
        """Start the process and take its results as they come."""
        ours, theirs = self._processes.Pipe(duplex=False)
        arguments = (part.module, self.smoke, self.out, before, limit, theirs)
        process = self._processes.Process(target=run_part, args=arguments)
        process.start()
        theirs.close()
        deadline = time.monotonic() + limit
        status, reason, begun = "stopped", f"not done within its {limit:.0f} s", ""
        while (wait := deadline + ENDING_SECONDS - time.monotonic()) > 0:
            if not ours.poll(min(wait, 1.0)):
                continue
            try:
                record = ours.recv()
            except EOFError:
                process.join(5)
                self._write_stopped(part, begun, "failed")
                return "failed", f"the process ended by itself with status {process.exitcode}; see gpu.log"
            if "begun" in record:
                begun = record["begun"]
            elif "unit" in record:
                begun = ""
                self._write({"part": part.name, **record})
            else:
                status, reason = record["status"], record["reason"]
                break
        else:
            self._write_stopped(part, begun, "stopped")
        end_group(process)
        return status, reason

    def _write_stopped(self, part: Part, unit: str, status: str) -> None:
        """Note what was being measured, so that the next call tries it last."""
        if unit:
            record = {"part": part.name, "unit": unit, "seconds": "", "status": status}
            self._write(record | {"reason": "its process was ended" if status == "stopped" else "its process ended"})

    def _end(self, part: Part, status: str, reason: str, seconds: float) -> str:
        self._write({"part": part.name, "status": status, "reason": reason, "seconds": round(seconds, 1)})
        print(f"{part.name}: {status} in {seconds:.0f} s{f' ({reason.splitlines()[0]})' if reason else ''}", flush=True)
        return status

    def _write(self, record: dict[str, Any]) -> None:
        record |= {"on": self.on}
        self.records.append(record)
        with self.file.open("a") as file:
            file.write(json.dumps(record) + "\n")
        (self.out / "gpu.md").write_text(report(self.records, [part.name for part in PARTS]))

    def summary(self) -> str:
        """One line a part, with where everything is."""
        return f"results: {self.file}, {self.out / 'gpu.md'}; what was printed: {self.out / 'gpu.log'}"


def tell_device(answers: Any) -> None:
    """The GPU's name, or None; in a process of its own, because to look is to begin with CUDA."""
    try:
        import torch

        answers.send(torch.cuda.get_device_name() if torch.cuda.is_available() else None)
    except Exception:  # noqa: BLE001 - a broken driver or torch is no GPU
        answers.send(None)


def run_part(module: str, smoke: bool, out: Path, before: dict[str, Any], limit: float, results: Any) -> None:
    """The process of a part: its results, and at the end how it ended, go through `results`."""
    os.setpgrp()
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # ended with the one that started it
    with (out / "gpu.log").open("ab", buffering=0) as log:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(log.fileno(), stream.fileno())
    print(f"\n===== {module}", flush=True)
    work = Work(smoke, out, before, time.monotonic() + limit, results.send)
    status, reason = "done", ""
    try:
        importlib.import_module(module).run(work)
    except NotHereError as error:
        status, reason = "skipped", str(error)
    except TimeUpError as error:
        status, reason = "stopped", str(error)
    except UnitsFailedError as error:
        status, reason = "failed", str(error)
    except BaseException as error:  # noqa: BLE001 - it ends here, and what it was is the result
        status, reason = "failed", f"{type(error).__name__}: {error}\n{last_lines()}"
        print(reason, file=sys.stderr, flush=True)
    results.send({"status": status, "reason": reason})
    results.close()


def end_group(process: Any) -> None:
    """End a part's process with all that it started; it is given a moment to end by itself."""
    process.join(3)
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        process.join(3)


if __name__ == "__main__":
    sys.exit(main())
