#!/usr/bin/env bash
# Everything that only a CUDA GPU can show, in one call of at most 490 s: benchmarks/gpu.sh --help.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
if [ -z "${PYTHON:-}" ] && [ -x .venv/bin/python ]; then
  python=.venv/bin/python
fi
# What a machine usually lacks that has torch, transformers and their company: of rmcore and of TRL.
lacking='pydantic|pydantic-core|annotated-types|typing-inspection|typing-extensions|psutil|pyyaml|jinja2|markupsafe'
lacking="$lacking|trl|datasets|dill|multiprocess|xxhash"
if [ "${1:-}" = --fetch-wheels ]; then
  platforms=$(printf -- '--platform manylinux%s_x86_64 ' _2_28 _2_27 _2_24 _2_17 _2_5 2014 1)
  # shellcheck disable=SC2046,SC2086 - a word each
  exec "$python" -m pip download --no-deps --only-binary :all: --implementation cp --python-version 3.12 $platforms \
    --dest .wheels $(grep -oE "^($lacking)==[^ ;]+" constraints.txt)
fi
export PYTHONPATH="$PWD:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}"
if compgen -G '.wheels/*.whl' >/dev/null; then
  site=$(mktemp -d)
  trap 'rm -rf "$site"' EXIT
  "$python" -m pip install --no-index --no-deps --quiet --root-user-action=ignore --target "$site" .wheels/*.whl
  PYTHONPATH="$site:$PYTHONPATH"
fi
"$python" -c 'import sys, gpu_plan; sys.exit(gpu_plan.main())' "$@"
