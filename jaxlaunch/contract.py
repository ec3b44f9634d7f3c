"""The contract of launcher, agent and trainer: variables, exit codes, phases, metrics, messages.

Standard library only and Python >= 3.10: the agent carries this file into images that hold nothing
else of ours.
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

# Environment variables: who sets them -> who reads them.
LEADER = "JAXLAUNCH_LEADER"  # jobset, run -> agent: host:port of host 0's agent
HOSTS = "JAXLAUNCH_HOSTS"  # jobset, run -> agent: pods per slice
SLICES = "JAXLAUNCH_SLICES"  # jobset, run -> agent
SLICE = "JAXLAUNCH_SLICE"  # jobset, run -> agent: this pod's slice
INDEX = "JOB_COMPLETION_INDEX"  # Job controller, run -> agent: this pod's index in its slice
UID = "JAXLAUNCH_UID"  # jobset, run -> agent, trainer: whose gang this is
GENERATION = "JAXLAUNCH_GENERATION"  # jobset, run -> agent: which set of pods
NODE = "JAXLAUNCH_NODE"  # jobset -> agent: where the pod runs, for messages
POD_UID = "JAXLAUNCH_POD_UID"  # jobset, run -> agent: the UID of this pod
# Jobset -> agent: the pod's address, which it listens on; unset: on every interface.
POD_IP = "JAXLAUNCH_POD_IP"
# Jobset -> agent: the file of the gang's secret; unset: UID alone is its key.
GANG_SECRET = "JAXLAUNCH_GANG_SECRET"
# Suffix of the file next to PROGRESS that is locked by the process which joins for the rank.
JOIN_LOCK = ".joined"
# Files next to GANG_SECRET, of the gang's TLS.
CERTIFICATE, CERTIFICATE_KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"
# Prefix of the name in a gang's certificate, which JAX's coordinator checks.
PEER_URI = "jaxlaunch://job/"
JOB = "JAXLAUNCH_JOB"  # jobset, run -> agent: AgentJob as JSON
RUN_DIR = "JAXLAUNCH_RUN_DIR"  # jobset, run -> agent, trainer: the run folder; unset: none
# Jobset -> agent: the bucket of the run folder; RUN_DIR is its local copy.
RUN_URL = "JAXLAUNCH_RUN_URL"
TRAIN_SPEC = "TRAIN_SPEC"  # jobset, run -> trainer: the train block as JSON
# Jobset, run -> agent: `notify:` as JSON; its url names a variable; unset: nobody.
NOTIFY = "JAXLAUNCH_NOTIFY"
# Jobset, run -> trainer: {"tracker": NAME, "name": the job's, "project", "default_project",
# "group", "labels", "config"} as JSON; unset: none.
TRACKER = "JAXLAUNCH_TRACKER"
# Run -> agent: Unix time at which the run started; unset: when the agent did.
STARTED = "JAXLAUNCH_STARTED"
# Run -> agent: seconds for which programs wait for a stalled reader of their output; unset: 0.
OUTPUT_PATIENCE = "JAXLAUNCH_OUTPUT_PATIENCE"
# Run -> agent: a pid; an agent whose parent is gone stops as on SIGTERM.
PARENT = "JAXLAUNCH_PARENT"
# Jobset -> agent: the archive of the job's code, unpacked before any process starts.
CODE = "JAXLAUNCH_CODE"
# Jobset, run -> agent: the folder of the job's code, first on PYTHONPATH.
CODE_ROOT = "JAXLAUNCH_CODE_ROOT"
TAKE_OVER = "JAXLAUNCH_TAKE_OVER"  # run -> trainer: "1" takes a checkpoint folder from its owner
PROGRESS_FD = "JAXLAUNCH_PROGRESS_FD"  # agent -> child: where it reports, a non-blocking pipe
METRICS = "JAXLAUNCH_METRICS"  # agent -> child: Unix socket path it serves its metrics text on
# Agent -> child: the file that requests a profile: {"id": 1, "steps": 5}.
PROFILE = "JAXLAUNCH_PROFILE"
STACKS = "JAXLAUNCH_STACKS"  # agent -> child: the file its stacks are written to on SIGUSR1
# Agent -> child: the name of that pipe, for a Python whose parent has closed the descriptor.
PROGRESS = "JAXLAUNCH_PROGRESS"
# Site hook -> what a Python starts: the pid of the first Python of the rank, maybe a wrapper.
FIRST_PYTHON = "JAXLAUNCH_FIRST_PYTHON"
# Site hook -> what the program starts: the pid of the rank's program, from Role.REPORTS on.
REPORTER = "JAXLAUNCH_REPORTER"
# Agent -> child: which start of the children this is, across generations.
ATTEMPT = "JAXLAUNCH_ATTEMPT"
# Agent -> child: the newest saved step of earlier attempts, 0 if they saved none; unset: no earlier
# attempt has trained.
SAVED = "JAXLAUNCH_SAVED"
# Launcher -> program of the trainer: a file that it writes its refusal to.
REFUSAL_FD = "JAXLAUNCH_REFUSAL_FD"
# Agent -> child: seconds for which storage that fails is tried again.
STORAGE_WAIT = "JAXLAUNCH_STORAGE_WAIT"
INIT_TIMEOUT = (
    "JAXLAUNCH_INIT_TIMEOUT"  # agent -> child: seconds jax.distributed.initialize may take
)
COORDINATOR = "JAX_COORDINATOR_ADDRESS"  # agent -> child: fresh port per attempt
# Agent -> child of host 0: where JAX's coordinator listens; else everywhere.
COORDINATOR_BIND = "JAX_COORDINATOR_BIND_ADDRESS"
NUM_PROCESSES = "JAX_NUM_PROCESSES"  # agent -> child
PROCESS_ID = "JAX_PROCESS_ID"  # agent -> child
# Agent -> child of a job with `hosts: {min, max}`: the processes of `max` hosts.
FULL_PROCESSES = "JAXLAUNCH_FULL_PROCESSES"
LOCAL_DEVICE_IDS = "JAX_LOCAL_DEVICE_IDS"  # agent -> child, several processes per GPU host
NUM_CPU_DEVICES = "JAX_NUM_CPU_DEVICES"  # agent -> child, virtual CPU devices

ANNOTATION = "jaxlaunch.io/progress"  # agent, launcher -> launcher: how far a job is, on its JobSet

# JAX's own default of 100 s would be slower than every other check.
HEARTBEAT_TIMEOUT_S = 30
# At its end a process waits in JAX's shutdown barrier for the others, of which one may export its
# model for an hour. JAX's own default of 300 s would abort it. The agents notice ranks that died.
SHUTDOWN_TIMEOUT_S = 7 * 24 * 3600

# Trainer -> launcher: the last file of a saved step. Without it the step is incomplete.
MANIFEST = "jaxlaunch.manifest.json"

# Programs whose exit code is that of their last command.
SHELLS = frozenset({"ash", "bash", "busybox", "dash", "ksh", "mksh", "sh", "zsh"})
# Trainer, launcher -> launcher: an evaluation by class, in the run folder.
CLASSIFICATION = "classification.json"

# The largest number of steps of one profile: a trace is in memory until it ends.
PROFILE_STEPS = 100
# Final states of a rank that is profiled. The other states are "asked" and "tracing".
PROFILE_END_STATES = ("done", "failed", "gone")

# Outermost axis first: mp neighbours are the closest devices.
MESH_AXES = ("dp", "fsdp", "ep", "mp")
# The axes that split a batch.
BATCH_AXES = MESH_AXES[:3]

# Phases of a child, in the order of a run. Each has a timeout, except `done`.
PHASES = ("prepare", "init", "restore", "compile", "step", "data", "eval", "save", "done")
# Key of the timeout from the start of a program to its first step, over all phases.
FIRST_STEP = "first_step"
# Seconds that a phase may last, unless the job's `timeouts` say otherwise. It ends with the next
# line that changes the phase or its step.
TIMEOUTS_S: Mapping[str, float | None] = {
    "rendezvous": 1800.0,
    "prepare": 86400.0,
    # The others wait for the replacement of a lost host.
    "replace": 300.0,
    "init": 300.0,
    "restore": 600.0,
    "compile": 1800.0,
    # From the start of a program to its first step. A program need not report any, and the start of
    # the built-in trainer is bounded by its phases.
    FIRST_STEP: None,
    # Learned from the steps before.
    "step": None,
    "data": 600.0,
    "eval": 1800.0,
    "save": 1200.0,
    # A process that has finished must also exit. It is not a key of the job.
    "done": 300.0,
}
# Causes to which the seconds of an attempt are attributed: the phases, and the time around them.
CLOCK_CAUSES = ("rendezvous", *PHASES[:-1], "lost_work", "down")
# Causes of the seconds of a restart, in order, from the fault until the first new step. `save`
# belongs to a stop, and `replace` is the wait for a lost host. From `start` on the seconds are
# those of rank 0, and a first attempt has only these.
RESTART_CAUSES = (
    *("detect", "decide", "save", "end", "replace"),
    *("start", "import", "rendezvous", "prepare", "init", "restore", "data", "compile"),
    "first_step",
)


class Role(enum.IntEnum):
    """Role of a Python process below the agent; the process with the highest is the rank's program.

    A command may start its program through other Pythons (`conda run`, a launch.py).
    """

    # The first Python of a command.
    STARTED = 0
    IMPORTED_JAX = 1
    # It reports progress, or is the built-in trainer.
    REPORTS = 2
    # It has called jax.distributed.initialize.
    JOINED = 3


class Action(enum.Enum):
    """The action of JobSet when the processes end with a code."""

    COMPLETE = "Complete"
    FAIL = "FailJobSet"
    RESTART = "RestartJobSet"
    RESTART_UNCHARGED = "RestartJobSetAndIgnoreMaxRestarts"


class Restart(enum.Enum):
    """The processes or pods that restart after an attempt has ended."""

    NEVER = "never"
    # New pods, or new agents of a run on this machine.
    NEW_PODS = "new_pods"
    # First the processes in the same pods, then new pods.
    IN_PLACE = "in_place"


class Limit(enum.Enum):
    """The limit of job.yaml, `restarts.NAME`, that a restart counts toward."""

    # In the same pods it counts toward restarts.in_place.
    CRASH = "crash"
    PREEMPTED = "preempted"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One row of the exit-code table: how a run's processes ended and what follows from it."""

    code: int
    # The label in metrics, and the `cause` of a verdict.
    cause: str
    meaning: str
    restart: Restart = Restart.NEVER
    # None: the restart is free, or nothing restarts.
    charged_to: Limit | None = None
    # The `status` of a run that ended so.
    status: str = "failed"
    # Somebody stopped the processes, which saved first: the same command continues the run.
    is_stop: bool = False
    # A person can fix it, and the trainer's message says how, so nobody needs the traceback.
    is_user_fixable: bool = False
    # Advice that replaces the general advice; {again} is the command that submits again. A code
    # that restarts ends a job only when its restarts are used up.
    next_step: str | None = None
    # A section of docs/troubleshooting.md, or None if there is nothing to fix.
    section: str | None = "exit-codes"

    @property
    def restarts(self) -> bool:
        """Return whether another attempt follows, unless a limit is reached."""
        return self.restart is not Restart.NEVER

    @property
    def in_place(self) -> bool:
        """Return whether the same pods may try again in place."""
        return self.restart is Restart.IN_PLACE

    @property
    def ends_local_run(self) -> bool:
        """Return whether a run on this machine ends, because nobody restarts what was stopped."""
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
# Exit code of a single agent that was told to stop, while the others wait for the pod that replaces
# it. It is the shell's code for SIGTERM. The Job creates that pod and does not count a failure.
LEFT_GANG = 143
# Codes from here on tell how a container died. No agent exits with one of them for its gang.
FIRST_SIGNAL_CODE = 128

