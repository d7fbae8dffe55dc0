"""`make fuzz`: wrong files by the thousand against what is here; minutes, seeded, not in the tests.

    python tests/fuzz/run.py [--seed 0] [--only data] [--count 500] [--first 0] [--keep build/fuzz]

Each case is drawn from (kind, seed, number) alone; of the faults of `make faults`, each number is one. It may be
refused, by an error of ours with a sentence, or give what is right; a finding is any other exception, or a silent
difference, as the module of each kind defines it. A table is printed; the files of each finding are kept, with the
command that repeats it. A case that takes over two minutes ends the program with its traceback, and its files are kept,
as are those of a case that ends the process.
"""

import argparse
import faulthandler
import importlib
import logging
import os
import random
import shutil
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KINDS = {"data": "data_files", "faults": "faults"}
"""The module of each kind: `default_count()`, and `one(draw, place)`, which says how a case ended."""
LIMIT_S = 120.0
COLUMNS = ("cases", "same", "subset", "refused", "silent", "traceback", "slowest")


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
    logging.disable()
    terminal = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what libraries warn of: a finding is told by its own line
    sys.stderr = os.fdopen(terminal, "w", closefd=False)
    faulthandler.enable(file=terminal)
    num_findings = 0
    print(f"{'kind':<12}" + "".join(f"{name:>11}" for name in COLUMNS))
    for kind in kinds:
        found = _fuzz(kind, chosen, terminal)
        for sentence in found:
            print(f"  {sentence}")
        num_findings += len(found)
    print(f"{num_findings} findings")
    return int(num_findings > 0)


def _fuzz(kind: str, chosen: argparse.Namespace, terminal: int) -> list[str]:
    """Print a kind's line of the table; give its findings."""
    module = importlib.import_module(KINDS[kind])
    most = module.default_count()  # has imported and made what all cases begin with: that is not the time of a case
    count = chosen.count or most
    outcomes, findings, slowest = Counter[str](), list[str](), 0.0
    for number in range(chosen.first, chosen.first + count):
        place, began = chosen.keep.resolve() / f"{kind}-{chosen.seed}" / str(number), time.monotonic()
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        again = f"--only {kind} --seed {chosen.seed} --first {number} --count 1"
        (place / "finding.txt").write_text(f"ended with the program, or took {LIMIT_S} s: {again}\n", encoding="utf-8")
        faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=terminal)
        draw, said = random.Random(f"{kind} {chosen.seed} {number}"), ""  # noqa: S311 - to be repeated
        try:
            outcome = module.one(draw, place)
        except module.SilentDifference as difference:
            outcome, said = "silent", str(difference)
        except Exception:  # noqa: BLE001 - whatever it is, it is a finding
            outcome, said = "traceback", traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        outcomes[outcome] += 1
        slowest = max(slowest, time.monotonic() - began)
        if not said:
            shutil.rmtree(place)
            continue
        (place / "finding.txt").write_text(said, encoding="utf-8")
        findings.append(f"{outcome}: {said.strip().splitlines()[-1][:300]}\n    {place}; again: {again}")
    counts = "".join(f"{outcomes[name]:>11}" for name in COLUMNS[1:-1])
    print(f"{kind:<12}{count:>11}{counts}{slowest:>9.1f} s")
    return findings


if __name__ == "__main__":
    sys.exit(main())
