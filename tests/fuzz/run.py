"""`make fuzz`: wrong files by the thousand against what is here; minutes, seeded, not in the tests.

    python tests/fuzz/run.py [--seed 0] [--only data] [--count 500] [--first 0] [--keep build/fuzz]

Each case is drawn from (kind, seed, number) alone; of the faults of `make faults`, each number is one. It may be
refused, by an error of ours with a sentence, or give what is right; a finding is any other exception, a case of over a
minute, or a silent difference, as the module of each kind defines it. A table is printed; the files of each finding are
kept, with the command that repeats it.
"""

import argparse
import contextlib
import importlib
import logging
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KINDS = {"data": "data_files", "faults": "faults"}
"""The module of each kind: `DEFAULT_COUNT`, and `one(draw, place)`, which says how a case ended."""
LIMIT_S = 60.0
FINDINGS = ("traceback", "hang", "silent")
COLUMNS = ("cases", "same", "subset", "refused", *FINDINGS, "slowest")
Outcome = tuple[str, str, float]
"""How a case ended (one of `COLUMNS`), what is to be said of it, its seconds."""


def main() -> int:
    """Fuzz what was chosen; 1 where there is a finding."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=list(KINDS), help="one kind; default: all")
    parser.add_argument("--count", type=int, help="cases of each kind; default: as many as the kind says")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--keep", type=Path, default=ROOT / "build" / "fuzz", help="where files of findings go")
    chosen = parser.parse_args()
    # The folder of this file is not on the path where PYTHONSAFEPATH is set, as it is in every process of a home.
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "tests" / "fuzz")]
    kinds = [chosen.only] if chosen.only else list(KINDS)
    if "faults" in kinds:
        importlib.import_module(KINDS["faults"]).preload()
    num_findings = 0
    print(f"{'kind':<12}" + "".join(f"{name:>11}" for name in COLUMNS))
    for kind in kinds:
        found = _fuzz(kind, chosen)
        for sentence in found:
            print(f"  {sentence}")
        num_findings += len(found)
    print(f"{num_findings} findings")
    return int(num_findings > 0)


def _fuzz(kind: str, chosen: argparse.Namespace) -> list[str]:
    """Print a kind's line of the table; give its findings."""
    all_of_them = importlib.import_module(KINDS[kind]).DEFAULT_COUNT
    count = chosen.count or all_of_them
    outcomes, findings, slowest = Counter[str](), list[str](), 0.0
    with tempfile.TemporaryDirectory(prefix="rm-opt-fuzz-") as scratch:
        for number, (outcome, said, seconds) in _outcomes(kind, chosen.seed, chosen.first, count, Path(scratch)):
            outcomes[outcome] += 1
            slowest = max(slowest, seconds)
            if outcome in FINDINGS:
                kept = chosen.keep / f"{kind}-{chosen.seed}-{number}"
                shutil.rmtree(kept, ignore_errors=True)
                shutil.copytree(Path(scratch) / str(number), kept, symlinks=True)
                (kept / "finding.txt").write_text(said, encoding="utf-8")
                again = f"--only {kind} --seed {chosen.seed} --first {number} --count 1"
                findings.append(f"{outcome}: {said.strip().splitlines()[-1][:300]}\n    {kept}; again: {again}")
            shutil.rmtree(Path(scratch) / str(number))
    counts = "".join(f"{outcomes[name]:>11}" for name in COLUMNS[1:-1])
    print(f"{kind:<12}{count:>11}{counts}{slowest:>9.1f} s")
    return findings


def _outcomes(kind: str, seed: int, first: int, count: int, scratch: Path) -> Iterator[tuple[int, Outcome]]:
    """Each case's outcome. They run in one process, which is replaced where a case hangs or ends it."""
    context, number = multiprocessing.get_context("fork"), first
    while number < first + count:
        receiving, sending = context.Pipe(duplex=False)
        worker = context.Process(target=_work, args=(kind, seed, range(number, first + count), scratch, sending))
        worker.start()
        sending.close()
        receiving.recv()
        try:
            while number < first + count:
                if not receiving.poll(LIMIT_S):
                    yield number, ("hang", f"{kind} {number} was not over after {LIMIT_S:.0f} s", LIMIT_S)
                    break
                try:
                    yield number, receiving.recv()
                except EOFError:
                    worker.join()
                    yield number, ("traceback", f"the process ended with {worker.exitcode}", 0.0)
                    break
                number += 1
        finally:
            worker.kill()
            worker.join()
        number += 1


def _work(kind: str, seed: int, numbers: range, scratch: Path, sending: Connection) -> None:
    logging.disable()
    module, silent = importlib.import_module(KINDS[kind]), importlib.import_module("data_files").SilentDifference
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what libraries warn of: a finding is told by its own line
    (scratch / "first").mkdir(exist_ok=True)
    with contextlib.suppress(Exception):  # imports, and what all cases begin with: not the time of a case
        module.one(_draw(kind, seed, -1), scratch / "first")
    sending.send(None)
    for number in numbers:
        place, began = scratch / str(number), time.monotonic()
        place.mkdir(exist_ok=True)
        try:
            outcome, said = module.one(_draw(kind, seed, number), place), ""
        except silent as difference:
            outcome, said = "silent", str(difference)
        except Exception:  # noqa: BLE001 - whatever it is, it is a finding
            outcome, said = "traceback", traceback.format_exc()
        sending.send((outcome, said, time.monotonic() - began))


def _draw(kind: str, seed: int, number: int) -> random.Random:
    return random.Random(f"{kind} {seed} {number}")  # noqa: S311 - to be repeated


if __name__ == "__main__":
    sys.exit(main())