# A fault: first the same pods try again, then new pods, which counts toward restarts.crash.
_FAULT = Restart.IN_PLACE, Limit.CRASH
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
        LOST, "lost", "an agent or its host was lost", *_FAULT, section="rendezvous-and-lost-hosts"
    ),
    Outcome(
        HANG, "hang", "a process stopped making progress", *_FAULT, section="hangs-and-timeouts"
    ),
    Outcome(CRASH, "crash", "a process crashed", *_FAULT),
    Outcome(
        STORAGE,
        "storage",
        "storage failed",
        *_FAULT,
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
        *_FAULT,
    ),
    Outcome(
        KILLED,
        "killed",
        "a process was killed, by the kernel or a person",
        *_FAULT,
        section="out-of-memory",
    ),
)
OUTCOMES: Mapping[int, Outcome] = {row.code: row for row in _TABLE}
# Codes with which an agent ends its gang, where lost pods are otherwise replaced one by one.
GANG_CODES = tuple(sorted(code for code in OUTCOMES if DONE < code < FIRST_SIGNAL_CODE))


class Requeue(str, enum.Enum):
    """The restart for which a program asks with an exit code of `restarts.codes`."""

    # In the same pods, as far as restarts.in_place allows any; counted like a preemption.
    FREE = "free"
    # In the same pods, then with new ones, counted like a crash.
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


