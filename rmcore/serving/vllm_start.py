"""vLLM's server, started by the Python of its own environment: `python -P vllm_start.py PIPE FLAGS`.

It is kept no longer than its starter, who holds the write end of a pipe. However the starter ends, SIGKILL included,
the kernel closes that end, and then the process group ends, in which vLLM's engine is a child of this process.

Each of its processes imports for many seconds, and Python looked for garbage among the imported objects all the while:
a start takes an eighth less of a core without that (29.1 to 25.0 s, vLLM 0.32 on a CPU). It spawns its engine, which
runs the lines above `__main__`, too. This file imports none of our modules, which that environment does not have.
"""

import gc
import os
import runpy
import signal
import sys
import threading
import time

ENDING_SECONDS = 10.0
"""Between the request to end and SIGKILL."""


def end_with_starter(pipe: int) -> None:
    """Wait until the other end of a pipe is closed, then end the process group that this process leads."""
    while os.read(pipe, 64):
        pass
    os.killpg(0, signal.SIGTERM)
    time.sleep(ENDING_SECONDS)
    os.killpg(0, signal.SIGKILL)


if __name__ in ("__main__", "__mp_main__"):
    gc.set_threshold(100_000, 50, 50)
if __name__ == "__main__":
    threading.Thread(target=end_with_starter, args=(int(sys.argv.pop(1)),), daemon=True).start()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
