"""A way into running pods: commands, a terminal, ports and files, with and without the rights."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import select
import signal
import socket
import struct
import subprocess
import termios
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxlaunch.launcher.job.defaults import Defaults
from tests.cluster import command, preparations
from tests.cluster.access import Access
from tests.cluster.gangs import ROOT, Gang, Workspace, make_workspace, wait_for

# Serves the folder /tmp/served, whose file names the rank.
PROGRAM = """
import functools, http.server, os
os.makedirs("/tmp/served")
os.chdir("/tmp/served")
open("rank", "w").write(os.environ["JAX_PROCESS_ID"])
server = http.server.ThreadingHTTPServer(("127.0.0.1", 8123), http.server.SimpleHTTPRequestHandler)
print("begun", flush=True)
server.serve_forever()
"""
ENTERED = """
import os, sys
names = ("JAX_PROCESS_ID", "JAX_COORDINATOR_ADDRESS", "JAXLAUNCH_PROGRESS", "MINE")
print(os.getcwd(), *(os.environ.get(name) for name in names))
print(sys.stdin.read(), file=sys.stderr)
sys.exit(7)
"""
INTERRUPTED = """
import sys, time
print("ready", flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(9)
"""
FAILS = """
import os, time
open("/tmp/left", "w").write(os.environ["JAX_PROCESS_ID"])
if os.environ["JAX_PROCESS_ID"] == "1":
    raise ValueError("no such batch")
time.sleep(600)
"""
LIMIT_S = 240
SIZE_BYTES, CUT_BYTES = 20 * 1024 * 1024, 6 * 1024 * 1024


@pytest.fixture(scope="module")
def workspace(cluster: Access, base_image: str) -> Iterator[Workspace]:
    with make_workspace(cluster, base_image) as workspace:
        yield workspace


@pytest.fixture(autouse=True)
def time_limit() -> Iterator[None]:
    """Fail a test whose command does not end."""

    def fail(*_: object) -> None:
        raise AssertionError(f"a command has not ended within {LIMIT_S} s")

    previous = signal.signal(signal.SIGALRM, fail)
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


@pytest.fixture(scope="module")
def gang(workspace: Workspace) -> Gang:
    """Return a job of two hosts whose ranks serve files."""
    gang = workspace.start(
        "own",
        Defaults(),
        hosts=2,
        command=["python", "-c", PROGRAM],
        env={"MINE": "set"},
        resources={"cpu": "50m", "memory": "256Mi"},
        grace="6s",
    )
    gang.wait_for_line("begun")
    gang.wait_until_running()
    return gang


def run(workspace: Workspace, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the launcher to its end."""
    words = (name, "-n", workspace.namespace, *words)
    return command.run_launcher(workspace.access, Path.cwd(), *words)


def start(workspace: Workspace, name: str, *words: str) -> subprocess.Popen[str]:
    """Start a command of the launcher."""
    words = (name, "-n", workspace.namespace, *words)
    return command.start_launcher(workspace.access, Path.cwd(), *words)


# --- commands -------------------------------------------------------------------------------------


def test_command_has_folder_environment_and_exit_code(workspace: Workspace, gang: Gang) -> None:
    done = run(workspace, "exec", "own", "--rank", "1", "--", "python", "-c", ENTERED)
    assert done.returncode == 7, done.stderr
    assert done.stdout == "/tmp/served 1 None None set\n"
    missing = run(workspace, "exec", "own", "--host", "0", "--", "no-such-program")
    assert missing.returncode == 127
    assert missing.stderr == "no-such-program: No such file or directory\n"
    beyond = run(workspace, "exec", "own", "--rank", "2", "--", "true")
    assert (beyond.returncode, beyond.stderr) == (2, "own has no rank 2: its last is 1.\n")


def test_interrupt_is_passed_on_without_terminal(workspace: Workspace, gang: Gang) -> None:
    process = start(workspace, "exec", "own", "--", "python", "-c", INTERRUPTED)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate()[0] == "interrupted\n"
    assert process.returncode == 9


class Terminal:
    """A terminal with a command of the launcher."""

    def __init__(self, workspace: Workspace, *words: str) -> None:
        self._pid, self._fd = os.forkpty()
        if self._pid == 0:
            try:
                os.environ.update(workspace.access.env)
                argv = [*command.COMMAND, *words, "-n", workspace.namespace]
                os.execv(argv[0], argv)
            finally:
                os._exit(1)
        self._text = ""

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, text: str) -> None:
        """Read until the terminal shows a text, and forget what precedes its end."""
        deadline = time.monotonic() + 120
        while text not in self._text:
            assert time.monotonic() < deadline, f"{text!r} is not in {self._text[-2000:]!r}"
            assert select.select([self._fd], (), (), 60)[0], f"{text!r} is not in {self._text!r}"
            try:
                self._text += os.read(self._fd, 4096).decode(errors="replace")
            except OSError:
                raise AssertionError(f"{text!r} is not in {self._text!r}") from None
        self._text = self._text.partition(text)[2]

    def wait_for_end(self) -> int:
        with contextlib.suppress(OSError):
            while os.read(self._fd, 4096):
                pass
        os.close(self._fd)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


