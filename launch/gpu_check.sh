#!/usr/bin/env bash
# Checks one GPU in under 8 minutes: the tests that need one; then, on the shape of Qwen3-8B with random weights, 50 train
# steps and the decoding of one prompt: tokens/s, MFU, peak memory, and how attention is computed. From any folder:
#
#   pip install -e '.[test]' 'jax[cuda12]' && launch/gpu_check.sh
#
#   --python=FILE  default: python
#   --dry_run      print the commands, run none

set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/common.sh
source "$repository/launch/common.sh"

python=python
parse python '' "$@"
((${#flags[@]} == 0)) || die "${flags[0]}: takes no flags of dspec.main"

cd "$repository"
[[ $dry_run ]] || "$python" -c 'import jax; jax.devices("gpu")' 2>/dev/null ||
  die "--python: JAX in '$python' sees no GPU; pip install 'jax[cuda12]'"
run "$python" -m pytest tests -m gpu -n 0
# Nearly all memory from the start: by default JAX takes three quarters.
run env XLA_PYTHON_CLIENT_MEM_FRACTION=.95 "$python" experiments/benchmarks/accelerator.py
