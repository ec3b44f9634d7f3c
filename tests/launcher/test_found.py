"""Errors program_errors for real are found in docs/troubleshooting.md from their message alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.agent.io.link import choose_free_port
from jaxlaunch.launcher.diagnose.explain import failures
from jaxlaunch.launcher.diagnose.explain.explanation import explain_job
from jaxlaunch.launcher.diagnose.text import Renderer
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job import load
from jaxlaunch.records.verdict import ExceptionFacts, Failure, FailureKind, verdict_for_code
from tests.found import NOT_HERE, ON_CLUSTER, ROWS, find_entry, find_phrases, shown, shows
from tests.launcher.diagnose.explain.test_explanation import CASES
from tests.launcher.invoke import launcher

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parents[1] / "trainer"
OF_JAX = {
    "module": "ModuleNotFoundError: No module named",
    "memory of the host": "MemoryError",
    "backend": "Unknown backend: 'gpu' requested",
    "memory of a device": "RESOURCE_EXHAUSTED: Out of memory allocating",
    "contraction": "dot_general requires contracting dimensions",
    "broadcast": "got incompatible shapes for broadcasting",
    "split": "implies that array axis 0 is partitioned",
    "mesh": "must equal the product of mesh_shape",
    "devices": "Received incompatible devices for jitted computation",
    "axis": "Resource axis",
    "leak": "UnexpectedTracerError",
    "bool": "TracerBoolConversionError",
    "concrete": "ConcretizationTypeError",
    "deleted": "Array has been deleted",
    "late": "must be called before any JAX calls",
    "tree": "metadata tree structures do not match",
    "absent": "Requested directory for restore does not exist",
    "donated": "Some donated buffers were not usable",
    "traced once": "step was compiled once and is not traced again",
    "no metadata": "Unable to uniquely reconstruct tree",
    "no arrays": 'Error opening "zarr" driver',
    "full": "OSError: [Errno 28] No space left on device",
    "data file": "`FileNotFoundError`",
}
OF_PEERS = {
    "twice": "distributed.initialize should only be called once.",
    "barrier": "DEADLINE_EXCEEDED: Barrier timed out",
    "key": "DEADLINE_EXCEEDED: GetKeyValue() timed out with key",
    "other process": "Fetching value for jax.Array that spans non-addressable",
    "sum": "Gloo all-reduce failed:",
    "unhealthy": "The following tasks are unhealthy",
    "ended": "Terminating process because the JAX distributed service",
}
OF_JOINING = {
    "late": "Shutdown barrier has failed",
    "twice": "unexpectedly tried to connect with a different incarnation",
}
# Rank 0 hears of the failed barrier from its service, or ends first: then its service prints this.
OF_A_SERVICE = {"late": "Shutdown barrier in coordination service has failed"}
LOGGED = {"unhealthy": "error to all tasks", "ended": "Terminating process"}
# Programs, and what is left of them.
OF_PROGRAMS = {
    "exit 0": [sys.executable, "-c", ""],
    "exit 1": [sys.executable, "-c", "raise SystemExit(1)"],
    "exit 127": ["sh", "-c", "no-such-program"],
}
# Cases of tests/launcher/diagnose/explain whose first line names more than their situation -> what
# it leads to.
OF_OTHERS = {
    "failed without a word": "crash-loop",
    "killed for its liveness probe": "unhealthy",
    "killed for its liveness probe, while another one fails": "unhealthy",
    "failed, its pods are gone, and how it ended is on record": "hang",
    "nodes that may not be job": "taint",
    "a loop of evictions for its own excess": "ephemeral-storage",
    "preempted by a job that is known": "preempted",
    "a hook": "unhealthy",
    "a hook, and an agent that was stopped for it": "unhealthy",
    "a hook of an earlier attempt": "preempted (80)",
    "a host that cannot join": "lost",
}
OF_NO_ROW = {
    "failed and its pods are gone",
    "failed after it was stopped and resumed, and its pods are gone",
}
SIGNALS = ["SIGABRT", "SIGBUS", "SIGKILL", "SIGSEGV", "SIGTERM"]


@pytest.fixture(scope="module")
def program_errors() -> dict[str, str]:
    program = [sys.executable, str(HERE / "make_errors.py")]
    done = subprocess.run(program, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, str] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("name", OF_JAX)
def test_error_of_a_program_is_documented(name: str, program_errors: dict[str, str]) -> None:
    shows(OF_JAX[name], program_errors[name])


@pytest.fixture(scope="module")
def peer_errors() -> dict[str, str]:
    """Return what rank 0 of two processes prints after its peer killed itself."""
    port = choose_free_port()
    program = [sys.executable, str(HERE / "make_peer_errors.py"), str(port)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([*program, str(rank)], **pipes) for rank in range(2)]
    try:
        out, err = ranks[0].communicate(timeout=600)
        ranks[1].communicate(timeout=600)
    finally:
        for rank in ranks:
            rank.kill()
    assert ranks[0].returncode < 0 and out, err[-3000:]
    lines = err.splitlines()
    logged = {name: next(line for line in lines if words in line) for name, words in LOGGED.items()}
    return json.loads(out.splitlines()[-1]) | logged


@pytest.mark.parametrize("name", OF_PEERS)
def test_error_between_processes_is_documented(name: str, peer_errors: dict[str, str]) -> None:
    shows(OF_PEERS[name], peer_errors[name])


@pytest.fixture(scope="module")
def joining_errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return what rank 0 prints, which JAX ends: another rank is late, or is there twice."""
    folder = tmp_path_factory.mktemp("joining")
    environ = os.environ | {"JAX_PLATFORMS": "cpu"}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for kind, number in (("late", 2), ("twice", 3)):
            port = choose_free_port()
            program = [sys.executable, str(HERE / "make_joining_errors.py"), str(port)]
            for rank in range(number):
                with (folder / f"{kind}{rank}").open("wb") as output:
                    command = [*program, str(rank), kind]
                    processes.append(subprocess.Popen(command, env=environ, stderr=output))
        for first in (processes[0], processes[2]):
            first.wait(timeout=600)
        return {kind: (folder / f"{kind}0").read_text() for kind in OF_JOINING}
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize("name", OF_JOINING)
def test_error_of_joining_is_documented_and_explained(
    name: str, joining_errors: dict[str, str]
) -> None:
    text = joining_errors[name]
    message = OF_JOINING[name]
    if message not in text:
        message = OF_A_SERVICE[name]
    line = next(line for line in text.splitlines() if message in line)
    shows(message, line.partition("] ")[2])
    words, _, meaning = explain_end(text).partition('" means that ')
    assert words.strip('"') in text
    assert meaning.startswith({"late": "a rank did not come", "twice": "a second process"}[name])


