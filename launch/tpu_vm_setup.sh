#!/usr/bin/env bash
# Makes a TPU VM ready for dspec: Python 3.11 (its images have 3.10) in a virtual environment, with JAX for TPU and
# this checkout of dspec. May be run again at any time; what is there stays.
#
#   bash dspec/launch/tpu_vm_setup.sh && ~/dspec_env/bin/python -m dspec.main --config=...
#
#   --venv=FOLDER  default: ~/dspec_env
#   --dry_run      print the commands, run none

set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/common.sh
source "$repository/launch/common.sh"

venv=$HOME/dspec_env
parse venv '' "$@"
((${#flags[@]} == 0)) || die "${flags[0]}: takes no flags of dspec.main"

has() {  # In a dry run nothing is there.
  [[ ! $dry_run ]] && "$@" >/dev/null 2>&1
}

# uv brings its own Python where the system has none: no administrator, no lock of the package manager.
has python3 -m uv --version || run python3 -m pip install --quiet --user uv
has "$venv/bin/python" --version || run python3 -m uv venv --python=3.11 "$venv"
run python3 -m uv pip install --quiet --python="$venv/bin/python" 'jax[tpu]' --editable="$repository"
run "$venv/bin/python" -c \
  'import sys, jax, libtpu, dspec; print("Python", sys.version.split()[0], "JAX", jax.__version__)'
