#!/usr/bin/env bash
# Sets up .venv and runs the tests that a person runs every time (CPU only). --all adds the slow ones: launches of every
# engine, the built wheel, the documents' commands; --thorough further pairs of those. Other arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
make_environment deepspeed,demo,dev,quantization
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1
# DeepSpeed's operators: no test depends on what another program left in the home folder.
export TORCH_EXTENSIONS_DIR=${TORCH_EXTENSIONS_DIR:-$PWD/.venv/torch_extensions}
unset WANDB_API_KEY
selection=(-m "not slow and not thorough")
if [[ ${1:-} == --all ]]; then
  selection=(-m "not thorough")
  shift
elif [[ ${1:-} == --thorough ]]; then
  selection=()
  shift
fi
ruff format --check distiller scripts tests
ruff check distiller scripts tests
pyright
python -m pytest "${selection[@]}" "$@"
