"""The gate: requests side by side, an exchange alone and never starved, whoever is cancelled meanwhile."""

import asyncio
import random

import pytest

from machine import PATIENCE_S
from rmcore.serving.served import Gate


async def drive(seed: int, cancel: bool) -> list[tuple[int, int]]:
    """Readers and writers in a random order; the number of both inside at each entry."""
    gate, rng, inside, seen = Gate(), random.Random(seed), {"shared": 0, "alone": 0}, []  # noqa: S311

    async def visit(kind: str) -> None:
        await asyncio.sleep(rng.random() / 200)
        async with getattr(gate, kind)():
            inside[kind] += 1
            seen.append((inside["shared"], inside["alone"]))
            try:
                await asyncio.sleep(rng.random() / 200)
            finally:
                inside[kind] -= 1

    tasks = [asyncio.create_task(visit("alone" if rng.random() < 0.2 else "shared")) for _ in range(60)]
    if cancel:
        await asyncio.sleep(0.003)
        for task in rng.sample(tasks, 20):
            task.cancel()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), timeout=PATIENCE_S)
    assert inside == {"shared": 0, "alone": 0}
    async with asyncio.timeout(PATIENCE_S), gate.alone():  # no reader was left inside
        pass
    return seen


@pytest.mark.parametrize("cancel", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_an_exchange_is_alone_and_requests_are_not(seed, cancel):
    seen = asyncio.run(drive(seed, cancel))
    assert all(alone == 0 or (alone, shared) == (1, 0) for shared, alone in seen)
    if not cancel:
        assert len(seen) == 60
        assert max(shared for shared, _ in seen) > 1
