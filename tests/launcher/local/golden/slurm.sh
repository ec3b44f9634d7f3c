#!/bin/bash
# From `launcher render --slurm`. The options of the command line of sbatch override these.
#SBATCH --job-name=first
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=32
#SBATCH --mem=190735M
#SBATCH --partition=research
#SBATCH --time=62
#SBATCH --signal=TERM@90
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --chdir=/home/me/job

# Slurm sends SIGTERM to this shell only if it ends the job itself; then it also decides whether the
# job starts again.
trap 'is_ended=1' TERM
for name in WANDB_API_KEY; do
  [ -v "$name" ] || { echo "secrets: $name is not set in the environment" >&2; exit 64; }
done
python=/opt/venv/bin/python run=/home/me/job/runs/first
mkdir -p "$run" /home/me/job/runs/first/volumes/runs || exit 84
# As long as this shell holds the lock, `launcher status` shows the job as running.
exec 9<>"$run/.lock" || exit 84
flock --nonblock --conflict-exit-code 9 9
[ "$?" != 9 ] || { echo "$run is in use by another run" >&2; exit 64; }
# No process has this start time, so the holder is one of another machine.
echo "$$ slurm" >"$run/.lock"
cat >"$run/job.yaml" <<'END OF JOB'
name: first
accelerator:
  type: h100
  per_host: 4
hosts: 2
slices: 2
queue: research
resources:
  cpu: 31500m
  memory: 200G
restarts:
  crash: 1
grace: 1m30s
deadline: 1h
volumes:
- claim: runs
  path: /runs
env:
  GREETING: it's
secrets:
  WANDB_API_KEY:
    name: wandb
    key: api-key
command:
- python
- train.py
- --out=/runs/x
END OF JOB

# The agents recognize each other by this key, which only the owner of the job can read.
key=$run/.slurm-$SLURM_JOB_ID.key
[ -s "$key" ] || (umask 077 && head --bytes 32 /dev/urandom >"$key")
export PATH=${python%/*}:$PATH
export GREETING='it'"'"'s'
export JAXLAUNCH_HOSTS=2
export JAXLAUNCH_JOB='{"accelerator": "h100", "command": ["python", "train.py", "--out=/home/me/job/runs/first/volumes/runs/x"], "crash_limit": 1, "deadline_s": 3600.0, "devices_per_process": 4, "ephemeral_bytes": null, "grace_s": 90.0, "in_place_limit": 3, "log_bytes": 16777216, "metrics_port": 0, "name": "first", "pinning": null, "platform": "cuda", "preempted_limit": 20, "processes_per_host": 1, "replaces": false, "scratch": {}, "search_paths": {}, "timeouts_s": {"compile": 1800.0, "data": 600.0, "eval": 1800.0, "init": 300.0, "prepare": 86400.0, "rendezvous": 1800.0, "replace": 300.0, "restore": 600.0, "save": 1200.0, "step": null}, "workdir": null}'
export JAXLAUNCH_RUN_DIR=/home/me/job/runs/first
export JAXLAUNCH_SLICES=2
export JAXLAUNCH_TAKE_OVER=0
leader=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head --lines 1)
# Not among the ports from which agents of other jobs on this node choose.
export JAXLAUNCH_LEADER=$leader:$((10000 + SLURM_JOB_ID % 10000)) JAXLAUNCH_GANG_SECRET=$key
export JAXLAUNCH_UID=$SLURM_CLUSTER_NAME-$SLURM_JOB_ID JAXLAUNCH_GENERATION=${SLURM_RESTART_COUNT:-0}

# `launcher status` and `explain` read this file.
record_job() {
  printf '{"id": "%s", "uid": "%s", "is_requeued": %s, %s}\n' \
    "$SLURM_JOB_ID" "$JAXLAUNCH_UID" "$1" '"folder": "/home/me/job", "words": ["it'"'"'s.yaml", "hosts=1"]' >"$run/slurm.json"
}
record_job false

# The hosts that remain after a failure decide on the result, so no other task may be killed.
srun --kill-on-bad-exit=0 --wait=0 --mpi=none --cpu-bind=none \
  ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK} sh -c '
  export JOB_COMPLETION_INDEX=$((SLURM_NODEID % 2)) JAXLAUNCH_SLICE=$((SLURM_NODEID / 2))
  exec "$@"' sh "$python" -I -c 'import os, runpy, sys; sys.path += filter(None, os.environ.get('"'"'PYTHONPATH'"'"', '"'"''"'"').split(os.pathsep)); runpy.run_module('"'"'jaxlaunch.launcher.agent'"'"', run_name='"'"'__main__'"'"', alter_sys=True)'
code=$?
rm -f "$key"
# The code of a killed agent hides the one on which the others agreed.
if [ "$code" -gt 128 ]; then
  code=$("$python" -c 'import json, sys
verdict = json.load(open(sys.argv[1]))["verdict"]
print(verdict["code"] if verdict else 81)' "$run/summary.json" || echo 81)
fi
[ -z "$is_ended" ] || exit "$code"

case $code in
  0|64|65|70|76|77|78|79) exit "$code" ;;
  # Not counted toward restarts.crash.
  80|85) ;;
  *)
    echo "$code" >>"$run/.slurm-$SLURM_JOB_ID.restarts"
    [ "$(wc --lines <"$run/.slurm-$SLURM_JOB_ID.restarts")" -le 1 ] || exit "$code"
    ;;
esac
record_job true
# The requeue kills this shell.
if scontrol requeue "$SLURM_JOB_ID"; then sleep 300; else record_job false; fi
exit "$code"
