#!/usr/bin/env bash
# Lint and test. Makes a virtual environment and installs what it needs.
#   scripts/test.sh smoke            model, engine, batch, losses, a step of rlvr.py: below a minute
#   scripts/test.sh                  the fast part: 5 to 8 minutes on two CPU cores
#   scripts/test.sh --all            with the slow tests: under 30 minutes
#   scripts/test.sh tests/engine     only these (any pytest arguments)
#   scripts/test.sh -n 0 --pdb       in one process, where a debugger and print work
# Two worker processes run the tests, each with one thread for linear algebra; pytest's own
# arguments come last, so -n 4 or -n 0 on the command line wins.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/venv.sh
enter_venv dev

selection=(-m "not slow")
case "${1:-}" in
  --all) selection=(); shift ;;
  smoke)
    selection+=(
      tests/models/test_transformer.py tests/engine/test_engine.py tests/train/test_batch.py
      tests/train/test_losses.py tests/recipes/test_rlvr.py::test_the_parts_of_a_step_add_up
    )
    shift ;;
esac
ruff check .
ruff format --check .
export OMP_NUM_THREADS=1
unset PYTHONDONTWRITEBYTECODE  # a hundred processes would compile the package, and pytest its tests
python -m pytest -n 2 --dist worksteal "${selection[@]}" "$@"
