#!/usr/bin/env bash
# Trains on a Cloud TPU slice, requested as a queued resource; a slice that was preempted is deleted and requested
# again, and the run resumes from its last checkpoint. Ends, with the status of the run, when the run ends.
#
#   launch/tpu_queued_resources.sh --name=chain --zone=us-east5-b --type=v6e-16 --spot --bucket=our-runs -- \
#     --config=experiments/targets/llama3_8b.py --config.mesh.fsdp=16 --workdir=/mnt/dspec/runs/chain
#
#   --name=NAME       of the queued resource and its node; one that exists is taken over, with the run that is on it
#   --zone=ZONE       where the slice is
#   --type=TYPE       v4-N, v5litepod-N, v5p-N, v6e-N
#   --bucket=NAME     with hierarchical namespace (see launch/README.md); every VM has it as /mnt/dspec
#   --project=NAME    default: that of gcloud
#   --spot            spot capacity; or
#   --reserved        capacity reserved by the project. Default: on demand
#   --runtime=NAME    software version of the TPU VMs. Default: by --type, see launch/README.md
#   --env=NAME        a variable of this shell that the run shall have, such as HF_TOKEN; may be repeated
#   --log_dir=FOLDER  default: runs/launch/NAME
#   --poll=SECONDS    between looks at the state. Default: 30
#   --dry_run         print the commands of one round, run none
#
# Ctrl-C lets the run save its state, deletes the slice and says what is left; the same command resumes. A closed
# terminal or a lost connection leaves the run going; the same command finds it again.

set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/common.sh
source "$repository/launch/common.sh"

name='' zone='' type='' bucket='' project='' spot='' reserved='' runtime='' log_dir='' poll=30
parse 'name zone type bucket project runtime env log_dir poll' 'spot reserved' "$@"
check_name --name "$name"
[[ $zone =~ ^[a-z0-9-]+-[a-z]$ ]] || die "--zone: '$zone' is not a zone, as in us-east5-b"
check_type "$type"
check_bucket "$bucket"
[[ ! $spot || ! $reserved ]] || die '--reserved: not together with --spot'
[[ $poll =~ ^[0-9]+$ ]] || die "--poll: '$poll' is not a number of seconds"
check_environment "${variables[@]}"
check_flags "$repository" "${flags[@]}"
check_mounted
[[ $dry_run ]] || command -v gcloud >/dev/null || die 'gcloud: not found; install the Google Cloud CLI'

log_dir=${log_dir:-runs/launch/$name}
where=("--zone=$zone" ${project:+"--project=$project"} --quiet)
queue=(gcloud compute tpus queued-resources)
vm=(gcloud compute tpus tpu-vm)
archive=$log_dir/dspec.tar.gz environment=$log_dir/dspec.env

check_namespace() {
  local enabled
  enabled=$(run gcloud storage buckets describe "gs://$bucket" --raw --format='value(hierarchicalNamespace.enabled)')
  [[ ! $dry_run ]] || { echo "$enabled"; return; }
  [[ $enabled == True ]] || die "--bucket: $bucket has no hierarchical namespace, which checkpoints need; launch/README.md"
}

create() {
  say "requesting $type as $name"
  run "${queue[@]}" create "$name" "${where[@]}" --node-id="$name" --accelerator-type="$type" \
    --runtime-version="${runtime:-$default_runtime}" ${spot:+--spot} ${reserved:+--reserved}
}

delete() {
  run "${queue[@]}" delete "$name" "${where[@]}" --force
}

replace() {  # A failure is tried again by the loop: networks and quotas come back.
  deleted=1
  delete || sleep "$poll"
}

resource_state() {  # '' where there is none.
  run "${queue[@]}" list "${where[@]}" --filter="name~/$name\$" --format='value(state.state)' || echo UNKNOWN
}

node_state() {
  run "${vm[@]}" describe "$name" "${where[@]}" --format='value(state)' || echo UNKNOWN
}

on_workers() {
  run "${vm[@]}" ssh "$name" "${where[@]}" --worker=all --command="$1"
}

