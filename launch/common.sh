# What the launching scripts share: sourced, never run.
# shellcheck shell=bash
# Set here, read there:
# shellcheck disable=SC2034

dry_run=
mount=/mnt/dspec  # Where every machine in the cloud has the bucket that a run writes to.

usage() {  # The comment at the head of the script.
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
}

die() {  # A mistake that the user can mend: one line, and the status that dspec gives them.
  printf 'error: %s\n' "$1" >&2
  exit 2
}

say() {
  printf '%s %s\n' "$(date +%H:%M:%S)" "$1" >&2
}

quoted() {  # Words as they could be typed.
  local word separator=
  for word; do
    [[ $word =~ ^[A-Za-z0-9_./:=@%+,~-]+$ ]] || word=${word@Q}
    printf '%s%s' "$separator" "$word"
    separator=' '
  done
}

run() {  # Runs a command; in a dry run prints it.
  if [[ $dry_run ]]; then quoted "$@" && echo; else "$@"; fi
}

parse() {  # "NAMES" "SWITCHES" WORDS...: sets the variable of each option; `variables` of --env; `flags`, after --.
  local names=" $1 " switches=" $2 help dry_run " key
  shift 2
  flags=() variables=()
  while (($#)); do
    key=${1%%=*} key=${key#--}
    case $1 in
      --) flags=("${@:2}"); return ;;
      --*=) die "--$key: its value is empty" ;;
      --*=*)
        [[ $names == *" $key "* ]] || die "--$key: no such option with a value; see --help"
        if [[ $key == env ]]; then variables+=("${1#*=}"); else printf -v "$key" %s "${1#*=}"; fi ;;
      --*)
        [[ $switches == *" $key "* ]] || die "--$key: no such option without a value; see --help"
        [[ $key != help ]] || { usage; exit; }
        printf -v "$key" 1 ;;
      *) die "$1: options read --name=value, and those of dspec.main come after --" ;;
    esac
    shift
  done
}

check_name() {  # OPTION VALUE: names of Cloud resources.
  [[ $2 =~ ^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$ ]] ||
    die "$1: '$2' is not a name of at most 40 lower-case letters, digits and hyphens"
}

check_type() {  # VALUE: type of a TPU slice. Sets `default_runtime`, its TPU VM image.
  local size=${1##*-}
  [[ $size =~ ^[1-9][0-9]*$ ]] || die "--type: '$1' has no size, as in v6e-16"
  case $1 in
    v4-"$size") default_runtime=tpu-ubuntu2204-base ;;
    v5p-"$size") default_runtime=v2-alpha-tpuv5 ;;
    v5litepod-"$size") default_runtime=v2-alpha-tpuv5-lite ;;
    v6e-"$size") default_runtime=v2-alpha-tpuv6e ;;
    v5e-*) die "--type: v5e slices are called v5litepod-$size" ;;
    *) die "--type: '$1' is none of v4-N, v5litepod-N, v5p-N, v6e-N" ;;
  esac
  case $1 in
    v4-* | v5p-*) ((size % 8 == 0)) || die "--type: $1: N counts TensorCores, 8 in each VM" ;;
    *) [[ ' 1 4 8 16 32 64 128 256 ' == *" $size "* ]] || die "--type: $1: N counts chips: 1, 4, 8, 16 ... 256" ;;
  esac
}

check_environment() {  # NAMES...: variables that the run is to have.
  local name
  for name; do
    [[ $name =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || die "--env: '$name' is not the name of a variable"
    [[ ${!name+set} ]] || die "--env: $name is not set here"
  done
}

check_flags() {  # REPOSITORY FLAGS...: of dspec.main. Sets `workdir` and `cache_dir`.
  local repository=$1 word config=
  workdir='' cache_dir=''
  for word in "${@:2}"; do
    case $word in
      --config=*) config=${word#*=} ;;
      --workdir=*) workdir=${word#*=} ;;
      --config.cache_dir=*) cache_dir=${word#*=} ;;
      --multihost*) die '--multihost: is added by this script' ;;
      --mode=generate) die '--mode: these scripts train' ;;
      --*) ;;
      *) die "$word: flags of dspec.main read --name=value" ;;
    esac
  done
  [[ $config ]] || die '--config: missing after --'
  [[ $config == experiments/* && -f $repository/${config%%:*} ]] ||
    die "--config: '${config%%:*}' is no file in this repository's experiments/, which is what the machines get"
  [[ $workdir ]] || die '--workdir: missing after --; without it a restarted run would not find its checkpoints'
}

check_mounted() {  # After check_flags: what the run writes lies in the bucket. Adds --config.cache_dir where it is missing.
  [[ $workdir == "$mount"/?* ]] ||
    die "--workdir: '$workdir' is not below $mount, where the bucket is; local disks go with the machines"
  [[ $cache_dir ]] || { cache_dir=$mount/cache; flags+=("--config.cache_dir=$cache_dir"); }
  [[ $cache_dir == "$mount"/?* ]] ||
    die "--config.cache_dir: '$cache_dir' is not below $mount, where the bucket is; local disks go with the machines"
}

check_bucket() {  # VALUE
  [[ $1 =~ ^[a-z0-9]([a-z0-9._-]{1,61})[a-z0-9]$ ]] || die "--bucket: '$1' is not the name of a bucket, without gs://"
}
