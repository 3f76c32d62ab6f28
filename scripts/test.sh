#!/usr/bin/env bash
# Lint and test. Makes a virtual environment and installs what it needs.
#   scripts/test.sh                  the fast part: under 8 minutes on two CPU cores
#   scripts/test.sh --all            with the slow tests
#   scripts/test.sh tests/test_x.py  only these (any pytest arguments)
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh
enter_venv dev

selection=(-m "not slow")
if [ "${1:-}" = --all ]; then
  selection=()
  shift
fi
ruff check .
ruff format --check .
python -m pytest "${selection[@]}" "$@"
