"""The script with which Slurm runs a job: the agents of the gang as one task of `srun` per node.

Slurm takes the part of JobSet. Requeueing the batch job starts the next generation of agents, and
the script decides by the exit code whether to ask for it, as JobSet's failure policy does. Slurm
sends SIGTERM to the agents alone at the end of the time limit, and to the shell of the script only
if it ends the job itself, because the job was cancelled or preempted.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from jaxlaunch import contract, isolated
from jaxlaunch.contract import Action
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.job.load import JobSpec
from jaxlaunch.launcher.kubernetes.resources import parse_quantity
from jaxlaunch.launcher.local import paths as local_paths
from jaxlaunch.launcher.local import trainer_process
from jaxlaunch.launcher.local.run import LocalRun, job_variables, make_agent_job
from jaxlaunch.launcher.manifests.failures import exit_codes
from jaxlaunch.runs import layout

_SCRIPT = r"""#!/bin/bash
# From `launcher render --slurm`. The options of the command line of sbatch override these.
{options}

# Slurm sends SIGTERM to this shell only if it ends the job itself; then it also decides whether the
# job starts again.
trap 'is_ended=1' TERM
{secrets}python={python} run={run}
mkdir -p "$run" {folders} || exit {storage}
# As long as this shell holds the lock, `launcher status` shows the job as running.
exec 9<>"$run/{lock}" || exit {storage}
flock --nonblock --conflict-exit-code 9 9
[ "$?" != 9 ] || {{ echo "$run is in use by another run" >&2; exit {refused}; }}
# No process has this start time, so the holder is one of another machine.
echo "$$ slurm" >"$run/{lock}"
cat >"$run/{job_file}" <<'END OF JOB'
{job_yaml}END OF JOB

