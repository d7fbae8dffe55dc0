#!/usr/bin/env bash
# Everything that only a CUDA GPU can show, in one command; what it runs and writes: benchmarks/gpu_run.py --help.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
if [ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ]; then
  python=.venv/bin/python
fi
exec "$python" benchmarks/gpu_run.py "$@"