def explain_end(text: str, error: str = "") -> str:
    """Return the last line of evidence of `explain` for a program that ends with a text."""
    failure = Failure(FailureKind.SIGNAL, rank=0, signal=6)
    if error:
        kind, _, message = error.partition(": ")
        failure = Failure(
            FailureKind.EXCEPTION, rank=0, exception=ExceptionFacts(type=kind, message=message)
        )
    verdict = verdict_for_code(contract.CRASH, failure, traceback=text[-8000:], rank=0)
    answer = failures.explain_verdict(verdict)
    last = answer.evidence[-1]
    return last if isinstance(last, str) else Renderer().render(last)


# Programs of one process, and the words of their error.
LIMITED = {
    "creation via pthread_create() failed": "import jax; jax.devices()",
    "can't start new thread": "import threading, time\n"
    "for _ in range(9): threading.Thread(target=time.sleep, args=(3,)).start()",
    "Too many open files": "import socket; kept = [socket.socket() for _ in range(100)]",
    "Cannot assign requested address": "import socket; socket.create_server(('192.0.2.7', 0))",
}


@pytest.mark.parametrize("words", LIMITED)
def test_error_of_a_limit_is_documented_and_explained(words: str, tmp_path: Path) -> None:
    # A stack of 128 TiB has no place, as if there were too many threads. The limit of processes
    # itself does not hold for root.
    limits = "ulimit -n 64" + ("; ulimit -s 137438953472" if "thread" in words else "")
    environ = os.environ | {"JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        ["sh", "-c", f'{limits}; exec "$@"', "sh", sys.executable, "-c", LIMITED[words]],
        capture_output=True,
        text=True,
        cwd="/",
        env=environ | {"HOME": str(tmp_path)},
    )
    assert done.returncode != 0
    shows(words, next(line for line in done.stderr.splitlines() if words in line))
    assert "means that" in explain_end(done.stderr)


def test_proxy_warning_is_documented() -> None:
    address = f"127.0.0.1:{choose_free_port()}"
    program = f"import jax; jax.distributed.initialize({address!r}, 1, 0)"
    environ = os.environ | {"JAX_PLATFORMS": "cpu", "HTTPS_PROXY": "http://proxy.example:3128"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True
    )
    line = next(line for line in done.stderr.splitlines() if "proxy variable" in line)
    shows("JAX detected proxy variable(s) in the environment", line)