# The module of our exceptions, each with the `code` that it ends a run with.
ERRORS_MODULE = "jaxlaunch.trainer.errors"


def exception_code(error: BaseException) -> int | None:
    """Return the exit code that one of our exceptions ends a run with, or None for any other."""
    is_ours = any(base.__module__ == ERRORS_MODULE for base in type(error).__mro__)
    code = getattr(error, "code", None) if is_ours else None
    return code if code in OUTCOMES else None


def agent_exit_code(verdict_code: int, *, leaves_alone: bool) -> int:
    """Return the exit code of an agent whose lost peers are replaced one by one.

    The Job has to distinguish a gang that ended from a single pod that ended.

    Args:
        verdict_code: The code of the gang's verdict.
        leaves_alone: Whether the agent leaves while its gang continues.
    """
    if leaves_alone:
        return LEFT_GANG
    return verdict_code if verdict_code < FIRST_SIGNAL_CODE else CRASH


def outcome_for_code(code: int) -> Outcome:
    """Return the row of `code`. A code outside the table is treated as a kill."""
    return OUTCOMES.get(code) or dataclasses.replace(OUTCOMES[KILLED], code=code)


@dataclasses.dataclass(frozen=True)
class AgentJob:
    """The part of a job that its agents read, equal on every host."""

    name: str
    # None for the built-in trainer.
    command: tuple[str, ...] | None = None
    processes_per_host: int = 1
    # cpu, cuda, rocm or tpu: it decides which device variable a child gets.
    platform: str = "cpu"
    devices_per_process: int = 1
    # Seconds by phase; TIMEOUTS_S has the others. None if it is learned (step) or unlimited.
    timeouts_s: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    # Generations, counted by JobSet or `run`.
    crash_limit: int = 5
    in_place_limit: int = 3
    # Whether a lost host is replaced alone, while the others wait for it.
    replaces: bool = False
    # How many hosts may hold ranks, ascending; empty for all. Hosts beyond the last are spares.
    sizes: tuple[int, ...] = ()
    # Preemptions in a row without a newly committed step, or None for no limit.
    preempted_limit: int | None = None
    # Exit codes by which a program asks to be run again.
    requeue_codes: Mapping[int, Requeue] = dataclasses.field(default_factory=dict)
    grace_s: float = 60.0
    # Whether each process may use JAX without having joined the others.
    independent: bool = False
    # Limit of the whole job with all of its generations, or None.
    deadline_s: float | None = None
    # 0 for any free port.
    metrics_port: int = 0
    workdir: str | None = None
    # By variable, the folder that is put before its own value.
    search_paths: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # The type, as job.yaml and the cluster defaults name it.
    accelerator: str = "cpu"
    # The job's network, if it needs memory that programs pin.
    pinning: str | None = None
    # A pod that has more on its node's disk is evicted. None for no limit.
    ephemeral_bytes: int | None = None
    # Folders on that disk, with the bytes that each may have of its own.
    scratch: Mapping[str, int | None] = dataclasses.field(default_factory=dict)
    # Bytes of each rank's output that the run folder keeps.
    log_bytes: int = 16 * 1024 * 1024

    @property
    def phase_timeouts_s(self) -> dict[str, float | None]:
        """Return the timeout of every phase. None: no timeout, or for "step" a learned one."""
        return {**TIMEOUTS_S, **self.timeouts_s}

    def to_json(self) -> str:
        """Return the value of JAXLAUNCH_JOB. Equal jobs give equal text."""
        fields = {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if name not in ("sizes", "requeue_codes", "independent") or value
        }
        return json.dumps(fields, sort_keys=True)


