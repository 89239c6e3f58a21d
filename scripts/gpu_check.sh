#!/usr/bin/env bash
# Checks a machine with a GPU in under 9 minutes: scripts/gpu_check.sh [--tiny] [--only PART,PART] [RESULT.json]
# Needs python3 with PyTorch; prints what else is missing and how to install it. PYTHON names another interpreter.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" "$root/benchmarks/gpu_check.py" "$@"
