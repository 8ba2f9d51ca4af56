#!/usr/bin/env bash
# Trains on a slice of Cloud TPU VMs: one queued resource, spot by default.
#
#   launch/tpu_vm.sh COMMAND NAME --zone=ZONE [OPTION ...] [-- TRAINING ...]
#
# COMMAND
#   run      creates the slice, sets it up and trains; recreates it after a
#            preemption and resumes. TRAINING are arguments of grpojax.train. The
#            same command again attaches to a running training, or resumes it.
#   create   requests the slice and waits for it
#   setup    copies grpojax and your files to all workers, and installs grpojax
#   exec     runs a command on all workers: exec NAME --zone=ZONE -- WORD ...
#   status   prints the state of the queued resource, or NONE
#   logs     prints a worker's output until the training ends
#   delete   releases the slice
#
# OPTION (--zone=us-west4-a or --zone us-west4-a)
#   --type=TYPE        slice: v5e-16 (chips), v5e:4x4 (topology), or gcloud's
#                      accelerator type, v5litepod-16 (create, run)
#   --version=VERSION  runtime version; by default the one for TYPE
#   --on-demand        no spot VMs
#   --env=NAME,NAME    variables of this shell for the training: HF_TOKEN,
#                      WANDB_API_KEY, XLA_FLAGS (run, setup)
#   --extras=NAME,NAME extras of grpojax to install besides tpu and gcs: wandb
#   --create-args=ARGS further arguments of create: "--network=N --labels=a=b"
#   --ssh-args=ARGS    further arguments of ssh and scp: "--tunnel-through-iap"
#   --worker=N         worker of logs; default 0
#   --poll=SECONDS     interval between state checks; default 30
#   --dry-run          only prints the gcloud commands
#
# Your files (rewards, environments, data, configs) are copied: files tracked by
# git in the current directory, and files named by arguments. Paths are the same
# on the workers, so they must be relative. `run` copies changed files again,
# unless the training is running. Values of --env are sent in a file that only you
# can read, not in a command line.
#
# The project is gcloud's default (gcloud config set project, CLOUDSDK_CORE_PROJECT).
# A slice's disks are deleted with it, so `run` needs --run_dir=gs://BUCKET/RUN.
# Ctrl-C stops watching, but not the training; `delete` ends both.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
command="" name="" zone="" type="" version="" tier=--spot worker=0 poll=30
dry_run="" state="" training=() variables=() extras="" files=()
sum="" scratch="" run_dir=""
create_args=() ssh_args=()
attempts=3 # consecutive failures of the training or of reaching the workers

usage() { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; }
say() { printf '%s\n' "tpu_vm: $*" >&2; }
die() {
  say "error: $*"
  exit 2
}

parse() {
  case "${1:-}" in
    -h | --help) usage && exit 0 ;;
    run | create | setup | exec | status | logs | delete) command="$1" ;;
    "") usage >&2 && exit 2 ;;
    *) die "unknown command $1: run, create, setup, exec, status, logs or delete" ;;
  esac
  shift
  [[ "${1:-}" =~ ^[a-z]([-a-z0-9]{0,48}[a-z0-9])?$ ]] ||
    die "NAME is '${1:-}': after $command comes a name like my-run (a-z, 0-9, -)"
  name="$1"
  shift
  local option value
  while (($#)); do
    option="${1%%=*}" value="${1#*=}"
    case "$option" in
      --on-demand | --dry-run) [[ "$1" == "$option" ]] || die "$option takes no value" ;;
      --) training=("${@:2}") && break ;;
      --zone | --type | --version | --env | --extras | --create-args | \
        --ssh-args | --worker | --poll)
        if [[ "$1" != *=* ]]; then
          (($# > 1)) || die "$1 has no value"
          value="$2" && shift
        fi
        [[ "$value" ]] || die "$option has no value"
        ;;
    esac
    case "$option" in
      --zone) zone="$value" ;;
      --type) type="$value" ;;
      --version) version="$value" ;;
      --on-demand) tier="" ;;
      --env) IFS=, read -ra variables <<<"$value" ;;
      --extras) extras="$value" ;;
      --create-args) read -ra create_args <<<"$value" ;;
      --ssh-args) read -ra ssh_args <<<"$value" ;;
      --worker) worker="$value" ;;
      --poll) poll="$value" ;;
      --dry-run) dry_run=yes ;;
      *) die "unknown option $1 (arguments of the training stand after --)" ;;
    esac
    shift
  done
  [[ "$worker" =~ ^[0-9]+$ ]] || die "--worker=$worker: give a number, like 0"
  [[ "$poll" =~ ^[0-9]+$ ]] || die "--poll=$poll: give whole seconds, like 30"
}

