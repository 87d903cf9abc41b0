#!/usr/bin/env bash
# Start one run of `overt` on one or more machines: the same command on each of them.
#
#   HEAD_NODE=first-machine:29500 NODES=2 PROCESSES=8 OUT=/shared/runs/soft \
#     bash examples/torchrun.sh scenes-soft --set train.epochs=60
#
# HEAD_NODE    rendezvous address: a machine of the run and a free port on it
# NODES        number of machines
# PROCESSES    processes per machine: one per GPU, or a few on a CPU
# OUT          folder of the run, on a disk shared by all machines
# RUN_ID       distinguishes runs with the same rendezvous address
# TRIES        number of attempts after a process or a machine was lost
#
# Each machine checks for a run to resume before the rendezvous. A run writes its first file after
# the rendezvous, so all machines get the same result.
set -euo pipefail

: "${HEAD_NODE:?set HEAD_NODE=machine:port, the rendezvous address}"
: "${OUT:?set OUT=folder, on a disk shared by all machines}"
: "${NODES:=1}" "${PROCESSES:=1}" "${RUN_ID:=overt}" "${TRIES:=3}" "${PAUSE:=10}"

if [ "$#" -eq 0 ]; then
  echo "a recipe is required: bash examples/torchrun.sh RECIPE [--set NAME=VALUE ...]" >&2
  exit 2
fi

# one thread per process by default: processes that share cores wait for each other
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# otherwise torch gives new processes the addresses of dead ones
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# a signal is forwarded to the processes, which save after their step; there is no further attempt
child="" stopping=""
stop() {
  stopping=1
  if [ -n "$child" ]; then kill -TERM "$child" 2>/dev/null || true; fi
}
trap stop TERM INT

code=1
for try in $(seq "$TRIES"); do
  resume=()
  if [ -e "$OUT/results.json" ]; then resume=(--resume); fi
  "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes "$NODES" --nproc-per-node "$PROCESSES" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD_NODE" --rdzv-id "$RUN_ID-$try" \
    -m overt run "$@" --out "$OUT" "${resume[@]}" &
  child=$!
  code=0
  wait "$child" || code=$?
  while kill -0 "$child" 2>/dev/null; do  # a signal interrupts `wait`, not the child
    code=0
    wait "$child" || code=$?
  done
  if [ "$code" -eq 0 ] || [ -n "$stopping" ]; then break; fi
  echo "attempt $try of $TRIES failed with exit code $code" >&2
  sleep "$PAUSE"  # until the other machines have stopped and the port is free
done
exit "$code"
