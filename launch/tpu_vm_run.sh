#!/usr/bin/env bash
# On a worker of a TPU slice: starts dspec.main apart from this connection, or finds the run that goes on; follows its
# log, and ends with its status. So a lost connection costs nothing. A run that has ended is told, not run again.
#
#   tpu_vm_run.sh FLAGS...          flags of dspec.main; --multihost is added
#   tpu_vm_run.sh --again FLAGS...  starts it again where it has ended
#   tpu_vm_run.sh --alive           whether it runs
#   tpu_vm_run.sh --stop            ends it, after its state is saved; fails if that takes more than two minutes

set -euo pipefail
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# Of this boot, as process numbers are.
state=$HOME/dspec_run/$(</proc/sys/kernel/random/boot_id)

alive() {
  [[ -s $state/pid ]] && kill -0 "$(<"$state/pid")" 2>/dev/null
}

case ${1-} in
  --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; exit ;;
  --alive) alive; exit ;;
  --stop)
    alive || exit 0
    kill -TERM -- "-$(<"$state/pid")"
    for ((second = 0; second < 120; second++)); do
      alive || exit 0
      sleep 1
    done
    exit 1 ;;
  --again) shift; alive || rm -f "$state/status" ;;
esac

if ! alive && [[ ! -e $state/status ]]; then
  mkdir -p "$state"
  touch "$state/log"
  cd "$repository"
  # shellcheck source=/dev/null
  [[ ! -e $HOME/dspec.env ]] || source "$HOME/dspec.env"
  export TQDM_MININTERVAL=30  # Progress as lines of a log.
  # A signal to the group reaches Python, which saves; the shell stays to note how it ended.
  # shellcheck disable=SC2016
  setsid bash -c 'trap : TERM; "${@:2}"; echo $? >"$1"' run "$state/status" \
    "$HOME/dspec_env/bin/python" -m dspec.main --multihost "$@" </dev/null >>"$state/log" 2>&1 &
  echo $! >"$state/pid"
fi
tail -n 50 -f --pid="$(<"$state/pid")" "$state/log" | stdbuf -oL tr '\r' '\n' | sed -u "s/^/[${HOSTNAME##*-}] /"
exit "$(cat "$state/status" 2>/dev/null || echo 137)"
