#!/usr/bin/env bash
# Sets up .venv and runs the tests that a person runs every time (CPU only). --all adds the slow ones: launches of every
# engine, the built wheel, the documents' commands; --thorough further pairs of those. Other arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
make_environment datasets,deepspeed,demo,dev,evaluation,plots,quantization
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
if ! command -v g++ >/dev/null; then
  echo "DeepSpeed compiles its operators with g++, which is not installed; for example: apt-get install g++" >&2
  exit 2
fi
# Here, not within the time limit of the first test that uses one; the environment's own compiler, as DeepSpeed calls it.
DS_ACCELERATOR=cpu python - <<'PY' >/dev/null
from deepspeed.ops.op_builder.cpu.async_io import AsyncIOBuilder
from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder
from deepspeed.ops.op_builder.cpu.cpu_adam import CPUAdamBuilder

from distiller.launch.operator_locks import clear_operator_locks, extension_folder

clear_operator_locks(extension_folder(), patience_s=1)
builders = [ShareMemCommBuilder(), CPUAdamBuilder()]
if AsyncIOBuilder().is_compatible(verbose=False):  # where libaio is; five minutes on two slow cores
    builders.append(AsyncIOBuilder())
for builder in builders:
    builder.load(verbose=False)
PY
ruff format --check distiller scripts tests
ruff check distiller scripts tests
pyright
# Two processes share the files, those of several ranks first; `-n 0` among the arguments, say for --pdb, leaves all to
# one.
python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "${selection[@]}" "$@"
