#!/usr/bin/env bash
# Trains on a Slurm cluster. The job queues itself again until training has finished.
#
#   sbatch deploy/slurm.sh --config=/shared/config.py --run=/shared/runs/base
#
# All arguments are options of `transformer-jax train`. See docs/multi_device.md.

# JAX runs one process per GPU under Slurm, so both numbers must be the same.
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
# Five minutes before the time limit the processes, not this script, receive SIGTERM.
#SBATCH --signal=TERM@300

set -uo pipefail

# Number of restarts after which a failure is final.
MAX_RESTARTS=${MAX_RESTARTS:-20}
# What runs the command in a container, such as "apptainer exec --nv image.sif", or options of srun.
read -ra container <<<"${CONTAINER:-}"
# srun does not take this over from sbatch.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}

log=$(mktemp)
srun --kill-on-bad-exit=1 "${container[@]}" \
  transformer-jax train --coordinator=auto "$@" 2>&1 | tee "$log"
status=$?

# The status of srun is not enough: that of a process that srun has killed, 143, hides that of the
# process that failed, and is also that of a process that a signal has stopped.
if grep -q '^srun: error: .*: Exited with exit code 2$' "$log"; then
  exit 2 # The input is wrong, and the error is in the log.
elif grep -Eq '^step [0-9]+: stopped by ' "$log"; then
  echo "training was stopped; the job is queued again"
elif [ "$status" -eq 0 ]; then
  exit 0
elif [ "${SLURM_RESTART_COUNT:-0}" -lt "$MAX_RESTARTS" ]; then
  echo "training failed with status $status; the job is queued again"
else
  echo "training failed with status $status after $MAX_RESTARTS restarts"
  exit "$status"
fi
scontrol requeue "$SLURM_JOB_ID"