# Checks the arguments before any call of gcloud.
check() {
  local word
  [[ -n "$zone" ]] || die "--zone is missing: --zone=us-west4-a, for example"
  if [[ "$command" == run || "$command" == create ]]; then
    [[ -n "$type" ]] || die "--type is missing: --type=v5e-16, for example"
    accelerator_type
    version="${version:-$(runtime_version)}"
    [[ -n "$version" ]] ||
      die "no runtime version is known for --type=$type: give --version"
  fi
  for word in ${variables[@]+"${variables[@]}"}; do
    [[ "$word" =~ ^[A-Za-z_][A-Za-z_0-9]*$ ]] || die "--env=$word: give names only, like HF_TOKEN"
    [[ -n "${!word+set}" ]] || die "--env=$word: this shell has no $word: export it first"
  done
  [[ "$extras" =~ ^([a-z0-9]+(,[a-z0-9]+)*)?$ ]] || die "--extras=$extras: give names, like wandb"
  if [[ "$command" == run ]]; then
    for word in ${training[@]+"${training[@]}"}; do
      if [[ "$word" == --run_dir=* ]]; then run_dir="${word#*=}"; fi
    done
    [[ "$run_dir" == gs://?*/?* ]] ||
      die "--run_dir is '$run_dir': disks of a slice are lost with it;" \
        "give -- --run_dir=gs://BUCKET/RUN"
    own_files
  elif [[ "$command" == exec ]]; then
    ((${#training[@]})) || die "exec needs a command: -- python -m grpojax.selfcheck"
  elif ((${#training[@]})); then
    die "$command takes no arguments of the training: ${training[*]}"
  fi
  [[ -n "$dry_run" ]] || command -v gcloud >/dev/null ||
    die "gcloud was not found: install the Google Cloud CLI" \
      "(https://cloud.google.com/sdk/docs/install)"
}

# Adds to `files` each file that an argument of the training names: the values of
# --NAME=VALUE, separated by commas, without a :function or :setting at the end.
own_files() {
  local word value path values
  for word in ${training[@]+"${training[@]}"}; do
    IFS=, read -ra values <<<"${word#*=}"
    for value in ${values[@]+"${values[@]}"}; do
      path="${value%%:*}"
      if [[ -f "$path" ]]; then
        [[ "$path" != /* && "/$path/" != */../* ]] ||
          die "${word%%=*}: $path is not below $PWD: workers get files by" \
            "relative paths, so copy it here and name it so"
        files+=("$path")
      elif [[ "$value" != *://* && ! -e "$root/$path" && "$path" =~ \
        ^[^[:space:]{}]+\.(py|json|jsonl|csv|parquet|txt|ya?ml|gguf)$ ]]; then
        die "${word%%=*}: there is no file $path here, and none in grpojax"
      fi
    done
  done
}

# Sets `type` to the accelerator type that gcloud knows: v5e-16 and v5e:4x4 are
# v5litepod-16, v5p:2x2x2 is v5p-16 (v4 and v5p count two cores a chip).
accelerator_type() {
  local family="${type%%[:-]*}" size="${type#*[:-]}" chips=1 side sides
  if [[ "$type" == *:* ]]; then
    [[ "$size" =~ ^[1-9][0-9]*(x[1-9][0-9]*){1,2}$ ]] ||
      die "--type=$type: a topology is like v5e:4x4 or v5p:2x2x2"
    IFS=x read -ra sides <<<"$size"
    for side in "${sides[@]}"; do chips=$((chips * side)); done
    case "$family" in v2 | v3 | v4 | v5p) size=$((2 * chips)) ;; *) size="$chips" ;; esac
  fi
  [[ "$size" =~ ^[1-9][0-9]*$ ]] || die "--type=$type: a type is like v5e-16"
  case "$family" in
    tpu7x | v7x) die "--type=$type: tpu7x is served by GKE: edit launch/gke/jobset.yaml" ;;
    v5e | v5litepod) type="v5litepod-$size" ;;
    *) type="$family-$size" ;;
  esac
}

# https://cloud.google.com/tpu/docs/runtimes
runtime_version() {
  case "$type" in
    v6e-*) echo v2-alpha-tpuv6e ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v[234]-*) echo tpu-ubuntu2204-base ;;
  esac
}

tpus() { # SUBCOMMAND ...: gcloud, or with --dry-run its command line
  local line=(gcloud compute tpus "$@" --zone="$zone")
  if [[ -z "$dry_run" ]]; then
    "${line[@]}"
  else
    printf '%q ' "${line[@]}" && echo
  fi
}

look() { # sets `state`
  local failures=0 query=(queued-resources list --filter="name~/$name\$"
    --format="value(state.state)")
  if [[ -n "$dry_run" ]]; then
    tpus "${query[@]}" # prints the line; `create` then sets `state`
  else
    until state="$(tpus "${query[@]}")"; do
      ((++failures < attempts)) || die "gcloud does not report the state of $name: see its errors"
      sleep "$poll"
    done
  fi
  state="${state:-NONE}"
}

ssh_to() { # WORKER LINE: runs a line of shell there
  tpus tpu-vm ssh "$name" ${ssh_args[@]+"${ssh_args[@]}"} --worker="$1" --command="$2"
}

on() { # WORKER WORD ...: tpu_vm_worker.sh WORD ... there
  local line
  printf -v line '%q ' bash grpojax/launch/tpu_vm_worker.sh "${@:2}"
  ssh_to "$1" "$line"
}

create() {
  look
  while [[ "$state" != ACTIVE ]]; do
    case "$state" in
      NONE)
        say "asking for $type in $zone"
        tpus queued-resources create "$name" --node-id="$name" ${tier:+"$tier"} \
          ${create_args[@]+"${create_args[@]}"} --accelerator-type="$type" --runtime-version="$version"
        if [[ -n "$dry_run" ]]; then state=ACTIVE; fi
        ;;
      SUSPENDED) # the slice was preempted
        say "$name was preempted: recreating it"
        remove
        # The training may not have had the time to remove its lock.
        [[ -z "$run_dir" ]] || gcloud storage rm --quiet "$run_dir/.lock" || true
        ;;
      FAILED)
        die "the queued resource failed: run gcloud compute tpus" \
          "queued-resources describe $name --zone=$zone, then delete it"
        ;;
      *)
        say "$name is $state"
        sleep "$poll"
        ;;
    esac
    look
  done
}

# Writes the workers' files to $scratch/files: grpojax, your files over it, and the
# variables. Sets `sum`, a checksum by which a worker knows if it has the same files.
gather() {
  local word place="$scratch/files" list="$scratch/list"
  rm -rf "$place" && mkdir "$place" &&
    tar -cf - -C "$root" --exclude=__pycache__ \
      setup.py pyproject.toml README.md grpojax configs launch |
    tar -xf - -C "$place" &&
    own_list >"$list" &&
    tar -cf - --null -T "$list" | tar -xf - -C "$place" &&
    (umask 077 && for word in ${variables[@]+"${variables[@]}"}; do
      printf 'export %s=%q\n' "$word" "${!word}"
    done >"$place/.grpojax-env") &&
    sum="$(cd "$place" && find . -type f -exec cksum {} + | LC_ALL=C sort |
      cksum | tr -d ' ')"
}

own_list() { # paths of your files, each ended by \0; git also lists deleted files
  local word
  {
    git ls-files -z 2>/dev/null || true
    printf '%s\0' ${files[@]+"${files[@]}"}
  } | while IFS= read -r -d "" word; do
    [[ ! -f "$word" ]] || printf '%s\0' "$word"
  done
}

setup() { # fails if a command fails, even if `set -e` is off
  gather &&
    tar -cf "$scratch/grpojax.tar" -C "$scratch/files" . &&
    tpus tpu-vm scp "$scratch/grpojax.tar" "$name:grpojax.tar" \
      ${ssh_args[@]+"${ssh_args[@]}"} --worker=all &&
    ssh_to all "mkdir -p grpojax && tar -xf grpojax.tar -C grpojax && rm grpojax.tar" &&
    on all install "$sum" "tpu,gcs${extras:+,$extras}"
}

remove() { tpus queued-resources delete "$name" --force --quiet; }

# Sets up the workers and trains. Prints the training's exit code, or nothing if the
# workers cannot be reached. Their output goes to stderr.
attempt() {
  {
    gather || return 0
    on all installed "$sum" || setup || return 0
    on all start ${training[@]+"${training[@]}"} || return 0
    on 0 follow || true # this exit code may be gcloud's
  } >&2
  on 0 code || true
}

run() {
  local code failures=0
  while true; do
    look
    if [[ "$state" != ACTIVE ]]; then
      failures=0
      create
    fi
    if [[ -n "$dry_run" ]]; then
      setup && attempt 2>&1 && return
    fi
    code="$(attempt)"
    case "$code" in
      0) say "finished" && return ;;
      75) say "interrupted and saved: resuming" && failures=0 ;;
      "")
        say "the workers of $name cannot be reached or set up"
        failures=$((failures + 1))
        ;;
      *)
        say "the training ended with code $code"
        failures=$((failures + 1))
        ;;
    esac
    sleep "$poll" # by then the state says whether it was preempted
    if ((failures >= attempts)); then
      look
      [[ "$state" != ACTIVE ]] || die "$attempts attempts failed in a row"
    fi
  done
}

parse "$@"
check
scratch="$(mktemp -d)" # for this user alone
trap 'rm -rf "$scratch"' EXIT
case "$command" in
  run | create | setup) "$command" ;;
  exec) on all exec "${training[@]}" ;;
  status) look && [[ -n "$dry_run" ]] || echo "$state" ;;
  logs) on "$worker" follow ;;
  delete) remove ;;
esac
