#!/usr/bin/env bash
# Everything that only a CUDA GPU can show, in one call of at most 490 s: benchmarks/gpu.sh --help.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
if [ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ]; then
  python=.venv/bin/python
fi
export PYTHONPATH="$PWD:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -c 'import sys, gpu_plan; sys.exit(gpu_plan.main())' "$@"