def test_shell_has_a_terminal(workspace: Workspace, gang: Gang) -> None:
    show_size = "python -c 'import os; print(\"size\", *os.get_terminal_size(0))'"
    terminal = Terminal(workspace, "shell", "own", "--rank", "1")
    terminal.wait_for("$ ")
    terminal.type("echo rank=$JAX_PROCESS_ID in $PWD\n")
    terminal.wait_for("rank=1 in /tmp/served")
    terminal.resize(131, 47)
    # The new size reaches the pod by a message of its own.
    terminal.type(f"while ! {show_size} | grep 131; do sleep 0.1; done\n")
    terminal.wait_for("size 131 47")
    # Ctrl-C ends the program, and neither the shell nor the launcher.
    terminal.type("echo slee''ping; sleep 600\n")
    terminal.wait_for("sleeping")
    terminal.type("\x03")
    terminal.type("echo code=$?\n")
    terminal.wait_for("code=130")
    terminal.type("exit 5\n")
    assert terminal.wait_for_end() == 5


# --- ports ----------------------------------------------------------------------------------------


def test_port_is_forwarded(workspace: Workspace, gang: Gang) -> None:
    process = start(workspace, "port-forward", "own", "0:8123", "--rank", "1")
    assert process.stdout is not None
    address, _, target = process.stdout.readline().partition(" -> ")
    assert target.endswith(":8123\n")
    for _ in range(2):
        with urllib.request.urlopen(f"http://{address}/rank", timeout=60) as response:
            assert response.read() == b"1"
    process.send_signal(signal.SIGINT)
    assert process.communicate()[0].strip() == ""
    assert process.returncode == 130


# --- files ----------------------------------------------------------------------------------------


class CuttingRelay:
    """Passes connections on to the API server, and cuts all of them once, after some bytes."""

    def __init__(self, target: tuple[str, int], cut_after: int) -> None:
        self._target, self._left = target, cut_after
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start_thread(self._serve)

    def _start_thread(self, target: Callable[..., None], *arguments: socket.socket) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._server.accept()[0]
                server = socket.create_connection(self._target)
                self._sockets += [client, server]
                for source, sink in ((client, server), (server, client)):
                    self._start_thread(self._pass_on, source, sink)

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with source, contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
                before, self._left = self._left, self._left - len(data)
                if before > 0 >= self._left:
                    self._cut()
            sink.shutdown(socket.SHUT_WR)

    def _cut(self) -> None:
        for connection in self._sockets:
            # Some have ended.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sockets.append(self._server)
        self._cut()
        for thread in self._threads:
            thread.join()
        self._server.close()


