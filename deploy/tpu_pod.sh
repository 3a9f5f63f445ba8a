#!/usr/bin/env bash
# Trains on a TPU pod. Starts again after a preemption or a failure, until training has finished.
#
#   TPU=my-pod ZONE=us-east5-a \
#     CREATE="--accelerator-type=v6e-16 --runtime-version=v2-alpha-tpuv6e --spot" \
#     SETUP="sudo mkdir -p /shared && { mountpoint -q /shared || sudo mount 10.0.0.2:/vol /shared; }" \
#     deploy/tpu_pod.sh --config=configs/base.py --run=/shared/runs/base ...
#
# All arguments are options of `transformer-jax train`. See docs/multi_device.md.

set -euo pipefail
cd "$(dirname "$0")/.."

# Name of the queued resource and of its pod, and their zone.
: "${TPU:?}" "${ZONE:?}"
# Options of `gcloud compute tpus queued-resources create`.
read -ra create <<<"${CREATE:?}"
# Command that each worker runs before each start.
SETUP=${SETUP:-true}
# Number of restarts, those after a preemption included.
MAX_RESTARTS=${MAX_RESTARTS:-100}
# Seconds between two looks at the queued resource, and before a restart.
PAUSE=${PAUSE:-60}

tpus() {
  gcloud compute tpus "$@" --zone="$ZONE" --quiet
}

# Returns when the pod is there. Creates it if it is missing or was preempted.
wait_for_pod() {
  local state
  while true; do
    state=$(tpus queued-resources describe "$TPU" --format="value(state.state)" \
      --verbosity=error 2>&1) || true
    case $state in
      ACTIVE) return ;;
      *NOT_FOUND*) tpus queued-resources create "$TPU" --node-id="$TPU" "${create[@]}" ;;
      SUSPENDED | FAILED) tpus queued-resources delete "$TPU" --force ;;
      *) echo "$TPU: $state" ;;
    esac
    sleep "$PAUSE"
  done
}

# The lock: after a lost connection, the command of the last start may still be running.
command="
  exec 9>lock && flock 9
  { $SETUP; } && mkdir -p source && tar -xzf source.tar.gz -C source && cd source &&
    sudo apt-get install -qq -o DPkg::Lock::Timeout=300 python3.11-venv &&
    python3.11 -m venv .venv && .venv/bin/pip install --quiet '.[gcs,tpu]' || exit 1
  .venv/bin/transformer-jax train --coordinator=auto$(printf ' %q' "$@")
"

start_training() {
  tpus tpu-vm scp "$temporary/source.tar.gz" "$TPU:" --worker=all &&
    tpus tpu-vm ssh "$TPU" --worker=all --ssh-flag="-o ServerAliveInterval=30" --command="$command"
}

temporary=$(mktemp -d)
log=$temporary/log
git archive --output="$temporary/source.tar.gz" HEAD
for ((restart = 0; restart <= MAX_RESTARTS; restart++)); do
  wait_for_pod
  status=0
  start_training 2>&1 | tee "$log" || status=$?
  # gcloud returns the status of the first worker that failed, which may have died of another one.
  if [ "$status" -eq 2 ] || grep -q 'failed with exit status 2\.' "$log"; then
    exit 2 # The input is wrong, and the error is in the log.
  elif [ "$status" -eq 0 ]; then
    tpus queued-resources delete "$TPU" --force
    exit 0
  fi
  echo "training has not finished (status $status); next start in $PAUSE seconds"
  sleep "$PAUSE"
done
echo "training has not finished after $MAX_RESTARTS restarts; the pod is still there"
exit 1
