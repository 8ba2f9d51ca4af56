#!/usr/bin/env bash
# Commands of tpu_vm.sh on each worker of a slice, run in the copied checkout.
#
#   install SUM EXTRAS
#                installs Python, and this checkout with the extras (tpu,gcs)
#   installed SUM
#                exits with 0 if these files are installed, or a training runs
#   exec ...     runs a command here, with the installed Python
#   start ...    starts python -m grpojax.train ..., unless it is running; it
#                outlives the SSH connection
#   follow       prints its output until it ends
#   code         prints its exit code; fails while it runs
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv="$HOME/grpojax-venv"
run="$HOME/grpojax-run" # lock, log and exit code of the training

install() { # the VM's own Python is too old
  export PATH="$HOME/.local/bin:$PATH"
  command -v uv >/dev/null || curl -LsSf https://astral.sh/uv/install.sh | sh
  uv venv --quiet --allow-existing --python=3.13 "$venv"
  uv pip install --quiet --python="$venv/bin/python" -e ".[$2]"
  echo "$1" >"$venv/installed"
}

installed() {
  mkdir -p "$run"
  exec 9>>"$run/lock"
  if ! flock --nonblock 9; then return 0; fi
  [[ "$(cat "$venv/installed" 2>/dev/null)" == "$1" ]]
}

# Reads the variables of tpu_vm.sh --env from a file: process lists do not show them.
environment() {
  export PATH="$venv/bin:$PATH"
  if [[ -s .grpojax-env ]]; then source ./.grpojax-env; fi
}

start() {
  mkdir -p "$run"
  exec 9>"$run/lock"
  # A training that has just written its exit code still holds the lock briefly.
  flock --wait 1 9 || { echo "it is running already" && return; }
  rm -f "$run/code"
  environment
  # The inner shell holds the lock while the training runs. It ignores SIGTERM, so
  # that it can write the training's exit code.
  # shellcheck disable=SC2016  # $@ and $0 are its own
  setsid --fork bash -c \
    'trap : TERM; "$@" 9>&-; echo "$?" >"$0.new" && mv "$0.new" "$0"' \
    "$run/code" launch/xla_flags.sh "$venv/bin/python" -u -m grpojax.train "$@" \
    >>"$run/log" 2>&1 </dev/null
}

follow() {
  tail -n 100 -F "$run/log" &
  trap 'kill "$!"' EXIT
  exec 9>>"$run/lock"
  flock 9 # waits until the training has ended
  sleep 0.3 # for its last lines
}

case "${1:-}" in
  install | installed | start | follow) "$@" ;;
  exec) environment && "$@" ;;
  code) cat "$run/code" ;;
  *) echo "error: '${1:-}': install, installed, start, follow, code or exec" >&2 && exit 2 ;;
esac
