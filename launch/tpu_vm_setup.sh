#!/usr/bin/env bash
# Makes a TPU VM ready for dspec: Python 3.11 (its images have 3.10) in a virtual environment, with JAX for TPU and
# this checkout of dspec. May be run again at any time; what is there stays.
#
#   bash dspec/launch/tpu_vm_setup.sh && ~/dspec_env/bin/python -m dspec.main --config=...
#
#   --bucket=NAME  mounted as /mnt/dspec, with gcsfuse
#   --venv=FOLDER  default: ~/dspec_env
#   --dry_run      print the commands, run none

set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/common.sh
source "$repository/launch/common.sh"

venv=$HOME/dspec_env bucket=
parse 'venv bucket' '' "$@"
((${#flags[@]} == 0)) || die "${flags[0]}: takes no flags of dspec.main"
[[ ! $bucket ]] || check_bucket "$bucket"

has() {  # In a dry run nothing is there.
  [[ ! $dry_run ]] && "$@" >/dev/null 2>&1
}

if [[ $bucket ]] && ! has mountpoint --quiet "$mount"; then
  if ! has command -v gcsfuse; then  # https://cloud.google.com/storage/docs/cloud-storage-fuse/install
    packages=https://packages.cloud.google.com/apt keyring=/usr/share/keyrings/cloud.google.asc
    run sudo curl --fail --silent --show-error --location --output "$keyring" "$packages/doc/apt-key.gpg"
    # shellcheck disable=SC2016
    run sudo bash -c \
      'echo "deb [signed-by=$1] $2 gcsfuse-$(lsb_release -cs) main" >/etc/apt/sources.list.d/gcsfuse.list' \
      - "$keyring" "$packages"
    run sudo apt-get update --quiet
    run sudo apt-get install --quiet --yes --option=DPkg::Lock::Timeout=600 gcsfuse
  fi
  run sudo install --directory --owner="$(id -u)" "$mount"
  # On TPU VMs gcsfuse keeps for ever what it has once seen of a file or folder: other workers' would not be found.
  # And it renames folders of a bucket without hierarchical namespace file by file: that is to fail.
  run gcsfuse --metadata-cache-ttl-secs=0 --metadata-cache-negative-ttl-secs=0 --rename-dir-limit=0 "$bucket" "$mount"
fi

# uv brings its own Python where the system has none: no administrator, no lock of the package manager.
has python3 -m uv --version || run python3 -m pip install --quiet --user uv
has "$venv/bin/python" --version || run python3 -m uv venv --python=3.11 "$venv"
run python3 -m uv pip install --quiet --python="$venv/bin/python" 'jax[tpu]' --editable="$repository"
run "$venv/bin/python" -c \
  'import sys, jax, libtpu, dspec; print("Python", sys.version.split()[0], "JAX", jax.__version__)'
