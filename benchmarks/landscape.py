"""What curvature costs: products with the Hessian, its largest eigenvalues against three peers, and the pair spectrum.

    python benchmarks/landscape.py --part products --model tiny --out cells
    PYTHONPATH=<where the peers are> python benchmarks/landscape.py --part eigenvalues --model tiny --out cells
    python benchmarks/landscape.py --part gram --model minilm --pairs 512 --out cells

Real AlpacaEval pairs of RM_OPT_DATA, 128 tokens a side, drawn at random; a model after a few plain training steps
(--train-steps) on other pairs, which are the same weights on all sides. Every side is a process of its own. What a side
measured is a JSON file in --out; an interrupted run continues, and a side is measured again once its file is deleted.

products      Seconds of a product over seconds of one gradient of the same mean loss: medians, in turns, after a first
              round that is not counted; of eight vectors at once one call, which is a mean in itself. CPU: the same
              ratio in seconds of CPU, which says more where other programs run too. Memory: most bytes of tensors alive
              at once, a kept graph among them, in a run of its own that is not timed.
eigenvalues   The five largest in magnitude, each vector with ||H v - theta v|| <= 1 % of |theta| as judged by our
              product, theta = v.Hv. A side's seconds and products are those of its smallest budget that reaches it:
              Lanczos steps (this library, hessian-eigenthings), ARPACK's tolerance (curvlinops), the residual at which
              power iteration continues to the next vector (PyHessian; its own rule would need a guess). Finding the
              budget is not counted. A side that is not done within --limit seconds is stopped. Memory is what the
              process grew by, on a GPU the most that was allocated.
gram          Seconds and the process's peak memory of the exact Gauss-Newton spectrum.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from landscape_sides import SIDES, TOLERANCE, LimitReachedError, Products, fewest_steps, judge
from landscape_subject import MODELS, Subject, mean_loss, prepare
from landscape_tables import TABLES
from throughput_sides import machine
from torch import Tensor

from rmcore.core.files import write_json
from rmcore.landscape.gram import gauss_newton_spectrum
from rmcore.landscape.operators import LossGaussNewton, LossHessian, PairCurvature
from rmcore.training.peak_memory import TensorPeak

KINDS: dict[str, type[PairCurvature]] = {"Hessian": LossHessian, "Gauss-Newton": LossGaussNewton}
MANY = 8
"""Vectors of one call."""
PEERS = {"PyHessian": "PyHessian", "curvlinops": "curvlinops-for-pytorch", "hessian-eigenthings": "hessian-eigenthings"}


@dataclass(frozen=True)
class Cell:
    """One measurement: everything that its result depends on."""

    part: str
    side: str
    model: str
    pairs: int
    max_seq_len: int
    train_steps: int
    repeats: int
    limit: float
    memory_gib: float
    threads: int
    fewest_steps: int = 0
    """Lanczos steps that suffice, from a search that all sides share."""

    def file(self, out: Path) -> Path:
        """Where what was measured is kept."""
        side = self.side.replace(",", "").replace(" ", "-")
        return out / f"{self.part}-{self.name}-{self.threads}-{side}.json"

    @property
    def name(self) -> str:
        """Of what is measured, whatever is measured of it."""
        return f"{self.model}-{self.pairs}-{self.max_seq_len}-{self.train_steps}"


def timed(call: Callable[[], Any]) -> tuple[Any, list[float]]:
    """The result of `call`, and its seconds by the clock and of CPU, all threads."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else bool
    synchronize()
    clock, cpu = time.perf_counter(), time.process_time()
    result = call()
    synchronize()
    return result, [time.perf_counter() - clock, time.process_time() - cpu]


