"""The contract of launcher, agent and trainer: variables, exit codes, phases, metrics, messages.

The agent brings this file into images without jaxlaunch, so it needs only the standard library and
Python >= 3.10.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import json
import os
import select
import sys
import traceback
from collections.abc import Iterable, Mapping
from typing import Any

# --- environment variables ------------------------------------------------------------------------

# The JobSet or `launcher run` sets these for the agent.

# host:port of host 0's agent.
LEADER = "JAXLAUNCH_LEADER"
# Number of hosts per slice.
HOSTS = "JAXLAUNCH_HOSTS"
# Number of slices.
SLICES = "JAXLAUNCH_SLICES"
# Number of this host's slice.
SLICE = "JAXLAUNCH_SLICE"
# Index of this host in its slice. In a pod, the Job controller sets it.
INDEX = "JOB_COMPLETION_INDEX"
# Identity of the gang, also for the trainer.
UID = "JAXLAUNCH_UID"
# Number of this set of pods.
GENERATION = "JAXLAUNCH_GENERATION"
POD_UID = "JAXLAUNCH_POD_UID"
# The AgentJob as JSON.
JOB = "JAXLAUNCH_JOB"
# The run folder, also for the trainer. Unset if there is none.
RUN_DIR = "JAXLAUNCH_RUN_DIR"
# `notify:` as JSON, whose `url` names a variable. Unset if nobody is to be notified.
NOTIFY = "JAXLAUNCH_NOTIFY"
# The folder of the job's code, which follows that of the agent on PYTHONPATH.
CODE_ROOT = "JAXLAUNCH_CODE_ROOT"

# The role of this host, of a job with `jobs:`, also for its processes.
ROLE = "JAXLAUNCH_ROLE"


def role_addresses_variable(role: str) -> str:
    """Return the variable with the host names of a role's hosts, separated by commas."""
    return f"{ROLE}_{role.upper().replace('-', '_')}_ADDRESSES"


def role_folder_variable(role: str) -> str:
    """Return the variable with the run folder of a role, or its URL. Unset if it has none."""
    return f"{ROLE}_{role.upper().replace('-', '_')}_RUN_DIR"


# The JobSet sets these for the agent.

# The node of the pod, for messages.
NODE = "JAXLAUNCH_NODE"
# The address of the pod, on which the agent listens. Unset: it listens on every interface.
POD_IP = "JAXLAUNCH_POD_IP"
# The file of the gang's secret. Unset: UID alone is its key.
GANG_SECRET = "JAXLAUNCH_GANG_SECRET"
# The bucket of the run folder, of which RUN_DIR is the local copy.
RUN_URL = "JAXLAUNCH_RUN_URL"
# The archive of the job's code, which is unpacked before any process starts.
CODE = "JAXLAUNCH_CODE"

# `launcher run` sets these for the agent.

# Unix time at which the run started. Unset: the agent's own start counts.
STARTED = "JAXLAUNCH_STARTED"
# Seconds for which programs wait for a stalled reader of their output. Unset: 0.
OUTPUT_PATIENCE = "JAXLAUNCH_OUTPUT_PATIENCE"
# The pid of the launcher. An agent whose parent has another pid stops as on SIGTERM.
PARENT = "JAXLAUNCH_PARENT"

# The JobSet or `launcher run` sets these for the trainer.

# The train block as JSON.
TRAIN_SPEC = "TRAIN_SPEC"
# {"tracker": NAME, "name": the job's, "project", "default_project", "group", "labels", "config"} as
# JSON. Unset if the job has no tracker.
TRACKER = "JAXLAUNCH_TRACKER"
# "1": the run becomes the owner of a checkpoint folder that another run owns. From `launcher run`.
TAKE_OVER = "JAXLAUNCH_TAKE_OVER"

# The agent sets these for the processes of a rank.

# The descriptor of the non-blocking pipe on which a process reports its progress.
PROGRESS_FD = "JAXLAUNCH_PROGRESS_FD"
# The path of the same pipe, for a Python whose parent has closed the descriptor.
PROGRESS = "JAXLAUNCH_PROGRESS"
# The path of the Unix socket on which a process serves its metrics.
METRICS = "JAXLAUNCH_METRICS"
# The file that requests a profile: {"id": 1, "steps": 5}.
PROFILE = "JAXLAUNCH_PROFILE"
# The file to which a process writes its stacks on SIGUSR1.
STACKS = "JAXLAUNCH_STACKS"
# Number of this start of the processes, across generations.
ATTEMPT = "JAXLAUNCH_ATTEMPT"
# The newest step that earlier attempts saved, or 0. Unset if no earlier attempt has trained.
SAVED = "JAXLAUNCH_SAVED"
# Seconds for which an operation on storage that fails is repeated.
STORAGE_WAIT = "JAXLAUNCH_STORAGE_WAIT"
# Seconds that jax.distributed.initialize may take.
INIT_TIMEOUT = "JAXLAUNCH_INIT_TIMEOUT"
# host:port of JAX's coordinator. Each attempt has another port.
COORDINATOR = "JAX_COORDINATOR_ADDRESS"
# The address on which JAX's coordinator listens, for host 0. Unset: on every interface.
COORDINATOR_BIND = "JAX_COORDINATOR_BIND_ADDRESS"
NUM_PROCESSES = "JAX_NUM_PROCESSES"
PROCESS_ID = "JAX_PROCESS_ID"
# The number of processes of `max` hosts, for a job with `hosts: {min, max}`.
FULL_PROCESSES = "JAXLAUNCH_FULL_PROCESSES"
# The GPUs of this process, if there are several processes per host.
LOCAL_DEVICE_IDS = "JAX_LOCAL_DEVICE_IDS"
# The number of virtual CPU devices.
NUM_CPU_DEVICES = "JAX_NUM_CPU_DEVICES"

