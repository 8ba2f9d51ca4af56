#!/usr/bin/env bash
# Trains with N processes on this machine, over loopback, as a trial of a cluster.
#
#   launch/local_multiprocess.sh N [TRAINING ...]
#
# TRAINING are arguments of grpojax.train. Each process has JAX_NUM_CPU_DEVICES
# devices, 1 by default. SIGTERM and Ctrl-C save and end with code 75; the same
# command resumes.
set -euo pipefail

if [[ ! "${1:-}" =~ ^[1-9][0-9]*$ ]]; then
  sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}" >&2
  echo "error: N is '${1:-}': give the number of processes, like 2" >&2
  exit 2
fi
processes="$1"
shift

export JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}"
export JAX_NUM_CPU_DEVICES="${JAX_NUM_CPU_DEVICES:-1}"
flags="$(dirname "${BASH_SOURCE[0]}")/xla_flags.sh"
pids=()
stopping=""
end() {
  stopping=1
  if ((${#pids[@]})); then kill -TERM "${pids[@]}" 2>/dev/null || true; fi
}
trap end TERM INT # before any process starts, so that none is left behind
port="$(python -c 'import socket
with socket.socket() as s:
  s.bind(("127.0.0.1", 0))
  print(s.getsockname()[1])')"

for ((i = 0; i < processes; i++)); do
  if [[ -n "$stopping" ]]; then break; fi
  "$flags" python -u -m grpojax.train --coordinator="127.0.0.1:$port" \
    --num_processes="$processes" --process_id="$i" "$@" &
  pids+=("$!")
done
worst=0
if [[ -n "$stopping" ]]; then
  end # the signal may have come just before the last process was added
  worst=75
fi
for pid in "${pids[@]}"; do
  code=0
  wait "$pid" || code="$?"
  while kill -0 "$pid" 2>/dev/null; do # a signal ended the wait
    code=0
    wait "$pid" || code="$?"
  done
  # Exits with a failure's code if there is one, else with 75 if interrupted.
  if ((code != 0 && (worst == 0 || worst == 75))); then worst="$code"; fi
done
exit "$worst"
