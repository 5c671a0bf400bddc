# Sourced by quickstart.sh and test.sh: makes .venv with the pinned versions, and activates it.
# PYTHON=python3.12 chooses another interpreter (3.11 or newer).

# make_environment EXTRAS: installs once for these extras and these pins.
make_environment() {
  local python=${PYTHON:-python3} extras=$1 pins stamp
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "distiller needs Python 3.11 or newer; '$python' is $("$python" --version 2>&1). Set PYTHON=python3.12, say." >&2
    exit 2
  fi
  pins=$(cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
  stamp=.venv/distiller-$extras-$pins
  if [[ ! -e $stamp ]]; then
    echo "Setting up .venv for $extras (once; a few minutes) ..."
    [[ -x .venv/bin/python ]] || "$python" -m venv .venv
    local pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt)
    # torch first: DeepSpeed looks for it while it is built.
    "${pip[@]}" torch
    "${pip[@]}" -e ".[$extras]"
    touch "$stamp"
  fi
  source .venv/bin/activate
}
