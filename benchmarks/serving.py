"""What a reward server costs: PyTorch's own batched scorer, bare vLLM, and vLLM behind the HTTP app, in one run.

    python benchmarks/serving.py --checkpoint CHECKPOINT --out cells

The same rows (real AlpacaEval sides of RM_OPT_DATA) in the same order on all sides, which take turns. `bare vLLM` is
the very process that the HTTP app speaks to, asked over its own socket with the same token ids by the same HTTP
library; so the difference is the HTTP app. A side's first round is not counted.

rows/s     rows over seconds of a round, --concurrency requests of --batch rows in flight: median of rounds, range.
p50, p99   milliseconds of one request, over all rounds.
single     requests of one row, one at a time and --concurrency at a time.
updates    publications of all weights, one after the other, while rows are asked for: seconds from the call to the
           answer (writing, checking, loading, verifying), and the longest that a request took meanwhile.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import httpx
import psutil

from rmcore.data.readers.sources import load_pairs
from rmcore.models.reward_model import BradleyTerryRM
from rmcore.serving.server import RewardServer, ServeSettings
from rmcore.serving.weight_sync import create_rm_publisher

Rows = Sequence[Sequence[int]]
Ask = Callable[[Rows], Awaitable[None]]


def load_rows(rm: BradleyTerryRM, num_rows: int) -> list[list[int]]:
    """Token ids of so many sides, in the order of the file."""
    source = str(Path(os.environ["RM_OPT_DATA"]) / "alpacaeval_test.parquet")
    pairs = load_pairs(source, limit=num_rows // 2).pairs
    return [side.ids for pair in rm.renderer.tokenize_pairs(pairs) for side in (pair.chosen, pair.rejected)]


async def round_of(ask: Ask, rows: Rows, batch: int, concurrency: int) -> tuple[float, list[float]]:
    """Seconds of all rows in batches, and of each request."""
    batches = iter([rows[start : start + batch] for start in range(0, len(rows), batch)])
    took: list[float] = []

    async def work() -> None:
        for part in batches:
            started = time.perf_counter()
            await ask(part)
            took.append(time.perf_counter() - started)

    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    return time.perf_counter() - started, took


def bare_vllm(server: RewardServer) -> tuple[httpx.AsyncClient, Ask]:
    """The vLLM behind the HTTP app, at its own socket."""
    for process in psutil.Process(server.pid).children(recursive=True):
        command = process.cmdline()
        if "--uds" in command:
            socket = command[command.index("--uds") + 1]
    session = httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=socket), base_url="http://vllm", timeout=600)

    async def ask(rows: Rows) -> None:
        body = {"model": "reward", "input": [list(row) for row in rows], "use_activation": False}
        answer = await session.post("/classify", json=body)
        assert len(answer.json()["data"]) == len(rows)

    return session, ask


def http_app(server: RewardServer) -> tuple[httpx.AsyncClient, Ask]:
    """The same rows through the HTTP app."""
    headers = {"Authorization": f"Bearer {server.token}"}
    session = httpx.AsyncClient(base_url=server.address, headers=headers, timeout=600)

    async def ask(rows: Rows) -> None:
        answer = await session.post("/score", json={"inputs": [list(row) for row in rows]})
        assert len(answer.json()["rewards"]) == len(rows)

    return session, ask


async def measure(server: RewardServer, rows: Rows, args: argparse.Namespace) -> list[dict[str, object]]:
    """One record a side and setting."""
    opened = {"bare vLLM": bare_vllm(server), "HTTP app": http_app(server)}
    settings = [(args.batch, args.concurrency), (1, 1), (1, args.concurrency)]
    found: dict[tuple[str, int, int], list[tuple[float, list[float]]]] = {}
    for number in range(args.rounds + 1):
        for batch, concurrency in settings:
            part = rows if batch > 1 else rows[: args.single_rows]
            for side, (_, ask) in opened.items():
                result = await round_of(ask, part, batch, concurrency)
                if number:
                    found.setdefault((side, batch, concurrency), []).append(result)
    for session, _ in opened.values():
        await session.aclose()
    records = []
    for (side, batch, concurrency), rounds in found.items():
        num_rows = len(rows) if batch > 1 else args.single_rows
        speeds = sorted(num_rows / seconds for seconds, _ in rounds)
        took = sorted(1000 * second for _, each in rounds for second in each)
        records.append(
            {
                "side": side, "batch": batch, "concurrency": concurrency, "rows_per_s": statistics.median(speeds),
                "low": speeds[0], "high": speeds[-1], "p50_ms": took[len(took) // 2],
                "p99_ms": took[min(len(took) - 1, int(0.99 * len(took)))],
            }
        )  # fmt: skip
    return records


def measure_torch(rm: BradleyTerryRM, rows: Rows, rounds: int) -> dict[str, object]:
    """PyTorch's own scorer, which sorts and packs all rows as it likes."""
    from rmcore.data.rendering import TokenizedSide

    sides = [TokenizedSide(list(row), 0) for row in rows]
    speeds = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        rm.score_sides(sides)
        speeds.append(len(rows) / (time.perf_counter() - started))
    counted = sorted(speeds[1:])
    return {"side": "PyTorch", "rows_per_s": statistics.median(counted), "low": counted[0], "high": counted[-1]}


async def measure_updates(server: RewardServer, rm: BradleyTerryRM, rows: Rows, number: int) -> dict[str, object]:
    """Publish while rows are asked for."""
    publisher = create_rm_publisher(server.address, token=server.token)
    session, ask = http_app(server)
    took, waits, done = [], [], asyncio.Event()

    async def load() -> None:
        while not done.is_set():
            started = time.perf_counter()
            await ask(rows[:8])
            waits.append(time.perf_counter() - started)

    loads = [asyncio.create_task(load()) for _ in range(4)]
    for _ in range(number):
        started = time.perf_counter()
        await asyncio.to_thread(publisher.publish, rm)
        took.append(time.perf_counter() - started)
    done.set()
    await asyncio.gather(*loads)
    await session.aclose()
    return {
        "side": "updates", "number": number, "seconds": statistics.median(took), "longest_s": max(took),
        "longest_request_s": max(waits), "requests_meanwhile": len(waits),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--single-rows", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=10)
    args = parser.parse_args()
    rm = BradleyTerryRM.from_pretrained(args.checkpoint, device="cpu")
    rows = load_rows(rm, args.rows)
    records: list[dict[str, object]] = [measure_torch(rm, rows, args.rounds)]
    started = time.perf_counter()
    with RewardServer(ServeSettings(args.checkpoint, port=0)) as server:
        records.append({"side": "start", "seconds": time.perf_counter() - started})
        records += asyncio.run(measure(server, rows, args))
        records.append(asyncio.run(measure_updates(server, rm, rows, args.updates)))
    for record in records:
        print({name: round(value, 3) if isinstance(value, float) else value for name, value in record.items()})
    args.out.mkdir(parents=True, exist_ok=True)
    about = {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "model": args.checkpoint,
        "tokens": sum(map(len, rows)),
        "rows": len(rows),
    }
    (args.out / "serving.json").write_text(json.dumps({"about": about, "records": records}, indent=1))


if __name__ == "__main__":
    main()