class Growth:
    """What the process, or what is allocated on the GPU, grew by at its peak."""

    def __init__(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # the resident peak begins anew
            self.before = _status_bytes("VmRSS")

    @property
    def num_bytes(self) -> int:
        """So far."""
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _status_bytes("VmHWM")
        return peak - self.before


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def measure_products(cell: Cell, subject: Subject) -> dict[str, Any]:
    """Gradients and products in turns; then the peak memory of each, alone."""
    kind, rm, rows = KINDS[cell.side], subject.rm, subject.rows
    batches = [subject.batch]
    by_keep = {keep: kind(rm, batches, keep_graphs=keep) for keep in (True, False)}
    vectors = torch.randn(MANY, by_keep[True].num_parameters, device=rm.device)

    def training_gradient() -> tuple[Tensor, ...]:
        rm.model.eval()
        return torch.autograd.grad(mean_loss(rm.model, rows), by_keep[True].parameters)

    calls: dict[str, Callable[[], Any]] = {
        "gradient": by_keep[True].gradient,
        "gradient, training's attention kernel": training_gradient,
    }
    peaks = {"gradient": _peak(kind(rm, batches).gradient)}
    for keep, name in ((True, "graph kept"), (False, "graph built anew")):
        for count in (1, MANY):
            calls[f"{name}, {count}"] = _products_of(by_keep[keep], vectors[:count])
    seconds: dict[str, list[list[float]]] = {name: [] for name in calls}
    for repeat in range(cell.repeats + 1):
        for name, call in calls.items():
            if repeat == 1 or not name.endswith(f", {MANY}"):
                seconds[name].append(timed(call)[1])
    by_keep[True].release()
    for keep, name in ((True, "graph kept"), (False, "graph built anew")):
        for count in (1, MANY):
            peaks[f"{name}, {count}"] = _peak(_products_of(kind(rm, batches, keep_graphs=keep), vectors[:count]))
    timings = {name: times if name.endswith(f", {MANY}") else times[1:] for name, times in seconds.items()}
    return {"seconds": timings, "peak_bytes": peaks}


def _products_of(operator: PairCurvature, vectors: Tensor) -> Callable[[], Tensor]:
    return lambda: operator.products(vectors)


def _peak(call: Callable[[], Any]) -> int:
    with TensorPeak() as peak:
        call()
    return peak.num_bytes


def measure_eigenvalues(cell: Cell, subject: Subject) -> dict[str, Any]:
    """The smallest budget that reaches 1 %, its seconds, products and memory."""
    solve, budgets = SIDES[cell.side]
    found: dict[str, Any] = {"tried": []}
    for budget in budgets(cell.fewest_steps):
        products, growth = Products(cell.limit), Growth()
        try:
            vectors, seconds = timed(lambda: solve(subject, products, budget))  # noqa: B023 - called here
        except LimitReachedError:
            return found | {"limit": cell.limit, "num_products": products.count}
        except NotImplementedError as error:
            return found | {"refused": str(error).splitlines()[0]}
        num_bytes = growth.num_bytes
        values, residuals = judge(subject, vectors)
        found["tried"].append([budget, seconds[0], products.count, max(residuals)])
        if max(residuals) <= TOLERANCE:
            found |= {"budget": budget, "num_products": products.count, "peak_bytes": num_bytes}
            again = [timed(lambda: solve(subject, Products(math.inf), budget))[1] for _ in range(cell.repeats - 1)]  # noqa: B023
            return found | {"values": values, "residuals": residuals, "seconds": [seconds, *again]}
    return found


def measure_gram(cell: Cell, subject: Subject) -> dict[str, Any]:
    """The exact Gauss-Newton spectrum, once."""
    growth, room = Growth(), int(cell.memory_gib * 2**30)
    sample = subject.sample

    def spectrum() -> Any:
        return gauss_newton_spectrum(
            subject.rm, sample.batches, prompts=sample.batch_prompts, memory_bytes=room, report=_report
        )

    found, seconds = timed(spectrum)
    on_gpu = torch.cuda.is_available()
    return {
        "seconds": seconds[0],
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else growth.before + growth.num_bytes,
        "num_gradients": found.num_gradients,
        "lambda_max": [found.lambda_max, found.lambda_max_ci_low, found.lambda_max_ci_high],
        "effective_rank": [found.effective_rank, found.effective_rank_ci_low, found.effective_rank_ci_high],
        "trace": [found.trace, found.trace_ci_low, found.trace_ci_high],
    }


def _report(done: int, total: int, _: str) -> None:
    if done % 64 == 0:
        print(f"{done} of {total} gradients", file=sys.stderr, flush=True)


PARTS: dict[str, tuple[Callable[[Cell, Subject], dict[str, Any]], tuple[str, ...]]] = {
    "products": (measure_products, tuple(KINDS)),
    "eigenvalues": (measure_eigenvalues, tuple(SIDES)),
    "gram": (measure_gram, ("rm-opt",)),
}


def search(cell: Cell, out: Path) -> int:
    """Lanczos steps that suffice; in a process of its own, because what it frees would stay resident."""
    torch.set_num_threads(cell.threads)
    return fewest_steps(prepare(cell.model, cell.pairs, cell.max_seq_len, cell.train_steps, out))


def run_cell(cell: Cell, out: Path) -> dict[str, Any]:
    """Measure one cell; to be called in a process of its own."""
    torch.set_num_threads(cell.threads)
    subject = prepare(cell.model, cell.pairs, cell.max_seq_len, cell.train_steps, out)
    seen = PARTS[cell.part][0](cell, subject)
    size = sum(p.numel() for p in subject.rm.model.parameters())
    return {"cell": asdict(cell), "machine": machine(cell.threads), "num_parameters": size, "peers": _peers()} | seen


def _peers() -> str:
    found = []
    for name, package in PEERS.items():
        try:
            found.append(f"{name} {version(package)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def _apart(call: Callable[[Cell, Path], Any], cell: Cell, out: Path) -> Any:
    """The result of `call` in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(call, cell, out).result()


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--sides", nargs="+", help="left out: all of the part")
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--max-seq-len", type=int, default=128, help="tokens a side")
    parser.add_argument("--train-steps", type=int, default=30, help="steps before, of 16 pairs; 0: at initialisation")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=300, help="seconds that one try of one side may take")
    parser.add_argument("--memory-gib", type=float, default=5, help="for the margin gradients of --part gram")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    given = parser.parse_args()
    sides = given.sides or PARTS[given.part][1]
    if unknown := set(sides) - set(PARTS[given.part][1]):
        parser.error(f"--sides {unknown} is none of {', '.join(PARTS[given.part][1])}")
    os.environ.update(OMP_NUM_THREADS=str(given.threads), TOKENIZERS_PARALLELISM="false")
    given.out.mkdir(parents=True, exist_ok=True)
    settings = {name: value for name, value in vars(given).items() if name not in ("sides", "out")}
    if given.part == "eigenvalues":
        shared = Cell(side="", **settings)
        file = given.out / f"steps-{shared.name}.json"
        if not file.is_file():
            write_json(file, _apart(search, shared, given.out))
        settings["fewest_steps"] = json.loads(file.read_text())
    for cell in [Cell(side=side, **settings) for side in sides]:
        file = cell.file(given.out)
        if not file.is_file() or json.loads(file.read_text())["cell"] != asdict(cell):
            write_json(file, _apart(run_cell, cell, given.out))
            print(f"{cell.part} {cell.side}: measured", file=sys.stderr, flush=True)
    # What was measured before with other sides is a row of the same table.
    every = [Cell(side=side, **settings).file(given.out) for side in PARTS[given.part][1]]
    records = [json.loads(file.read_text()) for file in every if file.is_file()]
    print(
        f"\n{given.model}, {records[0]['num_parameters']:,} parameters, {given.pairs} pairs of at most "
        f"{given.max_seq_len} tokens a side, after {given.train_steps} training steps.\n"
        f"{records[0]['machine']}, {records[0]['peers']}\n"
    )
    print("\n".join(TABLES[given.part](records)), flush=True)


if __name__ == "__main__":
    main()