# The site hook sets these for the processes that a Python process starts.

# The pid of the first Python process of the rank, which may be a wrapper.
FIRST_PYTHON = "JAXLAUNCH_FIRST_PYTHON"
# The pid of the rank's program, once it has Role.REPORTS.
REPORTER = "JAXLAUNCH_REPORTER"

# The launcher sets this for a program of the trainer: the descriptor of the file to which the
# program writes why it refuses to run.
REFUSAL_FD = "JAXLAUNCH_REFUSAL_FD"

# --- names of files and other constants -----------------------------------------------------------

# Suffix of the file next to PROGRESS that the process which joins for the rank keeps locked.
JOIN_LOCK = ".joined"
# Suffix of the file next to PROGRESS with the variables that a standby process received when it
# became a rank, as JSON. /proc shows only the variables with which it started.
ACTIVATION = ".activation"
# Files of the gang's TLS, next to GANG_SECRET.
CERTIFICATE, CERTIFICATE_KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"
# Prefix of the name in a gang's certificate, which JAX's coordinator checks.
PEER_URI = "jaxlaunch://job/"
# The annotation of a JobSet with the progress of its job. Agent and launcher write it.
ANNOTATION = "jaxlaunch.io/progress"
# The file that the trainer writes last for a saved step. Without it the step is incomplete.
MANIFEST = "jaxlaunch.manifest.json"
# The file with an evaluation by class, in the run folder.
CLASSIFICATION = "classification.json"
# Programs whose exit code is that of their last command.
SHELLS = frozenset({"ash", "bash", "busybox", "dash", "ksh", "mksh", "sh", "zsh"})

# Timeout of JAX's coordination service for heartbeats. With JAX's default of 100 s it would be
# slower than all checks of jaxlaunch.
HEARTBEAT_TIMEOUT_S = 30
# Timeout of JAX's shutdown barrier, in which a process that has finished waits for the others. One
# of them may export its model for an hour, and JAX would abort it after its default of 300 s. The
# agents notice ranks that died.
SHUTDOWN_TIMEOUT_S = 7 * 24 * 3600

# The largest number of steps of one profile, because a trace is in memory until it ends.
PROFILE_STEPS = 100
# The steps between evaluations, and between saves, of a job that states none.
PAUSE_STEPS = 500
# Final states of a profiled rank. The earlier states are "asked" and "tracing".
PROFILE_END_STATES = ("done", "failed", "gone")

# Axes of the device mesh, outermost first, so that neighbours on mp are the closest devices.
MESH_AXES = ("dp", "fsdp", "ep", "mp")
# The axes that split a batch.
BATCH_AXES = MESH_AXES[:3]

# Phases of a rank's program, in the order of a run. Each has a timeout in TIMEOUTS_S.
PHASES = ("prepare", "init", "restore", "compile", "step", "data", "eval", "save", "done")
# Key of the timeout for all phases from the start of a program to its first step.
FIRST_STEP = "first_step"
# Default timeouts; the job's `timeouts` override them. None: no timeout. A phase ends with the next
# message that changes the phase or its step.
TIMEOUTS_S: Mapping[str, float | None] = {
    "rendezvous": 1800.0,
    "prepare": 86400.0,
    # The wait for the replacement of a lost host.
    "replace": 300.0,
    "init": 300.0,
    "restore": 600.0,
    "compile": 1800.0,
    # A program need not report steps, and each phase of the built-in trainer has its own timeout.
    FIRST_STEP: None,
    # The agent learns this timeout from earlier steps.
    "step": None,
    "data": 600.0,
    "eval": 1800.0,
    "save": 1200.0,
    # From the end of the training to the exit of the process. The job cannot change it.
    "done": 300.0,
}
# Causes to which the seconds of an attempt are attributed: the phases, and the time around them.
CLOCK_CAUSES = ("rendezvous", *PHASES[:-1], "lost_work", "down")
# Causes to which the seconds of a restart are attributed, in order from the fault to the first new
# step. Only a stop has `save`, and `replace` is the wait for a lost host. The seconds from `start`
# on are those of rank 0; a first attempt has only these.
RESTART_CAUSES = (
    *("detect", "decide", "save", "end", "replace"),
    *("start", "import", "rendezvous", "prepare", "init", "restore", "data", "compile"),
    "first_step",
)


class Role(enum.IntEnum):
    """Role of a Python process below the agent.

    A command may start its program through other Python processes, such as `conda run`. The process
    with the highest role is the program of the rank.
    """

    # The first Python process of a command.
    STARTED = 0
    IMPORTED_JAX = 1
    # The process reports progress, or is the built-in trainer.
    REPORTS = 2
    # The process has called jax.distributed.initialize.
    JOINED = 3


class Action(enum.Enum):
    """The action of JobSet's failure policy for an exit code."""

    COMPLETE = "Complete"
    FAIL = "FailJobSet"
    RESTART = "RestartJobSet"
    RESTART_UNCHARGED = "RestartJobSetAndIgnoreMaxRestarts"