@contextlib.contextmanager
def cut_connections(workspace: Workspace, folder: Path) -> Iterator[Workspace]:
    """Yield the workspace behind a relay that cuts every connection once."""
    config: Any = yaml.safe_load(workspace.access.kubeconfig.read_text())
    host, _, port = config["clusters"][0]["cluster"]["server"].rpartition("/")[2].rpartition(":")
    relay = CuttingRelay((host, int(port)), CUT_BYTES)
    config["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{relay.port}"
    file = folder / "relayed.yaml"
    file.write_text(yaml.safe_dump(config))
    access = Access(file, workspace.access.kubectl_path, False)
    relayed = Workspace(access, workspace.namespace, workspace.image)
    yield relayed
    relay.close()


def test_copy_continues_after_a_cut(workspace: Workspace, gang: Gang, tmp_path: Path) -> None:
    source, back = tmp_path / "source", tmp_path / "back"
    (source / "below").mkdir(parents=True)
    (source / "empty").mkdir()
    (source / "large").write_bytes(os.urandom(SIZE_BYTES))
    (source / "below" / "run.sh").write_text("echo done\n")
    (source / "below" / "run.sh").chmod(0o755)
    for paths in ((str(source), "own:/tmp"), ("own:/tmp/source", str(back))):
        with cut_connections(workspace, tmp_path) as relayed:
            copied = run(relayed, "copy", *paths, "--rank", "1")
        assert copied.returncode == 0, copied.stderr
        assert "Continuing." in copied.stderr
        assert copied.stdout.startswith("copied 2 files, ")
        assert "continued after" in copied.stdout
    assert hash_file(back / "large") == hash_file(source / "large")
    assert (back / "empty").is_dir()
    assert (back / "below" / "run.sh").stat().st_mode & 0o777 == 0o755
    ran = run(workspace, "exec", "own", "--rank", "1", "--", "sh", "/tmp/source/below/run.sh")
    assert ran.stdout == "done\n"
    again = run(workspace, "copy", "own:rank", str(back / "rank-0"))
    assert again.stdout == "copied 1 file, 1 B\n", again.stderr
    assert (back / "rank-0").read_text() == "0"
    again = run(workspace, "copy", "own:rank", str(back / "rank-0"))
    assert again.stdout == "copied 0 files, 0 B, 1 unchanged\n"
    missing = run(workspace, "copy", "own:/no/such", str(back))
    assert (missing.returncode, missing.stderr) == (
        2,
        "There is no file or folder /no/such to copy.\n",
    )
    unwritable = run(workspace, "copy", str(source / "large"), "own:/proc/large")
    assert unwritable.returncode == 2
    assert unwritable.stderr.startswith("In pod own-w-0-0-"), unwritable.stderr


def hash_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# --- after a failure ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def held_gangs(workspace: Workspace) -> list[Gang]:
    """Return two jobs that have failed, and whose pods stay for a look."""
    gangs = [
        workspace.start(
            name,
            Defaults(),
            hosts=2,
            command=["python", "-c", FAILS],
            restarts={"crash": 0, "in_place": 0},
            hold_on_failure="1h",
            workdir="/tmp",
            resources={"cpu": "50m", "memory": "256Mi"},
            grace="6s",
        )
        for name in ("held", "released")
    ]
    for gang in gangs:
        gang.wait_for_line("held until ")
    return gangs


def test_failed_job_is_held_for_a_look(
    workspace: Workspace, held_gangs: list[Gang], tmp_path: Path
) -> None:
    status = json.loads(run(workspace, "status", "held", "-o", "json").stdout)
    assert (status["state"], status["verdict"]["code"]) == ("Held", 83)
    explained = run(workspace, "explain", "held").stdout
    assert re.search(
        "^held failed: crash .* no such batch; it is held until .* UTC$", explained, re.M
    )
    show = "echo rank $JAX_PROCESS_ID of $JAX_NUM_PROCESSES in $PWD: $(cat left)"
    words = ("exec", "held", "--rank", "1", "--", "sh", "-c", show)
    # Host 1 learns of the hold after host 0 has logged it.
    wait_for(
        "the environment of rank 1",
        lambda: run(workspace, *words).stdout == "rank 1 of 2 in /tmp: 1\n",
    )
    copied = run(workspace, "copy", "held:left", str(tmp_path / "left"), "--rank", "1")
    assert copied.stdout == "copied 1 file, 1 B\n", copied.stderr
    terminal = Terminal(workspace, "shell", "held", "--rank", "1")
    terminal.wait_for("$ ")
    terminal.type("exit 5\n")
    assert terminal.wait_for_end() == 5
    stopped = run(workspace, "stop", "held")
    assert "no such batch" in stopped.stdout + stopped.stderr
    assert held_gangs[0].wait_for_end() == "Failed"
    status = json.loads(run(workspace, "status", "held", "-o", "json").stdout)
    assert (status["state"], status["code"]) == ("Failed", 83)


def test_released_job_fails_with_its_code(workspace: Workspace, held_gangs: list[Gang]) -> None:
    release = "import os, signal; os.kill(1, signal.SIGTERM)"
    # The pod may end before the exit code of this command arrives.
    run(workspace, "exec", "released", "--rank", "1", "--", "python", "-c", release)
    assert held_gangs[1].wait_for_end() == "Failed"
    status = json.loads(run(workspace, "status", "released", "-o", "json").stdout)
    assert (status["state"], status["code"]) == ("Failed", 83)


# --- rights ---------------------------------------------------------------------------------------


def test_rights_are_those_of_a_user_and_a_missing_one_is_named(
    workspace: Workspace, gang: Gang, tmp_path: Path
) -> None:
    roles = yaml.safe_load_all((ROOT / "k8s" / "install.yaml").read_text())
    rules = next(role["rules"] for role in roles if role["metadata"]["name"] == "jaxlaunch-user")
    as_user = act_as(workspace, rules, tmp_path)
    allowed = run(as_user, "exec", "own", "--", "python", "-c", "print('in')")
    assert (allowed.returncode, allowed.stdout) == (0, "in\n"), allowed.stderr
    subresources = {"pods/exec", "pods/portforward"}
    fewer = [rule for rule in rules if not subresources & set(rule["resources"])]
    as_viewer = act_as(workspace, fewer, tmp_path)
    commands = {
        "pods/exec": (("exec", "own", "ls"), ("shell", "own"), ("copy", "own:rank", "rank")),
        "pods/portforward": (("port-forward", "own", "0:8123"),),
    }
    for right, calls in commands.items():
        for call in calls:
            refused = run(as_viewer, *call)
            assert (refused.returncode, refused.stdout) == (3, "")
            assert refused.stderr.startswith(f"The right to get and create {right} is missing: ")
            assert refused.stderr.count("\n") == 1


def act_as(workspace: Workspace, rules: list[dict[str, Any]], folder: Path) -> Workspace:
    """Return the workspace of a user with these rules alone."""
    file = preparations.make_user(workspace.access, workspace.namespace, rules, folder)
    access = Access(file, workspace.access.kubectl_path, False)
    return Workspace(access, workspace.namespace, workspace.image)