# Lines of NCCL's that need GPUs, as others print them.
OF_NCCL = (
    # github.com/marin-community/marin, issue 7018: NCCL of JAX, H100, July 2026.
    "Failed to create NCCL communicator: INTERNAL: ncclCommInitRankConfig(...) failed: invalid "
    "usage (run with NCCL_DEBUG=WARN for details). Last NCCL warning(error) log entry (may be "
    "unrelated) 'Bootstrap : no socket interface found'.",
    # github.com/EasonXiao-888/MambaTree, issue 14: NCCL 2.14.3.
    "ncclInternalError: Internal check failed.\nLast error:\nBootstrap : no socket interface found",
    # github.com/NVIDIA/nccl, issue 1837: NCCL 2.27.7.
    "ncclSocketInit: connecting to address  with family 59936 is neither AF_INET(2) nor "
    "AF_INET6(10)",
)


@pytest.mark.parametrize("message", OF_NCCL)
def test_line_of_nccl_is_documented_and_explained(message: str) -> None:
    assert "Bootstrap : no socket interface found" in find_entry(message)
    for end in (explain_end("", f"JaxRuntimeError: {message}"), explain_end(message)):
        assert end.endswith("no network interface of the pod that is up matches NCCL_SOCKET_IFNAME")


@pytest.mark.parametrize("number", SIGNALS)
def test_exit_code_of_a_signal_is_documented(number: str) -> None:
    kill = f"import os; os.kill(os.getpid(), {getattr(signal, number).value})"
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", kill], capture_output=True, text=True
    )
    shows(f"`{number}`", f"{done.stderr}exit {128 - done.returncode}")


@pytest.mark.parametrize("code", OF_PROGRAMS)
def test_exit_code_of_a_program_is_documented(code: str) -> None:
    done = subprocess.run(OF_PROGRAMS[code], capture_output=True)
    shows(f"`{code}`", f"exit {done.returncode}")


def test_error_of_a_job_is_documented() -> None:
    with pytest.raises(UserError) as raised:
        load.parse_job(
            "name: a\naccelerator: {type: cpu, per_host: 8}\ntrain: {task: 'a:B', batch: 100}\n"
        )
    shows("train.batch = 100 is not divisible by", str(raised.value))


def test_errors_of_commands_are_documented(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    text = launcher(capsys, monkeypatch, "list").err
    shows("does not exist, and this is not a pod of a cluster", text)
    (tmp_path / "damaged").write_text("a: [")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "damaged"))
    shows("is not a kubeconfig", launcher(capsys, monkeypatch, "list").err)
    shows("`exit 2`", f"exit {launcher(capsys, monkeypatch, 'validate', str(tmp_path)).code}")


@pytest.mark.parametrize("code", [code for code in contract.OUTCOMES if code != contract.DONE])
def test_last_line_of_a_run_is_documented(code: int) -> None:
    """Each code is left by a pod in tests/cluster/test_exit_codes.py."""
    line = f"launcher: failed at step 40: rank 1 raised X (exit {code}); see runs/lm/summary.json"
    assert f"`exit {code}`" in find_entry(line)


@pytest.mark.parametrize("case", [case for case in CASES if case not in OF_NO_ROW])
def test_first_line_of_explain_leads_to_its_entry(case: str) -> None:
    result = explain_job(CASES[case][0])
    words, about = find_entry(result.headline), OF_OTHERS.get(case, result.situation)
    assert [row[2] for row in ROWS if row[0] == words and about in row[2]] != [], result.headline


def test_unknown_message_has_no_entry() -> None:
    assert find_entry("all went well") == ""


# --- entries that a test produces -----------------------------------------------------------------


def list_produced_words() -> Iterator[str]:
    """The words of entries that a test produces."""
    yield from (words for words, _ in shown())
    for table in (OF_JAX, OF_PEERS, OF_JOINING, ON_CLUSTER):
        yield from table.values()
    yield from LIMITED
    yield from (f"`{code}`" for code in OF_PROGRAMS)
    yield from (f"`{number}`" for number in SIGNALS)
    yield from (f"`exit {code}`" for code in contract.OUTCOMES)


def find_entries(words: Sequence[str]) -> set[str]:
    """The entries that have some of these words; each has one."""
    cells = [row[0] for row in ROWS]
    result = {item: [cell for cell in cells if item in cell] for item in words}
    assert [item for item, cells in result.items() if not cells] == []
    return {cell for cells in result.values() for cell in cells}


def test_every_entry_is_produced_by_a_test() -> None:
    explained = {find_entry(explain_job(job).headline) for job, _ in CASES.values()} - {""}
    created = find_entries([*list_produced_words()])
    left = find_entries([words for them in NOT_HERE.values() for words in them])
    assert len(created) >= 60
    assert sorted({row[0] for row in ROWS} - created - explained - left) == []
    assert sorted(created & left) == []


def test_every_entry_has_search_words() -> None:
    assert [row[0] for row in ROWS if not find_phrases(row)] == []