class Restart(enum.Enum):
    """The kind of restart that follows an attempt."""

    NEVER = "never"
    # With new pods, or new agents in a run on this machine.
    NEW_PODS = "new_pods"
    # In the same pods at first, then with new pods.
    IN_PLACE = "in_place"


class Limit(enum.Enum):
    """The limit in job.yaml, `restarts.NAME`, that a restart counts toward."""

    # A restart in the same pods counts toward restarts.in_place instead.
    CRASH = "crash"
    PREEMPTED = "preempted"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One row of the exit-code table: how a run's processes ended and what follows from it."""

    code: int
    # The `cause` of a verdict, and a label of metrics.
    cause: str
    meaning: str
    restart: Restart = Restart.NEVER
    # None if the restart is free, or if there is none.
    charged_to: Limit | None = None
    # The `status` of a run that ended with this code.
    status: str = "failed"
    # Somebody stopped the processes, which saved first, so the same command continues the run.
    is_stop: bool = False
    # The user can fix the error, and the trainer's message says how, so no traceback is shown.
    is_user_fixable: bool = False
    # Advice for a job that ended with this code, which replaces the general advice. {again} is the
    # command that submits the job again.
    next_step: str | None = None
    # A section of docs/troubleshooting.md, or None if there is nothing to fix.
    section: str | None = "exit-codes"

    @property
    def restarts(self) -> bool:
        """Return whether another attempt follows, as long as the restarts are not used up."""
        return self.restart is not Restart.NEVER

    @property
    def in_place(self) -> bool:
        """Return whether the same pods may try again in place."""
        return self.restart is Restart.IN_PLACE

    @property
    def ends_local_run(self) -> bool:
        """Return whether a run on this machine ends: it does not restart after a stop."""
        return self.is_stop or not self.restarts

    @property
    def action(self) -> Action:
        """Return the action of JobSet."""
        if self.restarts:
            is_charged = self.charged_to is Limit.CRASH
            return Action.RESTART if is_charged else Action.RESTART_UNCHARGED
        return Action.COMPLETE if self.code == DONE else Action.FAIL


DONE, BAD_SPEC, BAD_DATA, STARTUP = 0, 64, 65, 70
NOT_FINITE, DEADLINE, NO_CHECKPOINT, NO_PROGRESS, PREEMPTED = 76, 77, 78, 79, 80
LOST, HANG, CRASH, STORAGE, REQUEUED, REQUEUED_CHARGED, KILLED = 81, 82, 83, 84, 85, 86, 137
# The `cause` of a verdict with PREEMPTED after Ctrl-C.
INTERRUPTED = "interrupted"
# Exit code of an agent that is stopped while the rest of its gang waits for the pod that replaces
# it. It is the shell's code for SIGTERM. The Job creates that pod and does not count a failure.
LEFT_GANG = 143
# Codes from this one on show which signal ended a container. No agent ends its gang with them.
FIRST_SIGNAL_CODE = 128

# The restart after a fault: in the same pods at first, then with new pods, toward restarts.crash.
_FAULT_RESTART = Restart.IN_PLACE, Limit.CRASH
_TABLE = (
    Outcome(DONE, "done", "every process finished the last step", status="done", section=None),
    Outcome(
        BAD_SPEC,
        "bad_spec",
        "the job's specification is wrong",
        is_user_fixable=True,
        next_step="fix what the message names in job.yaml, then `{again}`",
    ),
    Outcome(
        BAD_DATA,
        "bad_data",
        "the data is missing or wrong",
        is_user_fixable=True,
        next_step="fix the data or its path, then `{again}`",
        section="data-and-loss",
    ),
    Outcome(
        STARTUP,
        "startup",
        "the program raised before its first step",
        next_step="fix the program: the traceback shows where; then `{again}`",
    ),
    Outcome(
        NOT_FINITE,
        "not_finite",
        "loss or gradients are not finite",
        is_user_fixable=True,
        next_step="fix the data if it is named, else lower the learning rate; then `{again}`",
        section="data-and-loss",
    ),
    Outcome(DEADLINE, "deadline", "the job's deadline passed", status="stopped"),
    Outcome(
        NO_CHECKPOINT,
        "no_checkpoint",
        "no valid checkpoint, or another run owns the folder",
        is_user_fixable=True,
        next_step="check the checkpoint folder: is it complete, and does no other run own it?",
        section="checkpoints-and-storage",
    ),
    Outcome(
        NO_PROGRESS,
        "no_progress",
        "restarts without a new committed step",
        next_step="fix the first error; another try does not help.",
    ),
    Outcome(
        PREEMPTED,
        "preempted",
        "stopped from outside",
        Restart.NEW_PODS,
        Limit.PREEMPTED,
        status="stopped",
        is_stop=True,
        section=None,
    ),
    Outcome(
        LOST,
        "lost",
        "an agent or its host was lost",
        *_FAULT_RESTART,
        section="rendezvous-and-lost-hosts",
    ),
    Outcome(
        HANG,
        "hang",
        "a process stopped making progress",
        *_FAULT_RESTART,
        section="hangs-and-timeouts",
    ),
    Outcome(CRASH, "crash", "a process crashed", *_FAULT_RESTART),
    Outcome(
        STORAGE,
        "storage",
        "storage failed",
        *_FAULT_RESTART,
        is_user_fixable=True,
        section="checkpoints-and-storage",
    ),
    Outcome(
        REQUEUED,
        "requeued",
        "the program asked to be run again (restarts.codes)",
        Restart.IN_PLACE,
        Limit.PREEMPTED,
    ),
    Outcome(
        REQUEUED_CHARGED,
        "requeued_charged",
        "the program asked to be run again, and its restarts are used up",
        *_FAULT_RESTART,
    ),
    Outcome(
        KILLED,
        "killed",
        "a process was killed, by the kernel or a person",
        *_FAULT_RESTART,
        section="out-of-memory",
    ),
)
OUTCOMES: Mapping[int, Outcome] = {row.code: row for row in _TABLE}
# Codes that end a whole gang, in a job whose lost pods are otherwise replaced one by one.
GANG_CODES = tuple(sorted(code for code in OUTCOMES if DONE < code < FIRST_SIGNAL_CODE))


