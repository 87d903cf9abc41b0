#!/usr/bin/env bash
# One run of `overt` on several machines, or on one: the same command on each of them.
#
#   HEAD_NODE=first-machine:29500 NODES=2 PROCESSES=8 OUT=/shared/runs/soft \
#     bash examples/torchrun.sh scenes-soft --set train.epochs=60
#
# HEAD_NODE    where the processes meet: a machine of the run, and a port that is free there
# NODES        how many machines take part
# PROCESSES    processes on each machine: one a card, or a few on a CPU
# OUT          the folder of the run, on a disk that every machine sees
# RUN_ID       tells this run from others that meet at the same place
# TRIES        how often the run is taken up again after a process or a machine was lost
#
# Whether there is something to go on with is asked before the processes meet. A run can only begin
# to write after all of them have met, so all machines give themselves the same answer.
set -euo pipefail

: "${HEAD_NODE:?say HEAD_NODE=machine:port, where the processes meet}"
: "${OUT:?say OUT=folder, on a disk that every machine sees}"
: "${NODES:=1}" "${PROCESSES:=1}" "${RUN_ID:=overt}" "${TRIES:=3}" "${PAUSE:=10}"

if [ "$#" -eq 0 ]; then
  echo "say which recipe: bash examples/torchrun.sh RECIPE [--set NAME=VALUE ...]" >&2
  exit 2
fi

# a thread a process, unless you know better: processes that share cores wait for each other
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# torch would hand the addresses of dead processes to those that come after them
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# a wish to stop goes to the processes, which save after their step; then nothing is tried again
child="" stopping=""
stop() {
  stopping=1
  if [ -n "$child" ]; then kill -TERM "$child" 2>/dev/null || true; fi
}
trap stop TERM INT

code=1
for try in $(seq "$TRIES"); do
  going_on=()
  if [ -e "$OUT/results.json" ]; then going_on=(--resume); fi
  "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes "$NODES" --nproc-per-node "$PROCESSES" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD_NODE" --rdzv-id "$RUN_ID-$try" \
    -m overt run "$@" --out "$OUT" "${going_on[@]}" &
  child=$!
  code=0
  wait "$child" || code=$?
  while kill -0 "$child" 2>/dev/null; do  # a signal ends a wait, not what is waited for
    code=0
    wait "$child" || code=$?
  done
  if [ "$code" -eq 0 ] || [ -n "$stopping" ]; then break; fi
  echo "try $try of $TRIES ended with $code" >&2
  sleep "$PAUSE"  # until the others have noticed, and the port is free again
done
exit "$code"