class Key:
    """Keys of a line of metrics.jsonl, from the train step to the agent."""

    STEP, EPOCH, STEP_S, PART_S = "step", "epoch", "step_s", "{part}_s"
    LOSS, GRAD_NORM, LEARNING_RATE, LOSS_SCALE = "loss", "grad_norm", "learning_rate", "loss_scale"
    EXAMPLES_PER_S = "examples_per_s"
    TOKENS_PER_S = "tokens_per_s"
    TARGETS_PER_S = "targets_per_s"
    MFU = "mfu"
    WALL_S, TIME, EXAMPLES = "wall_s", "time", "examples"
    # Memory of the process and of its fullest device; the memory of the host and the share of its
    # processors that is busy.
    PROCESS_GIB, DEVICE_GIB, DEVICE_LIMIT_GIB = "process_gib", "device_gib", "device_limit_gib"
    HOST_GIB, HOST_LIMIT_GIB, HOST_CPU = "host_gib", "host_limit_gib", "host_cpu"
    # The step with the best evaluation so far. It is not written.
    BEST_STEP = "best_step"
    # Keys of a step that are not written. Over all ranks: the weight of the loss, its targets, and
    # the tokens read.
    FINITE, SKIPPED, WEIGHT, TOKENS = "finite", "skipped", "weight", "real_tokens"
    # The routing of tokens to experts in the sums of an evaluation. It is not written.
    ROUTING = "routing"


