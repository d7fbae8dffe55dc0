"""Apply small wrong changes one at a time to a copy of the tree and see whether the suite notices.

    make mutants
    python tests/mutants/run.py --only no_lock_around_a_stage

A line says of each which test noticed it, or that none did.
"""

import argparse
import gc
import multiprocessing
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
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
IMPORTED = """torch torch._dynamo torch.distributed.tensor transformers.modeling_utils peft pandas pyarrow.parquet
    scipy.stats pydantic matplotlib.figure sympy hypothesis anyio.pytest_plugin pytest"""
"""Each test run is forked from a process that has these already: importing them takes most of a short test's time."""
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(IMPORTED.split())
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One wrong change: `old`, which occurs exactly once in `file`, becomes `new`; one of `tests` must fail then."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str
    seconds: int = 600
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
    seconds: float


def read_mutants() -> list[Mutant]:
    """Every mutant of the list; SystemExit on a name given twice."""
    lists = [HERE / "mutants.toml", *sorted(ROOT.glob("tests/rmcore/*/mutants.toml"))]
    entries = [entry for file in lists for entry in tomllib.loads(file.read_text())["mutant"]]
    mutants = [Mutant(**entry | {"tests": tuple(entry["tests"])}) for entry in entries]
    twice = [name for name, count in Counter(mutant.name for mutant in mutants).items() if count > 1]
    if twice:
        raise SystemExit(f"mutants named twice: {', '.join(twice)}. Give each a name of its own.")
    return mutants


def copy_tree(target: Path) -> None:
    """Copy the files that git tracks, as they are now; the environments, which are not tracked, are linked."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    for environment in (".venv", ".venv-vllm"):
        if (ROOT / environment).exists():
            (target / environment).symlink_to((ROOT / environment).resolve())


@contextmanager
def mutated(copy: Path, mutant: Mutant) -> Iterator[None]:
    """The copy with the change in it; put back at the end."""
    path = copy / mutant.file
    text = path.read_text()
    try:
        path.write_text(text.replace(mutant.old, mutant.new))
        _forget_bytecode(path)
        yield
    finally:
        path.write_text(text)
        _forget_bytecode(path)


def _forget_bytecode(path: Path) -> None:
    """Python tells sources apart by size and whole seconds, which a swapped sign changed back at once keeps."""
    for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        stale.unlink()


def run_tests(copy: Path, arguments: Sequence[str], seconds: float) -> tuple[str, str]:
    """Run pytest in a copy: (passed, failed, timed out or error; what failed or was said)."""
    with tempfile.NamedTemporaryFile("r") as output:
        process = FORKS.Process(target=_pytest, args=(copy, arguments, output.name))
        process.start()
        assert process.pid is not None
        process.join(seconds)
        timed_out = process.is_alive()
        _end(process.pid)
        process.join()
        said = output.read()
    if timed_out:
        return "timed out", f"after {seconds} s"
    failed = re.findall(r"^(?:FAILED|ERROR) ([^\[\s]+)", said, flags=re.MULTILINE)
    if process.exitcode in (1, 2) and failed:  # 2: a module could not even be imported
        return "failed", " ".join(dict.fromkeys(failed))
    if process.exitcode == 0 and re.search(r"\b[1-9]\d* passed", said):
        return "passed", ""
    return "error", said.strip()[-300:]


def _pytest(copy: Path, arguments: Sequence[str], output: str) -> None:
    """In a process of its own, which has imported nothing of the project yet."""
    os.setsid()
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)
    sys.path.insert(0, str(copy))
    gc.freeze()  # what was imported before: pytest collects garbage several times, which took a third of a short test
    import pytest
    from hypothesis import Phase, settings

    # As tests/conftest.py has it, but the first example that fails is enough: looking for the smallest takes minutes.
    settings.register_profile("mutants", deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
    options = ["-q", "--tb=no", "-p", "no:cacheprovider", "--hypothesis-profile", "mutants"]
    sys.exit(pytest.main([*options, *arguments]))


def _end(pid: int) -> None:
    """End what is left of a test run: itself, the servers that it started in sessions of their own, its group."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)] if psutil.pid_exists(pid) else []
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def judge(mutant: Mutant, copy: Path) -> Result:
    """Run the tests of one mutant."""
    if problem := mutant.problem():
        return Result(mutant.name, "error", problem, 0.0)
    started = time.monotonic()
    with mutated(copy, mutant):
        outcome, detail = run_tests(copy, ["-x", *mutant.tests], mutant.seconds)
    outcome = {"passed": "survived", "failed": "killed"}.get(outcome, outcome)
    return Result(mutant.name, outcome, detail, round(time.monotonic() - started, 1))


def check_copy_is_imported(copy: Path) -> None:
    """SystemExit where tests would import the code from elsewhere, for then no mutant could be noticed."""
    shown = subprocess.run(
        [sys.executable, "-c", "import rmcore, tasks, flows, experiments as e; print(rmcore.__file__, e.__file__)"],
        cwd=copy.parent, env=os.environ | {"PYTHONPATH": str(copy)}, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    if any(not Path(path).is_relative_to(copy) for path in shown.split()):
        raise SystemExit(f"{sys.executable} imports {shown.strip()}, not the copy in {copy}: no mutant would run.")


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
    os.environ |= ENVIRONMENT  # read at import
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch, ThreadPoolExecutor(options.jobs) as pool:
        copies: queue.Queue[Path] = queue.Queue()
        for number in range(options.jobs):
            copy = Path(scratch).resolve() / f"copy-{number}"
            copy_tree(copy)
            check_copy_is_imported(copy)
            copies.put(copy)

        def run_one(mutant: Mutant) -> Result:
            copy = copies.get()
            try:
                result = judge(mutant, copy)
            finally:
                copies.put(copy)
            print(f"{result.outcome:10} {result.name:32} {result.seconds:6.1f} s  {result.by}", flush=True)
            return result

        done = {result.name: result for result in pool.map(run_one, mutants)}
        done |= {result.name: result for result in innocent(list(done.values()), copies.get())}
    return summarise(list(done.values()))


def innocent(results: Sequence[Result], copy: Path) -> list[Result]:
    """Those of the killed mutants whose killer fails without them too, as errors; every killer is run once."""
    killers = sorted({test for result in results if result.outcome == "killed" for test in result.by.split()})
    print(f"{len(killers)} tests that noticed a mutant are run without any", flush=True)
    outcome, failed = run_tests(copy, killers, BASELINE_SECONDS) if killers else ("passed", "")
    if outcome == "passed":
        return []
    if outcome != "failed":
        raise SystemExit(f"the tests could not be run without a mutant ({outcome}): {failed}")
    guilty = set(failed.split())
    return [
        replace(result, outcome="error", by=f"{result.by} fails without the mutant too")
        for result in results
        if result.outcome == "killed" and guilty & set(result.by.split())
    ]


def summarise(results: Sequence[Result]) -> int:
    """Print the counts and who survived; the exit status."""
    counts = Counter(result.outcome for result in results)
    killed = counts["killed"]
    print(f"{killed} of {len(results)} killed ({killed / len(results):.0%}): {dict(counts)}")
    for result in results:
        if result.outcome != "killed":
            print(f"{result.outcome}: {result.name}: {result.by or 'no named test fails; write one that does'}")
    return 0 if killed >= 0.95 * len(results) and not counts["error"] else 1


if __name__ == "__main__":
    sys.exit(main())
