"""Work for a GPU, made ready in a thread while the GPU is at the work before."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")
AHEAD = 2
"""Items that are ready, or being made, while another is in use."""


def made_ahead(make: Callable[[Item], Made], items: Iterable[Item]) -> Iterator[Made]:
    """Yield `make` of each item, in their order. One thread makes the next ones; what it raises is raised here."""
    waiting: deque[Future[Made]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as thread:
        try:
            for item in items:
                waiting.append(thread.submit(make, item))
                if len(waiting) > AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:  # the caller has stopped, or one has failed
                future.cancel()