# Parts of the loop's time.
LOOP_PARTS = ("data", "host", "device", "save", "eval")
# Prefix of the metrics of the last evaluation in the newest metrics.
EVAL_PREFIX = "eval_"


@dataclasses.dataclass(frozen=True)
class Metric:
    """One metric of the product, as docs/metrics.md lists it: its names, type, unit and meaning."""

    # The name in Prometheus.
    name: str
    # One of counter, gauge and histogram.
    type: str
    # The unit of a sample, or "" if it has none.
    unit: str
    help: str
    labels: tuple[str, ...]
    # Who exports it, agent or trainer: always, with NaN where the value is not known.
    exporter: str
    # The key in a line of metrics.jsonl, or None if it is not written there.
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

# All metrics of a scrape of an agent while the built-in trainer runs. A rank's rows come from its
# own process.
PROMETHEUS: tuple[Metric, ...] = (
    _agent_gauge(
        "jaxlaunch_build_info",
        "",
        "The value is always 1; the labels name what runs.",
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

# Names that a metric of a task cannot have: the record of a step would hold only one of the two
# numbers.
RESERVED_METRICS = frozenset(
    {Key.WALL_S, Key.TIME, Key.EXAMPLES, Key.FINITE, Key.SKIPPED, Key.WEIGHT, Key.ROUTING}
    | {Key.PROCESS_GIB, Key.DEVICE_GIB, Key.DEVICE_LIMIT_GIB}
    | {Key.HOST_GIB, Key.HOST_LIMIT_GIB, Key.HOST_CPU}
    | {row.key for row in PROMETHEUS if row.key is not None and row.key != Key.PART_S}
    | {Key.PART_S.format(part=part) for part in LOOP_PARTS}
)


# A longer line is cut, so that a traceback cannot fill the agent's memory.
MAX_LINE = 64 * 1024
# At six bytes per character, as JSON escapes most, both fit into a line.
MESSAGE_CHARS, TRACEBACK_CHARS = 2_000, 8_000


def error_line(error: BaseException, code: int | None, custom_message: str = "") -> dict[str, Any]:
    """Return the message that reports an exception.

    Args:
        error: The exception.
        code: The exit code that follows, or None outside of the trainer.
        custom_message: Replaces the text of the exception.
    """
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        message = custom_message or str(error)
    except Exception as str_error:
        # Any error: the class is the user's, and its own report must not hide the error.
        message = f"<its message cannot be read: {type(str_error).__qualname__}>"
    summary = {"type": type(error).__qualname__, "message": message[:MESSAGE_CHARS], "code": code}
    record = {"error": {**summary, "traceback": text[-TRACEBACK_CHARS:]}}
    if len(json.dumps(record)) < MAX_LINE:
        return record
    # Characters such as emoji take twelve bytes in JSON.
    return {"error": {**summary, "traceback": text[-TRACEBACK_CHARS // 4 :]}}


# Planner -> launcher: the prefix of a line of progress.
COMPILING_PREFIX = "compiling: "


def refusal_line(message: str, code: int) -> str:
    """Return the line in a log for an end with `code` that a person can fix."""
    return f"trainer: {join_lines(message)} (exit {code})"


def refusal_record(message: str, code: int) -> dict[str, Any]:
    """Return the message that says why a program ends with `code`, where a person can fix that."""
    return {"refusal": {"message": join_lines(message), "code": code}}


def refuse(message: str, code: int) -> None:
    """Report an end that a person can fix: to the launcher that started us, else on stderr."""
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


# Descriptors whose last line was cut by a full pipe.
_torn: set[int] = set()


def _is_writable(fd: int, wait_s: float = 1.0) -> bool:
    # select() accepts no descriptor from 1,024 on.
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(1000 * wait_s))


def send(fd: int, message: Mapping[str, Any]) -> bool:
    """Write one line to the progress pipe. Return False if the pipe is full or gone.

    A line up to PIPE_BUF is written completely or not at all, and never blocks. A longer one (a
    traceback) may wait for a second. The rest of it is then dropped, and the next line begins after
    a newline, so that the reader can parse it.

    A line is a JSON object with one of these keys. A `pid` says which process of the rank wrote it;
    lines without one are the program's.
      {"hello": "site" | "trainer", "python": "3.11.7", "jax": "0.10.2" | null}
          who writes; from "site" with `role`, `pid` and `pid_namespace`
      {"role": 3, "pid": 4711, "pid_namespace": 4026531836}
          this process has the Role from now on
      {"phase": "step", "step": 120}
          what it is in; `step` counts the optimizer steps that are complete
      {"total": 600}
          the steps of the whole run
      {"joining": true}
          jax.distributed.initialize of a program waits for the other ranks; false: it has ended
      {"joined": true}
          all ranks have connected to rank 0: its time from here on is its own
      {"restored": 80}
          training continues from this step, which an earlier attempt committed
      {"committed": 120}
          this step is on storage, with its manifest
      {"metrics": {...}}
          the newest metrics, by process 0; the last line before the end is final
      {"stopped": {"step": 37, "saved": true, "note": "..."}}
          how it ended on SIGTERM
      {"profile": {"id": 1, "state": "tracing" | "done" | "failed", ...}}
          the state of the profile that PROFILE requested
      {"note": "..."}
          for a reader of the summary (a damaged checkpoint, a take-over)
      {"error": {"type", "message", "traceback", "code"}}
          of error_line; `code` is null for an exception that is not ours. With `"fatal": true` the
          job ends, whatever the processes do; with `"handled": true` a worker of a pool has sent
          the exception to its parent, and continues
      {"child": {"pid": 4712, "code": -9}}
          how a child of a wrapper has ended: its exit code, or minus the signal
      {"stops": 4712}
          a wrapper ends a process, or a process group, by a signal
      {"refusal": {"message", "code"}}
          of refusal_record: the agent writes it into the rank's log
      {"atexit": true, "waits": true, "processes": 2, "code": 42}
          the interpreter is exiting; JAX's shutdown barrier comes next; it used JAX with so many
          processes, 0 if it used no device; `code` is that of the last sys.exit
      {"waits": false}
          the process has entered (true) or left JAX's shutdown barrier, and continues
    """
    line = json.dumps(message, separators=(",", ":"), default=str).encode()[: MAX_LINE - 1] + b"\n"
    whole = memoryview(b"\n" + line if fd in _torn else line)
    data = whole
    try:
        while data:
            data = data[os.write(fd, data) :]
            if data and not _is_writable(fd):
                break
    except OSError:
        # The pipe is full or gone.
        pass
    if len(data) < len(whole):
        (_torn.add if data else _torn.discard)(fd)
    return not data


def loopback_host(coordinator: str) -> str | None:
    """Return the host of a coordinator on loopback, or None if other machines can reach it."""
    host = coordinator.rpartition(":")[0].strip("[]")
    return host if host in ("127.0.0.1", "::1", "localhost") else None


# Variables that name a proxy, in lower or upper case, and those with exceptions from it. gRPC reads
# only lower case: the first three in this order, and no_grpc_proxy or else no_proxy.
PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy")
NO_GRPC_PROXY, NO_PROXY = "no_grpc_proxy", "no_proxy"
# curl and Python take it only alone, and gRPC not at all.
ALL_HOSTS = "*"


def find_proxies(environ: Mapping[str, str]) -> list[str]:
    """Return the variables that name a proxy."""
    names = (name for name in environ if name.lower() in PROXY_VARIABLES)
    return [name for name in names if environ[name].strip()]


def bypass_proxies(environ: Mapping[str, str], hosts: Iterable[str]) -> dict[str, str]:
    """Return the variables that except `hosts` from the proxies, or none without a proxy.

    gRPC compares the end of a name before it resolves it: a network such as 10.0.0.0/8 excepts no
    name, so JAX would try to reach its coordinator through the proxy until its timeout.

    Args:
        environ: Variables of the process. Their exceptions are kept.
        hosts: Names and addresses; one that begins with a dot stands for all names that end so.
    """
    if not find_proxies(environ):
        return {}
    added = [host for host in hosts if host]

    def add_hosts(exceptions: str, *, is_grpc: bool) -> str:
        entries = [entry.strip() for entry in exceptions.split(",") if entry.strip()]
        if ALL_HOSTS in entries and not is_grpc:
            return exceptions
        return ",".join(dict.fromkeys([*entries, *added]))

    # Programs that read both prefer one of them, so what only one has holds for both.
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
        domain: Domain in which the names of the pods are complete.
    """
    coordinator, leader = (
        environ.get(name, "").rpartition(":")[0].strip("[]") for name in (COORDINATOR, LEADER)
    )
    hosts = ["localhost", "127.0.0.1", "::1", leader, coordinator, environ.get(POD_IP, "")]
    # The headless service of a JobSet: all pods have names below it.
    _, dot, service = leader.partition(".")
    if dot and not service.replace(".", "").isdecimal():
        hosts += [f".{service}", f".{service}.{domain}" if domain else ""]
    # On TPU, JAX has the hosts from the platform.
    hosts += environ.get("TPU_WORKER_HOSTNAMES", "").split(",")
    hosts.append(environ.get("MEGASCALE_COORDINATOR_ADDRESS", "").partition(":")[0])
    return [host for host in dict.fromkeys(hosts) if host]


def host_name_fault(coordinator: str) -> str | None:
    """Return why JAX cannot connect CPU devices of several machines, or None if it can.

    JAX connects them, even those of one process, at the address of this host's own name. If the
    name has no address, JAX only reports that it found no such devices. On loopback the site hook
    makes it use the loopback address.
    """
    # Imported here, because every Python process below the agent imports this file.
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
