# Sourced by the other scripts.
#   enter_venv [extras]        e.g. enter_venv dev
# An active virtual environment is used as it is; otherwise .venv beside the README, made if need
# be. Nothing is installed again until setup.cfg or the constraints change.

enter_venv() {
  local extras=${1:-} python=${PYTHON:-python3}
  if [ -z "${VIRTUAL_ENV:-}" ]; then
    if [ ! -x .venv/bin/python ]; then
      if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "roll_lite needs Python 3.11 or newer and $python is older; set PYTHON" >&2
        exit 1
      fi
      echo "making a virtual environment in .venv"
      "$python" -m venv .venv
    fi
    source .venv/bin/activate
  fi

  local stamp="$VIRTUAL_ENV/.roll_lite-${extras:-base}"
  local wanted other
  wanted=$(cat setup.cfg pyproject.toml scripts/constraints.txt | cksum; pwd)
  if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "installing roll_lite${extras:+[$extras]} (a few minutes the first time)"
    for other in "$VIRTUAL_ENV"/.roll_lite-*; do  # of another folder: what it installed is replaced
      if [ -f "$other" ] && ! grep -qxF "$PWD" "$other"; then rm "$other"; fi
    done
    pip install --quiet --disable-pip-version-check -c scripts/constraints.txt \
      -e ".${extras:+[$extras]}"
    echo "$wanted" > "$stamp"
  fi
}
