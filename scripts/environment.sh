# Sourced by quickstart.sh and test.sh: makes .venv with the pinned versions once, and activates it.
# PYTHON=python3.12 chooses another interpreter (3.11 or newer).

make_environment() {
  local python=${PYTHON:-python3} stamp
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "distiller needs Python 3.11 or newer; '$python' is $("$python" --version 2>&1). Set PYTHON=python3.12, say." >&2
    exit 2
  fi
  stamp=.venv/distiller-$(cat pyproject.toml constraints.txt | "$python" -c \
    'import hashlib, sys; print(hashlib.blake2b(sys.stdin.buffer.read(), digest_size=8).hexdigest())')
  if [[ ! -e $stamp ]]; then
    echo "Setting up .venv (once; a few minutes) ..."
    [[ -x .venv/bin/python ]] || "$python" -m venv .venv
    # torch first: DeepSpeed looks for it while it is built.
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[deepspeed,demo,dev]'
    touch "$stamp"
  fi
  source .venv/bin/activate
}