class Requeue(str, enum.Enum):
    """The restart for which a program asks with an exit code of `restarts.codes`."""

    # In the same pods, unless restarts.in_place is 0. It counts like a preemption.
    FREE = "free"
    # In the same pods at first, then with new pods. It counts like a crash.
    CHARGED = "charged"
    FREE_NEW_PODS = "free-new-pods"
    CHARGED_NEW_PODS = "charged-new-pods"

    @property
    def code(self) -> int:
        """Exit code of the gang."""
        return REQUEUED if self in (Requeue.FREE, Requeue.FREE_NEW_PODS) else REQUEUED_CHARGED

    @property
    def needs_new_pods(self) -> bool:
        """Return whether the pods are replaced at once."""
        return self in (Requeue.FREE_NEW_PODS, Requeue.CHARGED_NEW_PODS)


# The module of the trainer's exceptions. Each has the `code` with which it ends a run.
ERRORS_MODULE = "jaxlaunch.trainer.errors"


def exception_code(error: BaseException) -> int | None:
    """Return the exit code of an exception of the trainer, or None for any other exception."""
    is_trainer_error = any(base.__module__ == ERRORS_MODULE for base in type(error).__mro__)
    code = getattr(error, "code", None) if is_trainer_error else None
    return code if code in OUTCOMES else None


def agent_exit_code(verdict_code: int, *, does_gang_continue: bool) -> int:
    """Return the exit code of an agent in a job whose lost pods are replaced one by one.

    The code tells the Job whether the whole gang has ended, or only this pod.

    Args:
        verdict_code: Code of the verdict on the gang.
        does_gang_continue: Whether the gang continues without this agent.
    """
    if does_gang_continue:
        return LEFT_GANG
    return verdict_code if verdict_code < FIRST_SIGNAL_CODE else CRASH


def outcome_for_code(code: int) -> Outcome:
    """Return the outcome for an exit code. A code outside the table is treated as a kill."""
    return OUTCOMES.get(code) or dataclasses.replace(OUTCOMES[KILLED], code=code)


# Fields of an AgentJob that its JSON has only if they are set.
_OPTIONAL_FIELDS = ("sizes", "requeue_codes", "independent", "hold_s", "is_role", "may_fail")


@dataclasses.dataclass(frozen=True)
class AgentJob:
    """The part of a job that its agents read. It is the same on every host."""

    name: str
    # None for the built-in trainer.
    command: tuple[str, ...] | None = None
    processes_per_host: int = 1
    # A value of accelerators.Platform. It decides which device variable a process gets.
    platform: str = "cpu"
    devices_per_process: int = 1
    # Timeouts that differ from TIMEOUTS_S, by phase.
    timeouts_s: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    # Restarts with new pods that count toward restarts.crash.
    crash_limit: int = 5
    in_place_limit: int = 3
    # A lost host is replaced alone, while the others wait for it.
    replaces: bool = False
    # Numbers of hosts that may hold ranks, ascending. Hosts beyond the largest number are spares.
    # Empty if all hosts must hold ranks.
    sizes: tuple[int, ...] = ()
    # Preemptions in a row without a newly committed step. None for no limit.
    preempted_limit: int | None = None
    # Exit codes with which a program asks for another run.
    requeue_codes: Mapping[int, Requeue] = dataclasses.field(default_factory=dict)
    grace_s: float = 60.0
    # Each process may use JAX without having joined the others.
    independent: bool = False
    # For the whole job with all of its restarts. None for no limit.
    deadline_s: float | None = None
    # How long the pods of a job that failed for good stay for a look. None for no such time.
    hold_s: float | None = None
    # 0 for any free port.
    metrics_port: int = 0
    workdir: str | None = None
    # Folders that are prepended to search paths, by the variable of the path.
    search_paths: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # The type of the accelerator in job.yaml and the cluster defaults.
    accelerator: str = "cpu"
    # The network of the job, if programs pin memory for it.
    pinning: str | None = None
    # A pod that uses more of its node's disk is evicted. None for no limit.
    ephemeral_bytes: int | None = None
    # Folders on that disk, with the limit in bytes that each has of its own.
    scratch: Mapping[str, int | None] = dataclasses.field(default_factory=dict)
    # The size to which the run folder keeps the output of each rank.
    log_bytes: int = 16 * 1024 * 1024
    # The gang is a role of a job with others.
    is_role: bool = False
    # A role whose failure does not end the job: its pods end with exit code 0.
    may_fail: bool = False

    @property
    def phase_timeouts_s(self) -> dict[str, float | None]:
        """Return the timeout of every phase, None for no timeout or for a learned one ("step")."""
        return {**TIMEOUTS_S, **self.timeouts_s}

    def to_json(self) -> str:
        """Return the value of JAXLAUNCH_JOB, which is the same text for equal jobs."""
        fields = {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if name not in _OPTIONAL_FIELDS or value
        }
        return json.dumps(fields, sort_keys=True)