# The agents recognize each other by this key, which only the owner of the job can read.
key=$run/.slurm-$SLURM_JOB_ID.key
[ -s "$key" ] || (umask 077 && head --bytes 32 /dev/urandom >"$key")
export PATH=${{python%/*}}:$PATH
{variables}
leader=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head --lines 1)
# Not among the ports from which agents of other jobs on this node choose.
export {leader}=$leader:$((10000 + SLURM_JOB_ID % 10000)) {secret}=$key
export {uid}=$SLURM_CLUSTER_NAME-$SLURM_JOB_ID {generation}=${{SLURM_RESTART_COUNT:-0}}

# `launcher status` and `explain` read this file.
record_job() {{
  printf '{{"id": "%s", "uid": "%s", "is_requeued": %s, %s}}\n' \
    "$SLURM_JOB_ID" "${uid}" "$1" {command} >"$run/{slurm}"
}}
record_job false

# The hosts that remain after a failure decide on the result, so no other task may be killed.
srun --kill-on-bad-exit=0 --wait=0 --mpi=none --cpu-bind=none \
  ${{SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}} sh -c '
  export {index}=$((SLURM_NODEID % {hosts})) {slice}=$((SLURM_NODEID / {hosts}))
  exec "$@"' sh "$python" {agent}
code=$?
rm -f "$key"
# The code of a killed agent hides the one on which the others agreed.
if [ "$code" -gt {signal} ]; then
  code=$("$python" -c 'import json, sys
verdict = json.load(open(sys.argv[1]))["verdict"]
print(verdict["code"] if verdict else {lost})' "$run/{summary}" || echo {lost})
fi
[ -z "$is_ended" ] || exit "$code"

case $code in
  {final}) exit "$code" ;;
  # Not counted toward restarts.crash.
  {uncharged}) ;;
  *)
    echo "$code" >>"$run/.slurm-$SLURM_JOB_ID.restarts"
    [ "$(wc --lines <"$run/.slurm-$SLURM_JOB_ID.restarts")" -le {crash_limit} ] || exit "$code"
    ;;
esac
record_job true
# The requeue kills this shell.
if scontrol requeue "$SLURM_JOB_ID"; then sleep 300; else record_job false; fi
exit "$code"
"""
_SECRETS = """\
for name in {}; do
  [ -v "$name" ] || {{ echo "secrets: $name is not set in the environment" >&2; exit {}; }}
done
"""
# Slurm's own limit of --signal.
_MAX_SIGNAL_S = 65535


def render_script(job: JobSpec, local: LocalRun) -> str:
    """Return the batch script of a job. Raises UserError for a job that Slurm cannot run."""
    _check_job(job)
    if job.train is not None:
        trainer_process.require_trainer("train:")
    local_paths.check_utf8_names(local.folder, local.base, local.volumes)
    paths = local_paths.map_paths(job, local.base, local.folder, local.volumes)
    local_paths.check_program(job, paths)
    # Only a new batch job replaces a lost host.
    agent_job = dataclasses.replace(make_agent_job(job, paths, simulate=False), replaces=False)
    variables = job_variables(job, paths, local) | {contract.JOB: agent_job.to_json()}
    exports = (f"export {name}={shlex.quote(text)}" for name, text in sorted(variables.items()))
    final = [contract.DONE, *exit_codes(Action.FAIL)]
    return _SCRIPT.format(
        options="\n".join(f"#SBATCH {option}" for option in _batch_options(job)),
        secrets=_SECRETS.format(" ".join(job.secrets), contract.BAD_SPEC) if job.secrets else "",
        storage=contract.STORAGE,
        refused=contract.BAD_SPEC,
        lock=layout.LOCK,
        python=shlex.quote(sys.executable),
        run=shlex.quote(str(local.folder)),
        folders=shlex.join(str(folder) for folder in paths.mounts.values()),
        job_file=layout.JOB,
        job_yaml=jobs.dump_job(paths.map_job(job)),
        variables="\n".join(exports),
        hosts=job.pods,
        agent=shlex.join(isolated.inline_arguments("jaxlaunch.launcher.agent")),
        summary=layout.SUMMARY,
        slurm=layout.SLURM,
        command=shlex.quote(json.dumps({"folder": str(Path.cwd()), "words": local.words})[1:-1]),
        signal=contract.FIRST_SIGNAL_CODE,
        final="|".join(map(str, final)),
        uncharged="|".join(map(str, exit_codes(Action.RESTART_UNCHARGED))),
        crash_limit=job.restarts.crash,
        lost=contract.LOST,
        leader=contract.LEADER,
        secret=contract.GANG_SECRET,
        uid=contract.UID,
        generation=contract.GENERATION,
        index=contract.INDEX,
        slice=contract.SLICE,
    )


def _check_job(job: JobSpec) -> None:
    """Raise UserError for a key that has no counterpart in Slurm."""
    accelerator = job.accelerator
    if accelerator.platform in ("tpu", "plugin") or accelerator.resource is not None:
        device = accelerator.resource or accelerator.type
        message = f"accelerator: Slurm's script asks for whole GPUs or CPUs, and not for {device}."
        raise UserError(message, "run it on a cluster with `launcher submit`.")
    if job.is_elastic or job.spares:
        message = "hosts, spares: Slurm replaces no single node, so a job there has one size."
        raise UserError(message, f"hosts={job.hosts} spares=0")


def _batch_options(job: JobSpec) -> Iterator[str]:
    """Yield the options of sbatch."""
    yield f"--job-name={job.name}"
    yield f"--nodes={job.pod_count}"
    yield "--ntasks-per-node=1"
    if job.accelerator.platform != "cpu":
        yield f"--gres=gpu:{job.accelerator.per_host}"
    if job.resources.cpu is not None:
        yield f"--cpus-per-task={math.ceil(parse_quantity(job.resources.cpu))}"
    if job.resources.memory is not None:
        yield f"--mem={math.ceil(parse_quantity(job.resources.memory) / 2**20)}M"
    if job.queue is not None:
        yield f"--partition={job.queue}"
    if job.deadline is not None:
        # The agents end the job at its deadline. Slurm is the second line.
        yield f"--time={math.ceil((job.deadline + job.grace) / 60)}"
    yield f"--signal=TERM@{min(math.ceil(job.grace), _MAX_SIGNAL_S)}"
    yield "--requeue"
    yield "--open-mode=append"
    yield f"--chdir={shlex.quote(str(Path.cwd()))}"
