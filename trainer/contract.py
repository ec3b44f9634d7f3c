"""The contract between launcher, agent and trainer: names, codes, phases and lines, once, as data.

Standard library only and Python >= 3.10: the agent carries this file into images that hold nothing else of ours.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import select
from collections.abc import Mapping
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
POD_UID = "JAXLAUNCH_POD_UID"  # jobset, run -> agent: which incarnation of this pod
JOB = "JAXLAUNCH_JOB"  # jobset, run -> agent: AgentJob as JSON
RUN_DIR = "JAXLAUNCH_RUN_DIR"  # jobset, run -> agent, trainer: the run folder; unset means no memory
TRAIN_SPEC = "TRAIN_SPEC"  # jobset, run -> trainer: the train block as JSON
PARENT = "JAXLAUNCH_PARENT"  # run -> agent: a pid; an agent whose parent is gone stops as if it were told to
CODE = "JAXLAUNCH_CODE"  # jobset -> agent: the archive of the job's code, unpacked before any process starts
CODE_ROOT = "JAXLAUNCH_CODE_ROOT"  # jobset -> agent: the folder it is unpacked to, first on PYTHONPATH
TAKE_OVER = "JAXLAUNCH_TAKE_OVER"  # run -> trainer: "1" takes a checkpoint folder from its owner
PROGRESS_FD = "JAXLAUNCH_PROGRESS_FD"  # agent -> child: where it reports, a non-blocking pipe
METRICS = "JAXLAUNCH_METRICS"  # agent -> child: Unix socket path it serves its metrics text on
PROFILE = "JAXLAUNCH_PROFILE"  # agent -> child: a file that asks for a profile: {"id": 1, "steps": 5}
STACKS = "JAXLAUNCH_STACKS"  # agent -> child: the file its stacks go to on SIGUSR1
REPORTER = "JAXLAUNCH_REPORTER"  # site hook -> what the program starts: the pid that owns the progress pipe
ATTEMPT = "JAXLAUNCH_ATTEMPT"  # agent -> child: which start of the children this is, across generations
TIMEOUT = "JAXLAUNCH_INIT_TIMEOUT"  # agent -> child: seconds jax.distributed.initialize may take
COORDINATOR = "JAX_COORDINATOR_ADDRESS"  # agent -> child: fresh port per attempt
NUM_PROCESSES = "JAX_NUM_PROCESSES"  # agent -> child
PROCESS_ID = "JAX_PROCESS_ID"  # agent -> child
LOCAL_DEVICE_IDS = "JAX_LOCAL_DEVICE_IDS"  # agent -> child, several processes per GPU host
NUM_CPU_DEVICES = "JAX_NUM_CPU_DEVICES"  # agent -> child, virtual CPU devices

HEARTBEAT_TIMEOUT_S = 30  # JAX's own default of 100 s would be the slowest detector of all
SHUTDOWN_TIMEOUT_S = 10  # JAX's own default of 300 s holds a true exit code back for five minutes

PROFILE_STEPS = 100  # that one profile may hold: a trace is kept in memory until it ends

MESH_AXES = ("dp", "fsdp", "mp")  # outermost first: mp neighbours are the closest devices

# What a child may be in, in the order of a run. Each has a budget; `done` ends it.
PHASES = ("init", "restore", "compile", "step", "data", "eval", "save", "done")
# Where an attempt's seconds go: the phases, and what lies around them.
CLOCK = ("rendezvous", "init", "restore", "compile", "step", "data", "eval", "save", "lost_work", "down")


class Action(enum.Enum):
    """What JobSet does when a gang ends with a code."""

    COMPLETE = "Complete"
    FAIL = "FailJobSet"
    RESTART = "RestartJobSet"
    RESTART_UNCHARGED = "RestartJobSetAndIgnoreMaxRestarts"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One row of the exit-code table: how a gang ended and what follows from it."""

    code: int
    cause: str  # the label in metrics, the `cause` of a verdict
    meaning: str
    in_place: bool  # the same pods may try again
    action: Action


DONE, BAD_SPEC, BAD_DATA, STARTUP = 0, 64, 65, 70
NOT_FINITE, NO_CHECKPOINT, NO_PROGRESS, PREEMPTED = 76, 78, 79, 80
LOST, HANG, CRASH, STORAGE, KILLED = 81, 82, 83, 84, 137