class Key:
    """Keys of a step's metrics, which the train step creates and metrics.jsonl records."""

    STEP, EPOCH, STEP_S, PART_S = "step", "epoch", "step_s", "{part}_s"
    LOSS, GRAD_NORM, LEARNING_RATE, LOSS_SCALE = "loss", "grad_norm", "learning_rate", "loss_scale"
    EXAMPLES_PER_S = "examples_per_s"
    TOKENS_PER_S = "tokens_per_s"
    TARGETS_PER_S = "targets_per_s"
    MFU = "mfu"
    WALL_S, TIME, EXAMPLES = "wall_s", "time", "examples"
    # Memory of the process and of its fullest device, memory of the host, and the share of the
    # host's processors that is busy.
    PROCESS_GIB, DEVICE_GIB, DEVICE_LIMIT_GIB = "process_gib", "device_gib", "device_limit_gib"
    HOST_GIB, HOST_LIMIT_GIB, HOST_CPU = "host_gib", "host_limit_gib", "host_cpu"
    # The keys from here on are not written to metrics.jsonl.
    # The step with the best evaluation so far.
    BEST_STEP = "best_step"
    # WEIGHT and TOKENS are sums over all ranks: the weights of the targets, and the tokens without
    # padding.
    FINITE, SKIPPED, WEIGHT, TOKENS = "finite", "skipped", "weight", "real_tokens"
    # The routing of tokens to experts, among the sums of an evaluation.
    ROUTING = "routing"


# Parts into which the training loop divides its time.
LOOP_PARTS = ("data", "host", "device", "save", "eval")
# Prefix of the metrics of the last evaluation in the newest metrics.
EVAL_PREFIX = "eval_"


@dataclasses.dataclass(frozen=True)
class Metric:
    """A Prometheus metric, which is a row of the table in docs/metrics.md."""

    name: str
    # "counter", "gauge" or "histogram".
    type: str
    # The unit of a sample, or "" if it has none.
    unit: str
    help: str
    labels: tuple[str, ...]
    # "agent" or "trainer", which always exports the metric: as NaN while its value is unknown.
    exporter: str
    # The key in metrics.jsonl, or None if the metric is not written there.
    key: str | None = None


def _metric(
    exporter: str, type: str, name: str, unit: str, help: str, *labels: str, key: str | None = None
) -> Metric:
    ranks = ("rank",) if exporter == "trainer" else ()
    return Metric(name, type, unit, help, (*ranks, *labels), exporter, key)


_agent_counter = functools.partial(_metric, "agent", "counter")
_agent_gauge = functools.partial(_metric, "agent", "gauge")
_trainer_counter = functools.partial(_metric, "trainer", "counter")
_trainer_gauge = functools.partial(_metric, "trainer", "gauge")
_trainer_histogram = functools.partial(_metric, "trainer", "histogram")

