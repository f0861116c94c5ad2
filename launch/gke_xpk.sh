#!/usr/bin/env bash
# Trains on a TPU slice of a GKE cluster, through xpk: builds the image, submits the workload and waits for its end.
# The cluster restarts it, and it resumes from its last checkpoint, when its machines are taken away.
#
#   launch/gke_xpk.sh --name=chain --cluster=tpus --zone=us-east5-b --type=v6e-16 \
#     --storage=dspec --image=us-docker.pkg.dev/project/images/dspec:1 -- \
#     --config=experiments/targets/llama3_8b.py --config.mesh.fsdp=16 --workdir=/mnt/dspec/runs/chain
#
#   --name=NAME         of the workload
#   --cluster=NAME      made by `xpk cluster create`
#   --zone=ZONE         of the cluster
#   --type=TYPE         v4-N, v5litepod-N, v5p-N, v6e-N
#   --storage=NAME      a bucket that `xpk storage attach` gave the cluster as /mnt/dspec (see launch/README.md)
#   --image=NAME        where the image goes, and the cluster fetches it
#   --prebuilt          the image is there already
#   --project=NAME      default: that of gcloud
#   --spot              spot capacity; or
#   --reservation=NAME  reserved capacity; both for clusters that make their node pools by need (autoprovisioning)
#   --env=NAME          a variable of this shell that the run shall have, such as HF_TOKEN; may be repeated
#   --max_restarts=N    default: 100
#   --dry_run           print the commands, run none
#
# Ctrl-C stops waiting only: the workload is the cluster's.

set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/common.sh
source "$repository/launch/common.sh"

name='' cluster='' zone='' type='' storage='' image='' project='' reservation='' max_restarts=100 prebuilt='' spot=''
parse 'name cluster zone type storage image project reservation env max_restarts' 'prebuilt spot' "$@"
check_name --name "$name"
check_name --cluster "$cluster"
[[ $zone =~ ^[a-z0-9-]+$ ]] || die "--zone: '$zone' is not a zone, as in us-east5-b"
check_type "$type"
check_name --storage "$storage"
[[ ! $spot || ! $reservation ]] || die '--reservation: not together with --spot'
[[ $image =~ ^[a-z0-9.-]+(/[a-z0-9._-]+)+:[A-Za-z0-9._-]+$ ]] || die "--image: '$image' is not HOST/PATH:TAG"
[[ $max_restarts =~ ^[0-9]+$ ]] || die "--max_restarts: '$max_restarts' is not a number"
check_environment "${variables[@]}"
check_flags "$repository" "${flags[@]}"
check_mounted
for tool in docker xpk; do
  [[ $dry_run ]] || command -v "$tool" >/dev/null || die "$tool: not found; see launch/README.md"
done

where=("--cluster=$cluster" "--zone=$zone" ${project:+"--project=$project"})
if [[ ! $prebuilt ]]; then
  run docker build --platform=linux/amd64 --tag="$image" --file="$repository/launch/Dockerfile" "$repository"
  run docker push "$image"
fi
environment=
if ((${#variables[@]})); then  # Names only: xpk takes the values from this shell, so that they are on no command line.
  environment=runs/launch/$name.env
  run mkdir -p runs/launch
  [[ $dry_run ]] || printf '%s\n' "${variables[@]}" >"$environment"
fi
# `exec`: the signal that says that a machine goes must reach Python. It ends with 130 once its state is saved, which
# is among the statuses after which xpk restarts; 1 and 2, mistakes, are not.
run xpk workload create --workload="$name" "${where[@]}" --tpu-type="$type" --num-slices=1 --docker-image="$image" \
  --storage="$storage" \
  --max-restarts="$max_restarts" --termination-grace-period-seconds=120 \
  ${spot:+--spot} ${reservation:+"--reservation=$reservation"} ${environment:+"--env-file=$environment"} \
  --command="exec python -m dspec.main --multihost $(quoted "${flags[@]}")"
trap 'say "left: the workload goes on. Stop it: xpk workload delete --workload=$name ${where[*]}"; exit 130' INT TERM
status=0
run xpk workload list "${where[@]}" --wait-for-job-completion="$name" || status=$?
say "left: checkpoints and report in the bucket, as $workdir"
exit "$status"