OUTCOMES: Mapping[int, Outcome] = {
    outcome.code: outcome
    for outcome in (
        Outcome(DONE, "done", "every process finished the last step", False, Action.COMPLETE),
        Outcome(BAD_SPEC, "bad_spec", "the job's specification is wrong", False, Action.FAIL),
        Outcome(BAD_DATA, "bad_data", "the data is missing or wrong", False, Action.FAIL),
        Outcome(STARTUP, "startup", "the program raised before its first step", False, Action.FAIL),
        Outcome(NOT_FINITE, "not_finite", "loss or gradients are not finite", False, Action.FAIL),
        Outcome(NO_CHECKPOINT, "no_checkpoint", "no usable checkpoint, or not its owner", False, Action.FAIL),
        Outcome(NO_PROGRESS, "no_progress", "no new committed step after the budgets", False, Action.FAIL),
        Outcome(PREEMPTED, "preempted", "stopped from outside", False, Action.RESTART_UNCHARGED),
        Outcome(LOST, "lost", "an agent or its host was lost", True, Action.RESTART),
        Outcome(HANG, "hang", "a process stopped making progress", True, Action.RESTART),
        Outcome(CRASH, "crash", "a process crashed after progress", True, Action.RESTART),
        Outcome(STORAGE, "storage", "storage failed", True, Action.RESTART),
        Outcome(KILLED, "killed", "a process was killed, by the kernel or a person", True, Action.RESTART),
    )
}


def outcome(code: int) -> Outcome:
    """The row of `code`; a code nobody promised reads as a kill does: counted, tried again in place."""
    return OUTCOMES.get(code) or dataclasses.replace(OUTCOMES[KILLED], code=code)


@dataclasses.dataclass(frozen=True)
class AgentJob:
    """What an agent must know of the job; equal on every host, and part of the spec hash."""

    name: str
    command: tuple[str, ...] | None = None  # None: the built-in trainer
    processes_per_host: int = 1
    platform: str = "cpu"  # cpu | cuda | tpu: which device variable a child gets
    devices_per_process: int = 1
    budgets_s: Mapping[str, float | None] = dataclasses.field(default_factory=dict)  # None: learned (step), or endless
    crash_budget: int = 5  # generations, counted by JobSet or run
    in_place_budget: int = 3
    grace_s: float = 60.0
    metrics_port: int = 0  # 0: any free port
    workdir: str | None = None

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> AgentJob:
        fields = json.loads(text)
        command = fields.pop("command", None)
        return cls(command=None if command is None else tuple(command), **fields)


@dataclasses.dataclass(frozen=True)
class Metric:
    """One Prometheus metric of the product, as docs/metrics.md lists it."""

    name: str
    type: str  # counter | gauge | histogram
    help: str
    labels: tuple[str, ...]
    by: str  # agent | trainer: who exports it; always, with NaN where the value is not known