# All metrics that an agent serves while the built-in trainer runs. The agent gets those of the
# trainer from the process of each rank.
PROMETHEUS: tuple[Metric, ...] = (
    _agent_gauge(
        "jaxlaunch_build_info",
        "",
        "The value is always 1; the labels are the versions.",
        "version",
        "python",
    ),
    _agent_gauge(
        "jaxlaunch_goodput_ratio",
        "ratio",
        "Share of all seconds that was spent on steps that were kept.",
    ),
    _agent_gauge(
        "jaxlaunch_clock_seconds",
        "seconds",
        "Seconds of the run, by what they were spent on.",
        "cause",
    ),
    _agent_counter(
        "jaxlaunch_restarts_total",
        "attempts",
        "Attempts that ended, by the cause of the job result.",
        "cause",
    ),
    _agent_gauge(
        "jaxlaunch_restarts_left", "restarts", "Restarts left before the run fails.", "limit"
    ),
    _agent_gauge("jaxlaunch_last_verdict_code", "exit code", "Exit code of the newest job result."),
    _agent_gauge("jaxlaunch_generation", "", "Number of the set of pods that this one belongs to."),
    _agent_gauge(
        "jaxlaunch_attempt",
        "",
        "Number of this start of the processes, counted across JobSet restarts.",
    ),
    _agent_gauge("jaxlaunch_children_up", "processes", "Processes of this host that are alive."),
    _agent_gauge(
        "jaxlaunch_heartbeat_age_seconds",
        "seconds",
        "Seconds since the last message of the agent that has been silent longest.",
    ),
    _agent_gauge(
        "jaxlaunch_host_memory_bytes",
        "bytes",
        "Memory of this container, by kind: in_use or limit.",
        "kind",
    ),
    _agent_gauge(
        "jaxlaunch_phase",
        "",
        "The value is 1 for the phase that a rank is in, and 0 for the others.",
        "rank",
        "phase",
    ),
    _agent_gauge(
        "jaxlaunch_phase_timeout_left_seconds",
        "seconds",
        "Seconds until a rank counts as hung.",
        "rank",
    ),
    _agent_gauge(
        "jaxlaunch_rank_step", "steps", "Steps that a rank has reported as complete.", "rank"
    ),
    _agent_gauge(
        "jaxlaunch_rank_lag_steps",
        "steps",
        "Steps by which a rank is behind the one that is furthest.",
        "rank",
    ),
    _trainer_gauge(
        "jaxlaunch_step",
        "steps",
        "Optimizer steps that are complete, including restored ones.",
        key=Key.STEP,
    ),
    _trainer_gauge("jaxlaunch_target_step", "steps", "Optimizer steps of the whole run."),
    _trainer_counter("jaxlaunch_steps_total", "steps", "Optimizer steps done by this process."),
    _trainer_histogram(
        "jaxlaunch_step_seconds",
        "seconds",
        "Time of a step, without evaluations and saves.",
        key=Key.STEP_S,
    ),
    _trainer_counter(
        "jaxlaunch_part_seconds_total",
        "seconds",
        "Time of the loop, by part: data, host, device, save or eval.",
        "part",
        key=Key.PART_S,
    ),
    _trainer_counter(
        "jaxlaunch_examples_total", "examples", "Examples trained on, by all ranks together."
    ),
    _trainer_counter(
        "jaxlaunch_tokens_total", "tokens", "Tokens read by all ranks, without padding."
    ),
    _trainer_counter(
        "jaxlaunch_targets_total",
        "targets",
        "Tokens that were predicted and have a weight, of all ranks.",
    ),
    _trainer_gauge(
        "jaxlaunch_examples_per_second",
        "examples/s",
        "Examples per second of all ranks together, after warm-up.",
        key=Key.EXAMPLES_PER_S,
    ),
    _trainer_gauge(
        "jaxlaunch_tokens_per_second",
        "tokens/s",
        "Tokens read per second by all ranks together, without padding, after warm-up.",
        key=Key.TOKENS_PER_S,
    ),
    _trainer_gauge(
        "jaxlaunch_targets_per_second",
        "targets/s",
        "Predicted tokens that have a weight, per second, of all ranks together, after warm-up.",
        key=Key.TARGETS_PER_S,
    ),
    _trainer_gauge(
        "jaxlaunch_epoch",
        "epochs",
        "Passes over the data, including the fraction of the current one.",
        key=Key.EPOCH,
    ),
    _trainer_gauge(
        "jaxlaunch_model_flops_per_step", "FLOPs", "Floating-point operations of the model."
    ),
    _trainer_gauge(
        "jaxlaunch_mfu_ratio",
        "ratio",
        "Model FLOPs per second divided by the peak of all devices.",
        key=Key.MFU,
    ),
    _trainer_gauge("jaxlaunch_loss", "", "Training loss at the last logged step.", key=Key.LOSS),
    _trainer_gauge(
        "jaxlaunch_grad_norm",
        "",
        "Global norm of the gradients before clipping.",
        key=Key.GRAD_NORM,
    ),
    _trainer_gauge(
        "jaxlaunch_learning_rate",
        "",
        "Learning rate of the last logged step.",
        key=Key.LEARNING_RATE,
    ),
    _trainer_gauge(
        "jaxlaunch_loss_scale", "", "Loss scale of float16 training.", key=Key.LOSS_SCALE
    ),
    _trainer_counter(
        "jaxlaunch_skipped_steps_total",
        "steps",
        "Steps that were skipped because float16 overflowed.",
    ),
    _trainer_counter(
        "jaxlaunch_empty_steps_total",
        "steps",
        "Steps whose batch had no target; they change nothing.",
    ),
    _trainer_counter(
        "jaxlaunch_bucket_read_bytes_total",
        "bytes",
        "Bytes of data and weights that this process has downloaded from gs:// and s3://.",
        key="bucket_read_bytes",
    ),
    _trainer_gauge(
        "jaxlaunch_task_metric", "", "Metrics of the task, including its loss.", "split", "metric"
    ),
    _trainer_gauge("jaxlaunch_resident_memory_bytes", "bytes", "Host memory of the process."),
    _trainer_gauge(
        "jaxlaunch_device_memory_bytes",
        "bytes",
        "Memory of a local device, by kind: in_use, peak or limit.",
        "device",
        "kind",
    ),
    _trainer_gauge("jaxlaunch_checkpoint_step", "steps", "Newest step that is safe on storage."),
    _trainer_gauge(
        "jaxlaunch_checkpoint_age_seconds",
        "seconds",
        "Seconds since the newest commit, or since the start if there is none yet.",
    ),
    _trainer_counter("jaxlaunch_checkpoint_saves_total", "saves", "Saves that this process began."),
    _trainer_counter(
        "jaxlaunch_checkpoint_blocking_seconds_total",
        "seconds",
        "Seconds that the loop waited for saves.",
    ),
    _trainer_counter(
        "jaxlaunch_compile_cache_hits_total",
        "programs",
        "Programs that were found in the compile cache.",
    ),
    _trainer_counter(
        "jaxlaunch_compile_cache_misses_total",
        "programs",
        "Programs that were not found in the compile cache.",
    ),
)

# Names that a metric of a task must not have, because metrics.jsonl has another number under them.
RESERVED_METRICS = frozenset(
    {Key.WALL_S, Key.TIME, Key.EXAMPLES, Key.FINITE, Key.SKIPPED, Key.WEIGHT, Key.ROUTING}
    | {Key.PROCESS_GIB, Key.DEVICE_GIB, Key.DEVICE_LIMIT_GIB}
    | {Key.HOST_GIB, Key.HOST_LIMIT_GIB, Key.HOST_CPU}
    | {row.key for row in PROMETHEUS if row.key is not None and row.key != Key.PART_S}
    | {Key.PART_S.format(part=part) for part in LOOP_PARTS}
)

