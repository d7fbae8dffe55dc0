"""vLLM's server, started by the Python of its own environment: `python -P vllm_start.py FLAGS`.

Each of its processes imports for many seconds, and Python looked for garbage among the imported objects all the while:
a start takes an eighth less of a core without that (29.1 to 25.0 s, vLLM 0.32 on a CPU). It spawns its engine, which
runs the lines above `__main__`, too. This file imports none of our modules, which that environment does not have.
"""

import gc
import runpy

if __name__ in ("__main__", "__mp_main__"):
    gc.set_threshold(100_000, 50, 50)
if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
