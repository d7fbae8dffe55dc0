"""Apply small wrong changes one at a time to a copy of the tree and see whether the suite notices.

    make mutants
    python tests/mutants/run.py --only no_lock_around_a_stage

A line says of each which test noticed it, that none did, or that its tests did not end within its limit.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BASELINE_SECONDS = 3600.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}
# Profile: as tests/conftest.py has it, but the first example that fails is enough: to find the smallest takes minutes.
PROGRAM = """
import sys, pytest, rmcore
from hypothesis import Phase, settings
from pathlib import Path
assert Path(rmcore.__file__).is_relative_to(Path.cwd()), "the copy is not imported, so no change could be noticed"
settings.register_profile("mutants", deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
options = ["-q", "--tb=no", "-p", "no:cacheprovider", "--hypothesis-profile", "mutants"]
sys.exit(pytest.main([*options, *sys.argv[1:]]))
"""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One wrong change: `old`, which occurs exactly once in `file`, becomes `new`; one of `tests` must fail then."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str
    seconds: float = 600.0
    """Longest that its tests may take."""

    def problem(self) -> str | None:
        """Why it cannot be applied; None where it can."""
        path = ROOT / self.file
        found = path.read_text().count(self.old) if path.is_file() else 0
        if found != 1:
            return f"its text occurs {found} times in {self.file}, not once: renew it in mutants.toml: {self.old!r}"
        if absent := [test for test in self.tests if not has_test(test)]:
            return f"the tests {', '.join(absent)} are not there: name those that notice it now in mutants.toml"
        return None


def has_test(test: str) -> bool:
    file, _, name = test.partition("::")
    path = ROOT / file
    return path.is_file() and (not name or re.search(rf"def {name.split('[')[0]}\(", path.read_text()) is not None)


@dataclass(frozen=True, slots=True)
class Result:
    """What the tests said about one mutant."""

    name: str
    outcome: str  # killed, timed out, survived, or error: the tests could not be run, or fail without the mutant too
    by: str  # the first test that failed, or what was said


def read_mutants() -> list[Mutant]:
    """Every mutant of the list; SystemExit on a name given twice."""
    lists = [HERE / "mutants.toml", *sorted(ROOT.glob("tests/rmcore/*/mutants.toml"))]
    entries = [entry for file in lists for entry in tomllib.loads(file.read_text())["mutant"]]
    mutants = [Mutant(**entry | {"tests": tuple(entry["tests"])}) for entry in entries]
    twice = [name for name, count in Counter(mutant.name for mutant in mutants).items() if count > 1]
    if twice:
        raise SystemExit(f"mutants named twice: {', '.join(twice)}. Give each a name of its own.")
    return mutants


@contextmanager
def copy_of_tree() -> Iterator[Path]:
    """A copy of the files that git tracks, as they are now; the environments are linked."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as scratch:
        copy = Path(scratch).resolve() / "copy"
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
        for environment in ROOT.glob(".venv*"):
            (copy / environment.name).symlink_to(environment.resolve())
        yield copy


def run_tests(copy: Path, arguments: Sequence[str], seconds: float) -> tuple[str, str]:
    """Run pytest in a copy: (passed, failed, timed out or error; what failed or was said)."""
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(copy)}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments], cwd=copy, env=environment, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            for child in psutil.Process(process.pid).children(recursive=True):  # servers in sessions of their own, too
                with suppress(psutil.NoSuchProcess):
                    child.kill()
            return "timed out", f"after {seconds:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        said = output.read()
    failed = re.findall(r"^(?:FAILED|ERROR) ([^\[\s]+)", said, flags=re.MULTILINE)
    if process.returncode in (1, 2) and failed:  # 2: a module could not even be imported
        return "failed", " ".join(dict.fromkeys(failed))
    if process.returncode == 0 and re.search(r"\b[1-9]\d* passed", said):
        return "passed", ""
    return "error", said.strip()[-300:]


def judge(mutant: Mutant) -> Result:
    """Run the tests of one mutant in a copy of its own."""
    if problem := mutant.problem():
        return Result(mutant.name, "error", problem)
    with copy_of_tree() as copy:
        changed = copy / mutant.file
        changed.write_text(changed.read_text().replace(mutant.old, mutant.new))
        outcome, by = run_tests(copy, ["-x", *mutant.tests], mutant.seconds)
    result = Result(mutant.name, {"passed": "survived", "failed": "killed"}.get(outcome, outcome), by)
    print(f"{result.outcome:10} {result.name:32} {result.by}", flush=True)
    return result


def without_mutants(results: Sequence[Result]) -> list[Result]:
    """The results, of which those are errors whose killer fails without the mutant too; each killer is run once."""
    killers = {test for result in results if result.outcome == "killed" for test in result.by.split()}
    print(f"{len(killers)} tests that noticed a mutant are run without any", flush=True)
    with copy_of_tree() as copy:
        outcome, failed = run_tests(copy, sorted(killers), BASELINE_SECONDS) if killers else ("passed", "")
    guilty = {"passed": set(), "failed": set(failed.split())}.get(outcome, killers)
    return [
        replace(result, outcome="error", by=f"{result.by}: {outcome} without the mutant too")
        if result.outcome == "killed" and guilty & set(result.by.split())
        else result
        for result in results
    ]


def main() -> int:
    """Run the mutants; 0 where at least 95 % of them are killed and nothing is wrong with the list."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", action="append", metavar="NAME", help="this mutant; may be repeated")
    parser.add_argument("--jobs", type=int, default=1, help="mutants that run side by side")
    options = parser.parse_args()
    mutants = read_mutants()
    if unknown := set(options.only or ()) - {mutant.name for mutant in mutants}:
        raise SystemExit(f"no mutant is named {', '.join(sorted(unknown))}; mutants.toml has the names.")
    mutants = [mutant for mutant in mutants if not options.only or mutant.name in options.only]
    with ThreadPoolExecutor(options.jobs) as pool:
        results = without_mutants(list(pool.map(judge, mutants)))
    counts = Counter(result.outcome for result in results)
    print(f"{counts['killed']} of {len(results)} killed ({counts['killed'] / len(results):.0%}): {dict(counts)}")
    for result in results:
        if result.outcome != "killed":
            print(f"{result.outcome}: {result.name}: {result.by or 'no named test fails; write one that does'}")
    return 0 if counts["killed"] >= 0.95 * len(results) and not counts["error"] else 1


if __name__ == "__main__":
    sys.exit(main())