# --- messages of a rank's processes ---------------------------------------------------------------

# In bytes. A longer line is cut, so that a traceback cannot fill the agent's memory.
MAX_LINE = 64 * 1024
# A message and a traceback of these lengths fit into a line at six bytes per character, the size of
# most JSON escapes.
MESSAGE_CHARS, TRACEBACK_CHARS = 2_000, 8_000


def _describe_quit(error: BaseException) -> str:
    """Return a sentence about `breakpoint()` without a terminal; "" for other exceptions.

    BdbQuit, which a debugger raises at the end of its input, has no message of its own.
    """
    kind = type(error)
    if (kind.__module__, kind.__qualname__) != ("bdb", "BdbQuit") or os.isatty(0):
        return ""
    return (
        "the debugger has quit; the program's standard input is not a terminal, so breakpoint() "
        "cannot read from it (`launcher help debugging#pdb-in-a-rank` shows another way)"
    )


def error_line(error: BaseException, code: int | None, custom_message: str = "") -> dict[str, Any]:
    """Return the message that reports an exception.

    Args:
        error: The exception.
        code: The exit code that follows, or None outside the trainer.
        custom_message: A text that replaces that of the exception, unless it is empty.
    """
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        message = custom_message or _describe_quit(error) or str(error)
    except Exception as str_error:
        # The class may be the user's, so `str` may raise anything.
        message = f"<its message cannot be read: {type(str_error).__qualname__}>"
    fields = {"type": type(error).__qualname__, "message": message[:MESSAGE_CHARS], "code": code}
    line = {"error": {**fields, "traceback": text[-TRACEBACK_CHARS:]}}
    if len(json.dumps(line)) < MAX_LINE:
        return line
    # Characters such as emoji take twelve bytes in JSON.
    return {"error": {**fields, "traceback": text[-TRACEBACK_CHARS // 4 :]}}


# Prefix of a line with which the planner reports its progress to the launcher.
COMPILING_PREFIX = "compiling: "


def refusal_line(message: str, code: int) -> str:
    """Return the log line for an error that the user can fix and that ends a program."""
    return f"trainer: {join_lines(message)} (exit {code})"


def refusal_record(message: str, code: int) -> dict[str, Any]:
    """Return the progress message for an error that the user can fix and that ends a program."""
    return {"refusal": {"message": join_lines(message), "code": code}}


def refuse(message: str, code: int) -> None:
    """Report an error that the user can fix to the launcher, or else on stderr."""
    fd = os.environ.get(REFUSAL_FD)
    if fd is None or not send(int(fd), refusal_record(message, code)):
        print(refusal_line(message, code), file=sys.stderr, flush=True)


def join_lines(text: str) -> str:
    """Return the text without line breaks."""
    return " ".join(line.strip() for line in text.splitlines() if line.strip())


def pid_namespace() -> int | None:
    """Return the number of this process's PID namespace, or None without /proc."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return None


# Descriptors of the pipes whose last line is incomplete.
_cut_fds: set[int] = set()


def _is_writable(fd: int, wait_s: float = 1.0) -> bool:
    # select() does not accept descriptors above 1,023.
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(1000 * wait_s))


def send(fd: int, message: Mapping[str, Any]) -> bool:
    """Write one message to the progress pipe. Return False if the pipe is full or closed.

    A line of at most PIPE_BUF bytes is written completely or not at all, and never blocks. A longer
    one, such as a traceback, may wait for a second; what does not fit then is dropped, and the next
    message begins with a newline, so that the reader can parse it.

    A message is a JSON object with one of these keys. Messages that are not from the program of the
    rank have the `pid` of the process that wrote them.
      {"hello": "site" | "trainer", "python": "3.11.7", "jax": "0.10.2" | null}
          The first message of the site hook, with `role`, `pid` and `pid_namespace`, or of the
          trainer.
      {"role": 3, "pid": 4711, "pid_namespace": 4026531836}
          The process has this Role from now on.
      {"phase": "step", "step": 120}
          The current phase. `step` is the number of complete optimizer steps.
      {"total": 600}
          The number of steps of the whole run.
      {"joining": true}
          jax.distributed.initialize of a program waits for the other ranks; false: it has ended.
      {"joined": true}
          All ranks have connected to rank 0. From here on this rank does not wait for others.
      {"restored": 80}
          Training continues from this step, which an earlier attempt committed.
      {"committed": 120}
          This step is on storage, with its manifest.
      {"metrics": {...}}
          The newest metrics, from process 0. The last message before the end has the final ones.
      {"stopped": {"step": 37, "saved": true, "note": "..."}}
          The result of a stop by SIGTERM.
      {"profile": {"id": 1, "state": "tracing" | "done" | "failed", ...}}
          The state of the profile that PROFILE requested.
      {"note": "..."}
          A note for the summary of the run, such as on a damaged checkpoint.
      {"error": {"type", "message", "traceback", "code"}}
          From error_line. `code` is null for an exception that is not the trainer's. With
          `"fatal": true` the job ends, even if the processes continue. With `"handled": true` a
          worker of a pool has sent the exception to its parent and continues.
      {"child": {"pid": 4712, "code": -9}}
          A child of a wrapper has ended with this exit code, or with minus this signal.
      {"stops": 4712}
          A wrapper sends a signal that ends this process or process group.
      {"refusal": {"message", "code"}}
          From refusal_record. The agent writes it to the log of the rank.
      {"atexit": true, "waits": true, "processes": 2, "code": 42}
          The interpreter is exiting. `waits`: it enters JAX's shutdown barrier next. `processes`:
          JAX's number of processes, or 0 if no device was used. `code`: that of the last sys.exit.
      {"waits": false}
          The process has entered (true) or left JAX's shutdown barrier, and continues.
    """
    line = json.dumps(message, separators=(",", ":"), default=str).encode()[: MAX_LINE - 1] + b"\n"
    data = memoryview(b"\n" + line if fd in _cut_fds else line)
    rest = data
    try:
        while rest:
            rest = rest[os.write(fd, rest) :]
            if rest and not _is_writable(fd):
                break
    except OSError:
        # The pipe is full or closed.
        pass
    if not rest:
        _cut_fds.discard(fd)
    elif len(rest) < len(data):
        _cut_fds.add(fd)
    return not rest


# --- addresses ------------------------------------------------------------------------------------


def loopback_host(coordinator: str) -> str | None:
    """Return the host of a coordinator on loopback, or None if other machines can reach it."""
    host = coordinator.rpartition(":")[0].strip("[]")
    return host if host in ("127.0.0.1", "::1", "localhost") else None


# Variables that name a proxy, in lower or upper case. gRPC reads the first three in this order, but
# only in lower case.
PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy")
# Variables with the hosts that are reached without a proxy. gRPC reads no_grpc_proxy or else
# no_proxy, in lower case.
NO_GRPC_PROXY, NO_PROXY = "no_grpc_proxy", "no_proxy"
# curl and Python support this entry only if it is the only one, and gRPC does not support it.
ALL_HOSTS = "*"


def find_proxies(environ: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that set a proxy."""
    names = (name for name in environ if name.lower() in PROXY_VARIABLES)
    return [name for name in names if environ[name].strip()]


def bypass_proxies(environ: Mapping[str, str], hosts: Iterable[str]) -> dict[str, str]:
    """Return the variables with which `hosts` are reached without a proxy, if there is a proxy.

    gRPC compares the end of a host's name with the entries before it resolves the name. An entry
    such as 10.0.0.0/8 therefore does not apply to names, and JAX would try to reach its coordinator
    through the proxy until its timeout.

    Args:
        environ: Variables of the process, whose own entries are kept.
        hosts: Names and addresses. An entry that begins with a dot matches all names with this end.
    """
    if not find_proxies(environ):
        return {}
    new_entries = [host for host in hosts if host]

    def add_hosts(value: str, *, is_grpc: bool) -> str:
        entries = [entry.strip() for entry in value.split(",") if entry.strip()]
        if ALL_HOSTS in entries and not is_grpc:
            return value
        return ",".join(dict.fromkeys([*entries, *new_entries]))

    # Some programs prefer the upper case and others the lower case. If only one of the two is set,
    # its entries are copied to the other, which would otherwise hide them.
    upper = environ.get(NO_PROXY.upper()) or environ.get(NO_PROXY, "")
    lower = environ.get(NO_PROXY) or upper
    return {
        NO_PROXY: add_hosts(lower, is_grpc=False),
        NO_PROXY.upper(): add_hosts(upper, is_grpc=False),
        NO_GRPC_PROXY: add_hosts(environ.get(NO_GRPC_PROXY) or lower, is_grpc=True),
    }


def gang_hosts(environ: Mapping[str, str], domain: str = "") -> list[str]:
    """Return the names and addresses of the hosts of this process's gang.

    Args:
        environ: Variables of an agent or of its processes.
        domain: Domain that completes the names of the pods.
    """
    coordinator, leader = (
        environ.get(name, "").rpartition(":")[0].strip("[]") for name in (COORDINATOR, LEADER)
    )
    hosts = ["localhost", "127.0.0.1", "::1", leader, coordinator, environ.get(POD_IP, "")]
    # All pods of a JobSet have names below that of its headless service.
    _, dot, service = leader.partition(".")
    if dot and not service.replace(".", "").isdecimal():
        hosts += [f".{service}", f".{service}.{domain}" if domain else ""]
    # On TPU, JAX reads the hosts from variables of the platform.
    hosts += environ.get("TPU_WORKER_HOSTNAMES", "").split(",")
    hosts.append(environ.get("MEGASCALE_COORDINATOR_ADDRESS", "").partition(":")[0])
    return [host for host in dict.fromkeys(hosts) if host]


def host_name_fault(coordinator: str) -> str | None:
    """Return the reason why JAX cannot connect CPU devices of several machines, or None if it can.

    JAX connects CPU devices, even those of a single process, through the address of this host's
    name. If the name has no address, JAX only reports that it found no such devices. If the
    coordinator is on loopback, the site hook makes JAX use the loopback address instead.
    """
    # Imported here to save time, because every Python process below the agent imports this file.
    import socket

    if loopback_host(coordinator) is not None:
        return None
    name = socket.gethostname()
    fix = (
        f"and JAX connects CPU devices at its address: add the line `ADDRESS {name}` to "
        "/etc/hosts, with the address at which other hosts reach this one"
    )
    try:
        addresses = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return f"this host's own name, {name}, does not resolve ({error.strerror}), {fix}"
    for family, kind, protocol, _, address in addresses:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return None
    return (
        f"this host's own name, {name}, resolves to {addresses[0][4][0]}, which is not an "
        f"address of this host, {fix}"
    )