pack() {  # This checkout, as it is; the variables in a file of their own, as they may be secret.
  run mkdir -p "$log_dir"
  run tar -czf "$archive" -C "$repository" setup.py requirements.txt dspec experiments launch
  [[ ! $dry_run ]] || return 0
  (umask 077 && : >"$environment")
  local variable
  for variable in "${variables[@]}"; do printf 'export %s=%q\n' "$variable" "${!variable}" >>"$environment"; done
}

set_up() {  # Nothing is touched under a run that goes on.
  local install='mkdir -p dspec && tar -xzf dspec.tar.gz -C dspec && bash dspec/launch/tpu_vm_setup.sh'
  install+=" --bucket=$bucket"
  run "${vm[@]}" scp "$archive" "$environment" "$name:" "${where[@]}" --worker=all &&
    on_workers "bash dspec/launch/tpu_vm_run.sh --alive 2>/dev/null || { $install; }"
}

train() {
  on_workers "bash dspec/launch/tpu_vm_run.sh $again$(quoted "${flags[@]}")"
}

lost() {  # Whether the slice went away; its states may be late to say so. Sets `state`, of the resource.
  local node look
  for look in 1 2 3 4; do
    state=$(resource_state)
    [[ $state == ACTIVE || $state == UNKNOWN ]] || return 0
    node=$(node_state)
    [[ $node == READY || $node == UNKNOWN ]] || return 0
    ((look == 4)) || sleep "$poll"
  done
  return 1
}

clean_up() {
  local status=$? state
  trap - EXIT
  trap '' INT TERM  # Once is enough.
  rm -f "$environment"
  if [[ $owned ]]; then
    state=$(resource_state)
    if [[ $interrupted && $state == ACTIVE ]]; then
      say 'stopping the run, which saves its state first'
      on_workers 'bash dspec/launch/tpu_vm_run.sh --stop' || say 'it did not end by itself; its last checkpoint is left'
    fi
    [[ ! $state ]] || delete || say "LEFT, AT A COST: $name. Delete it: ${queue[*]} delete $name ${where[*]} --force"
    say "left: checkpoints and report in gs://$bucket, as $workdir, the log in $log_dir/log.txt"
  fi
  exit "$status"
}

again='' owned='' interrupted='' was_active='' deleted='' resumed=0
if [[ $dry_run ]]; then
  check_namespace; pack; create; resource_state; set_up; train; node_state; delete
  exit
fi
check_namespace
trap clean_up EXIT
trap 'interrupted=1; exit 130' INT
trap 'interrupted=1; exit 143' TERM
trap 'trap - EXIT; exit 129' HUP
pack
state=$(resource_state)
[[ $state != UNKNOWN ]] || exit 1  # gcloud has said why.
owned=1
if [[ $state ]]; then say "taking over $name, which is $state"; else create; fi
last=
while true; do
  state=$(resource_state)
  [[ $state == "$last" ]] || say "$name: ${state:-gone}"
  last=$state
  case $state in
    ACTIVE)
      was_active=1 status=0 began=$SECONDS
      { set_up && train; } 2>&1 | tee -a "$log_dir/log.txt" || status=$?
      ((status != 0 && status != 2)) || exit "$status"
      ((SECONDS - began < 600)) || resumed=0  # Not one fault that comes again and again.
      if lost; then
        say "status $status: the slice was lost"
        again=''
        [[ ! $state || $state == DELETING ]] || replace
      elif [[ $status == 255 ]] && ((resumed++ < 5)); then
        say 'the connection was lost; the run goes on'
        again=''
      elif [[ $status == 130 || $status == 143 ]] && ((resumed++ < 5)); then
        say "status $status: somebody stopped the run; resuming"
        again='--again '
      else
        exit "$status"
      fi ;;
    SUSPENDING | SUSPENDED) replace ;;
    FAILED)  # Wrong, if it was never granted; else there was no capacity.
      [[ $was_active ]] || { say "the request failed; see: ${queue[*]} describe $name ${where[*]}"; exit 1; }
      replace ;;
    '')
      [[ $deleted ]] || { say "somebody deleted $name"; exit 1; }
      if create; then deleted=''; else sleep "$poll"; fi ;;
    *) sleep "$poll" ;;
  esac
done
