#!/usr/bin/env bash
# Checks a GPU from a clone, with python3 and PyTorch: scripts/gpu_check.sh [options of `bloomery doctor --gpu-check`]
# Prints what else is missing and how to install it. PYTHON names another interpreter.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}"
python=${PYTHON:-python3}
"$python" "$root/scripts/missing_packages.py"
exec "$python" -m bloomery doctor --gpu-check "$@"
