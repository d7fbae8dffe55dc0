"""vLLM's server, started by the Python of its own environment: `python -P vllm_start.py PIPE FLAGS`.

It is kept no longer than its starter, who holds the write end of a pipe. However the starter ends, SIGKILL included,
the kernel closes that end, and then the process group ends, in which vLLM's engine is a child of this process. A small
process of that group sees to it: this one ends well on SIGTERM, and an engine that does not would be left.

Each of its processes imports for many seconds, and Python looked for garbage among the imported objects all the while:
a start takes an eighth less of a core without that (29.1 to 25.0 s, vLLM 0.32 on a CPU). It spawns its engine, which
runs the lines above `__main__`, too. This file imports none of our modules, which that environment does not have.
"""

import gc
import os
import runpy
import signal
import sys
import time

ENDING_SECONDS = 10.0
"""Between the request to end and SIGKILL."""


def end_with_starter(pipe: int) -> None:
    """Have this process's group end once the other end of a pipe is closed, by a process that hears no SIGTERM."""
    if os.fork():
        os.close(pipe)
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while os.read(pipe, 64):
        pass
    os.killpg(0, signal.SIGTERM)
    time.sleep(ENDING_SECONDS)
    os.killpg(0, signal.SIGKILL)


if __name__ in ("__main__", "__mp_main__"):
    gc.set_threshold(100_000, 50, 50)
if __name__ == "__main__":
    end_with_starter(int(sys.argv.pop(1)))
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
