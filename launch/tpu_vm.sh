#!/usr/bin/env bash
# Trains on a slice of Cloud TPU VMs: one queued resource, spot by default.
#
#   launch/tpu_vm.sh COMMAND NAME --zone=ZONE [OPTION ...] [-- TRAINING ...]
#
# COMMAND
#   run      creates, sets up, trains; recreates the slice when it is preempted
#            and goes on. TRAINING is what python -m grpojax.train is given.
#            The same command again attaches to what runs, or resumes.
#   create   asks for the slice and waits until it is there
#   setup    copies this checkout to all workers and installs it there
#   status   prints the state of the queued resource; NONE: there is none
#   logs     prints a worker's output, until the training ends
#   delete   gives the slice back
#
# OPTION
#   --type=TYPE        accelerator type, as v5litepod-16 (create, run)
#   --version=VERSION  runtime version; by default the one for TYPE
#   --on-demand        not spot
#   --worker=N         of logs; default 0
#   --poll=SECONDS     between looks at the state; default 30
#   --dry-run          prints the gcloud commands, and runs none
#
# The project is gcloud's own: gcloud config set project, CLOUDSDK_CORE_PROJECT.
# A slice's disks are lost with it, so `run` wants --run_dir=gs://BUCKET/RUN.
# Ctrl-C ends the watching, not the training; `delete` ends both.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
command="" name="" zone="" type="" version="" tier=--spot worker=0 poll=30
dry_run="" state="" training=()
attempts=3 # of a training that fails, or workers out of reach, in a row

usage() { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; }
say() { printf '%s\n' "tpu_vm: $*" >&2; }
die() {
  say "error: $*"
  exit 2
}

parse() {
  case "${1:-}" in
    -h | --help) usage && exit 0 ;;
    run | create | setup | status | logs | delete) command="$1" ;;
    "") usage >&2 && exit 2 ;;
    *) die "unknown command $1: run, create, setup, status, logs or delete" ;;
  esac
  shift
  [[ "${1:-}" =~ ^[a-z]([-a-z0-9]{0,48}[a-z0-9])?$ ]] ||
    die "NAME is '${1:-}': after $command comes a name like my-run (a-z, 0-9, -)"
  name="$1"
  shift
  while (($#)); do
    case "$1" in
      --zone=?*) zone="${1#*=}" ;;
      --type=?*) type="${1#*=}" ;;
      --version=?*) version="${1#*=}" ;;
      --on-demand) tier="" ;;
      --worker=?*) worker="${1#*=}" ;;
      --poll=?*) poll="${1#*=}" ;;
      --dry-run) dry_run=yes ;;
      --) training=("${@:2}") && break ;;
      *) die "unknown option $1 (arguments of the training stand after --)" ;;
    esac
    shift
  done
  [[ "$worker" =~ ^[0-9]+$ ]] || die "--worker=$worker: a number, as 0"
  [[ "$poll" =~ ^[0-9]+$ ]] || die "--poll=$poll: whole seconds, as 30"
}

# What is missing for the command, before anything is asked for.
check() {
  local run_dir="" word
  [[ -n "$zone" ]] || die "--zone is missing: --zone=us-west4-a, for example"
  if [[ "$command" == run || "$command" == create ]]; then
    [[ -n "$type" ]] || die "--type is missing: --type=v5litepod-16, for example"
    version="${version:-$(runtime_version)}"
    [[ -n "$version" ]] ||
      die "no runtime version is known for --type=$type: give --version"
  fi
  if [[ "$command" == run ]]; then
    for word in "${training[@]}"; do
      if [[ "$word" == --run_dir=* ]]; then run_dir="${word#*=}"; fi
    done
    [[ "$run_dir" == gs://?*/?* ]] ||
      die "--run_dir is '$run_dir': disks of a slice are lost with it;" \
        "give -- --run_dir=gs://BUCKET/RUN"
  elif ((${#training[@]})); then
    die "$command takes no arguments of the training: ${training[*]}"
  fi
  [[ -n "$dry_run" ]] || command -v gcloud >/dev/null ||
    die "gcloud was not found: install the Google Cloud CLI" \
      "(https://cloud.google.com/sdk/docs/install)"
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
    tpus "${query[@]}" # and as if it were there once it was asked for
  else
    until state="$(tpus "${query[@]}")"; do
      ((++failures < attempts)) || die "gcloud does not say what $name is doing"
      sleep "$poll"
    done
  fi
  state="${state:-NONE}"
}

on() { # WORKER WORD ...: tpu_vm_worker.sh WORD ... there
  local line
  printf -v line '%q ' bash grpojax/launch/tpu_vm_worker.sh "${@:2}"
  tpus tpu-vm ssh "$name" --worker="$1" --command="$line"
}

create() {
  look
  while [[ "$state" != ACTIVE ]]; do
    case "$state" in
      NONE)
        say "asking for $type in $zone"
        tpus queued-resources create "$name" --node-id="$name" ${tier:+"$tier"} \
          --accelerator-type="$type" --runtime-version="$version"
        if [[ -n "$dry_run" ]]; then state=ACTIVE; fi
        ;;
      SUSPENDED) # what is left of a slice that was preempted
        say "$name was preempted: recreating it"
        remove
        ;;
      FAILED)
        die "the queued resource failed; why: gcloud compute tpus" \
          "queued-resources describe $name --zone=$zone; then delete it"
        ;;
      *)
        say "$name is $state"
        sleep "$poll"
        ;;
    esac
    look
  done
}

setup() { # fails where a step does, also where `set -e` is off
  local archive
  archive="$(mktemp)" &&
    tar -cf "$archive" -C "$root" --exclude=__pycache__ \
      setup.py pyproject.toml README.md grpojax configs launch &&
    tpus tpu-vm scp "$archive" "$name:grpojax.tar" --worker=all &&
    rm "$archive" &&
    tpus tpu-vm ssh "$name" --worker=all \
      --command="mkdir -p grpojax && tar -xf grpojax.tar -C grpojax" &&
    on all install
}

remove() { tpus queued-resources delete "$name" --force --quiet; }

# One go at it: prints the code with which the training ended, or nothing where
# the workers cannot be reached. What they print goes to stderr meanwhile.
attempt() {
  {
    on all installed || setup || return 0
    on all start "${training[@]}" || return 0
    on 0 follow || true # its code might be gcloud's own
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
      75) say "interrupted, and saved: going on" && failures=0 ;;
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
case "$command" in
  run | create | setup) "$command" ;;
  status) look && [[ -n "$dry_run" ]] || echo "$state" ;;
  logs) on "$worker" follow ;;
  delete) remove ;;
esac
