# Sourced by the other scripts: enters a virtual environment with roll_lite installed.
#   source scripts/venv.sh [extras]        e.g. source scripts/venv.sh dev
# An active environment is used as it is; otherwise .venv beside the README, made if need be.
# Nothing is installed again until setup.cfg or the constraints change.

if [ -z "${VIRTUAL_ENV:-}" ]; then
  if [ ! -x .venv/bin/python ]; then
    python=${PYTHON:-python3}
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
      echo "roll_lite needs Python 3.11 or newer; $python is $("$python" --version). Set PYTHON." >&2
      exit 1
    fi
    echo "making a virtual environment in .venv"
    "$python" -m venv .venv
  fi
  source .venv/bin/activate
fi

stamp="$VIRTUAL_ENV/.roll_lite-${1:-base}"
wanted=$(cat setup.cfg pyproject.toml scripts/constraints.txt | cksum; pwd)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
  echo "installing roll_lite${1:+[$1]} (a few minutes the first time)"
  pip install --quiet --disable-pip-version-check -c scripts/constraints.txt -e ".${1:+[$1]}"
  echo "$wanted" > "$stamp"
fi