# Every name a scrape of an agent holds while the built-in trainer runs. A rank's rows come from its own process.
PROMETHEUS: tuple[Metric, ...] = (
    Metric("jaxlaunch_build_info", "gauge", "Always 1; the labels say what runs.", ("version", "python"), "agent"),
    Metric("jaxlaunch_goodput_ratio", "gauge", "Share of all seconds that went into steps that count.", (), "agent"),
    Metric("jaxlaunch_clock_seconds", "gauge", "Seconds of the run by where they went.", ("cause",), "agent"),
    Metric(
        "jaxlaunch_restarts_total", "counter", "Attempts that ended, by the cause of the verdict.", ("cause",), "agent"
    ),
    Metric("jaxlaunch_restarts_left", "gauge", "Restarts left before the run is given up.", ("budget",), "agent"),
    Metric("jaxlaunch_last_verdict_code", "gauge", "Exit code of the newest verdict.", (), "agent"),
    Metric("jaxlaunch_generation", "gauge", "Which set of pods this is.", (), "agent"),
    Metric("jaxlaunch_attempt", "gauge", "Which start of the processes this is, across generations.", (), "agent"),
    Metric("jaxlaunch_children_up", "gauge", "Processes of this host that are alive.", (), "agent"),
    Metric("jaxlaunch_heartbeat_age_seconds", "gauge", "Since this agent heard of its most silent peer.", (), "agent"),
    Metric("jaxlaunch_host_memory_bytes", "gauge", "Memory of this container: in_use, limit.", ("kind",), "agent"),
    Metric("jaxlaunch_phase", "gauge", "1 for the phase a rank is in, 0 for the others.", ("rank", "phase"), "agent"),
    Metric("jaxlaunch_phase_budget_left_seconds", "gauge", "Until a rank counts as hung.", ("rank",), "agent"),
    Metric("jaxlaunch_rank_step", "gauge", "Steps a rank has reported as complete.", ("rank",), "agent"),
    Metric("jaxlaunch_rank_lag_steps", "gauge", "Steps a rank is behind the foremost.", ("rank",), "agent"),
    Metric(
        "jaxlaunch_step", "gauge", "Optimizer steps that are complete, restored ones included.", ("rank",), "trainer"
    ),
    Metric("jaxlaunch_target_step", "gauge", "Optimizer steps of the whole run.", ("rank",), "trainer"),
    Metric("jaxlaunch_steps_total", "counter", "Optimizer steps done by this process.", ("rank",), "trainer"),
    Metric(
        "jaxlaunch_step_seconds", "histogram", "Time of a step, evaluation and save left out.", ("rank",), "trainer"
    ),
    Metric(
        "jaxlaunch_part_seconds_total",
        "counter",
        "Time of the loop by part: data, host, device, save, eval.",
        ("rank", "part"),
        "trainer",
    ),
    Metric("jaxlaunch_examples_total", "counter", "Examples trained on, by all ranks together.", ("rank",), "trainer"),
    Metric("jaxlaunch_tokens_total", "counter", "Tokens trained on, by all ranks together.", ("rank",), "trainer"),
    Metric("jaxlaunch_examples_per_second", "gauge", "Of all ranks together, after warm-up.", ("rank",), "trainer"),
    Metric("jaxlaunch_tokens_per_second", "gauge", "Of all ranks together, after warm-up.", ("rank",), "trainer"),
    Metric("jaxlaunch_epoch", "gauge", "Passes over the data, with the fraction of this one.", ("rank",), "trainer"),
    Metric("jaxlaunch_model_flops_per_step", "gauge", "Floating-point operations of the model.", ("rank",), "trainer"),
    Metric("jaxlaunch_mfu_ratio", "gauge", "Model FLOPs over the peak of all devices.", ("rank",), "trainer"),
    Metric("jaxlaunch_loss", "gauge", "Training loss at the last logged step.", ("rank",), "trainer"),
    Metric("jaxlaunch_grad_norm", "gauge", "Global norm of the gradients before clipping.", ("rank",), "trainer"),
    Metric("jaxlaunch_learning_rate", "gauge", "Learning rate of the last logged step.", ("rank",), "trainer"),
    Metric("jaxlaunch_loss_scale", "gauge", "What float16's mean loss is multiplied by.", ("rank",), "trainer"),
    Metric("jaxlaunch_skipped_steps_total", "counter", "Steps that overflowed float16.", ("rank",), "trainer"),
    Metric(
        "jaxlaunch_task_metric",
        "gauge",
        "What the task measures, its loss included.",
        ("rank", "split", "metric"),
        "trainer",
    ),
    Metric("jaxlaunch_resident_memory_bytes", "gauge", "Host memory of the process.", ("rank",), "trainer"),
    Metric(
        "jaxlaunch_device_memory_bytes",
        "gauge",
        "Memory of a local device: in_use, peak, limit.",
        ("rank", "device", "kind"),
        "trainer",
    ),
    Metric("jaxlaunch_checkpoint_step", "gauge", "Newest step that is safe on storage.", ("rank",), "trainer"),
    Metric(
        "jaxlaunch_checkpoint_age_seconds",
        "gauge",
        "Since the newest commit; since the start while there is none.",
        ("rank",),
        "trainer",
    ),
    Metric("jaxlaunch_checkpoint_saves_total", "counter", "Saves begun by this process.", ("rank",), "trainer"),
    Metric(
        "jaxlaunch_checkpoint_blocking_seconds_total",
        "counter",
        "Time the loop stood still for saves.",
        ("rank",),
        "trainer",
    ),
    Metric("jaxlaunch_compile_cache_hits_total", "counter", "Programs found in the cache.", ("rank",), "trainer"),
    Metric("jaxlaunch_compile_cache_misses_total", "counter", "Programs not found in it.", ("rank",), "trainer"),
)


# The progress pipe: JSON lines, child -> agent. A line is one object with one of these keys:
#   {"hello": "site" | "trainer", "python": "3.11.7", "jax": "0.10.2" | null, "pid": 4711}   who is speaking
#   {"phase": "step", "step": 120}     what it is in; `step` counts the optimizer steps that are complete
#   {"committed": 120}                 this step is on storage, manifest and all
#   {"metrics": {...}}                 the newest metrics, by process 0; the last line before the end is final
#   {"stopped": {"step": 37, "saved": true, "note": "..."}}     how it took a SIGTERM
#   {"profile": {"id": 1, "state": "tracing" | "done" | "failed", ...}}     of what PROFILE asked for
#   {"note": "..."}                    what a reader of the summary should know (a walk-back, a take-over)
#   {"error": {"type", "message", "traceback", "code"}}         last words; `code` is null outside the trainer
#   {"atexit": true, "waits": true}    the interpreter is leaving by itself; JAX's shutdown barrier comes next
MAX_LINE = 64 * 1024  # a longer line is cut: a traceback may be, an agent's memory may not


def send(fd: int, message: Mapping[str, Any]) -> bool:
    """Writes one line to the progress pipe; False when the pipe is full or gone.

    A line up to PIPE_BUF is written whole or not at all and never blocks. A longer one (a traceback) may wait a second.
    """
    data = memoryview(json.dumps(message, separators=(",", ":"), default=str).encode()[: MAX_LINE - 1] + b"\n")
    try:
        while data:
            data = data[os.write(fd, data) :]
            if data and not select.select([], [fd], [], 1.0)[1]:
                return False
    except (BlockingIOError, OSError):
        return False
    return True
