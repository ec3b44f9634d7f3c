"""Bare jax.distributed programs that do not know jaxlaunch, mostly two processes each."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from tests import needs
from tests.found import shows
from tests.gang.agents import ROOT, Gang, make_job, run_gang, run_program, run_script, write_script

SIZE = 2
SLACK = 3  # times an issue's bounds: the machine may be slow
PREAMBLE = """
import os, sys, time
import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils
jax.distributed.initialize()
rank = jax.process_index()
def together(value):
    return float(multihost_utils.process_allgather(jnp.float32(value)).sum())
total = together(rank)
"""
SUM = (
    PREAMBLE + 'print(f"rank {rank} of {jax.process_count()} on {jax.local_device_count()} sums to '
    '{total}")\n'
)


def expected_sums(size: int) -> list[tuple[str, str]]:
    """Return what `printed_sums` finds when all ranks joined."""
    total = sum(range(size))
    return [(str(rank), f"rank {rank} of {size} on 2 sums to {total}.0") for rank in range(size)]


def printed_sums(out: str) -> list[tuple[str, str]]:
    """Return what each rank printed after its prefix. Lines of Gloo (C++) may come between."""
    return sorted(
        re.findall(r"^\[(\d)\] .*?(rank \d of \d on \d sums to \d\.\d)", out, re.MULTILINE)
    )


# Nothing answers at this address.
PROXIES = {
    **dict.fromkeys(("https_proxy", "HTTPS_PROXY", "http_proxy"), "http://192.0.2.99:3128"),
    "no_proxy": ".svc,.cluster.local,10.0.0.0/8",
}


# How rank 0, 1 and 2 start. The last one sets the proxies itself, as a shell script might.
STARTS = f"""
case $JAX_PROCESS_ID in
  0) exec {sys.executable} bare.py ;;
  1) exec {sys.executable} -m bare ;;
  2) unset {" ".join(PROXIES)}; exec ./sets.py ;;
esac
"""
FIRST = (
    "from jax._src.clusters import ClusterEnv\nprint('first', ClusterEnv._cluster_types[0].name)\n"
)


def test_bare_initialize_joins_however_the_program_is_started(tmp_path: Path) -> None:
    write_script(tmp_path, SUM + FIRST, "bare.py")
    sets = f"#!{sys.executable}\nimport os\nos.environ.update({PROXIES})\n"
    write_script(tmp_path, sets + SUM, "sets.py").chmod(0o755)
    job = make_job(("sh", "-c", STARTS), devices_per_process=2, timeouts_s={"rendezvous": 60.0})
    gang, codes = run_gang(tmp_path, job, hosts=3, env=PROXIES)
    assert codes == [0] * 3, gang.stderr + gang.stdout
    assert printed_sums(gang.stdout) == expected_sums(3)
    assert gang.stdout.count("first jaxlaunch") == 2
    assert not gang.summary["notes"]


LATE = """
if RANK == 1:
    import jax
    say(phase="init")
    mark("waits")
    jax.distributed.initialize()
wait_for("waits-1")
time.sleep(3.0)  # by then rank 1's agent has read its phase, which would else be a race
say(phase="init")
sys.path.append(os.path.join(os.path.dirname(__file__), "lib", "jax"))
import held
"""


def test_rank_that_still_imports_is_the_cause_of_a_hang_in_initialize(tmp_path: Path) -> None:
    """Check with an innermost frame in a file of JAX, and an own timeout that passes later."""
    (tmp_path / "lib" / "jax").mkdir(parents=True)
    write_script(tmp_path / "lib" / "jax", "import time\ntime.sleep(3600)\n", "held.py")
    gang, codes = run_program(tmp_path, LATE, timeouts_s={"init": 8.0}, in_place_limit=0, hosts=2)
    assert codes == [82, 82]
    assert "passed first on rank 1" in gang.verdict["message"], gang.verdict["message"]
    assert gang.verdict["rank"] == 0, gang.verdict["message"]
    assert gang.verdict["message"].startswith(
        "rank 0 makes no progress in init (the init timeout of 8 s passed first"
    )
    assert "rank 0 in init importing in <module> (held.py:2)" in gang.verdict["message"]
    assert gang.verdict["message"].endswith("; rank 1 waits for rank 0")
    shows("waits for rank", gang.verdict["message"])


ELSEWHERE = """
import os
import jax
coordinator = os.environ["JAX_COORDINATOR_ADDRESS"]
os.environ["JAX_COORDINATOR_ADDRESS"] = "192.0.2.7:1234"
try:
    jax.distributed.initialize()
except RuntimeError as error:
    print("said", error)
os.environ["JAX_COORDINATOR_ADDRESS"] = coordinator
"""


def test_host_without_an_address_for_its_name_connects_only_its_own_processes(
    tmp_path: Path,
) -> None:
    renamed = ("unshare", "--user", "--map-root-user", "--uts", "sh", "-c")
    if subprocess.run([*renamed, "hostname nowhere.invalid"], capture_output=True).returncode:
        needs.absent("this kernel gives no namespace of names (unshare --user --uts)")
    file = write_script(tmp_path, ELSEWHERE + SUM)
    command = (*renamed, f"hostname nowhere.invalid; exec {sys.executable} {file}")
    gang, codes = run_gang(
        tmp_path, make_job(command, devices_per_process=2, processes_per_host=SIZE)
    )
    assert codes == [0], gang.stderr + gang.stdout
    assert printed_sums(gang.stdout) == expected_sums(SIZE)
    errors = re.findall(r"said (.+)$", gang.stdout, re.MULTILINE)
    assert len(errors) == SIZE and len(set(errors)) == 1
    shows("this host's own name, …, does not resolve", errors[0])
    assert errors[0].endswith(
        "add the line `ADDRESS nowhere.invalid` to /etc/hosts, with the address at which other "
        "hosts reach this one"
    )


LISTENS = """
port = int(os.environ["JAX_COORDINATOR_ADDRESS"].rpartition(":")[2])
for line in [*open("/proc/net/tcp"), *open("/proc/net/tcp6")]:
    address, state = line.split()[1], line.split()[3]
    if state == "0A" and int(address[-4:], 16) == port and rank == 0:
        print("listens at", address[:-5])
"""


# Who listens before process 0 calls `initialize` sees a process ask whether it does: a connection
# without a byte.
IS_ASKED = """
import os, socket
if os.environ["JAX_PROCESS_ID"] == "0":
    host, _, port = os.environ["JAX_COORDINATOR_ADDRESS"].rpartition(":")
    with socket.create_server((host, int(port))) as server:
        asks, _ = server.accept()
        print("asked with", asks.recv(1))
        asks.close()
"""


def test_coordinator_of_one_host_listens_on_loopback_only(tmp_path: Path) -> None:
    file = write_script(tmp_path, IS_ASKED + SUM + LISTENS)
    gang, codes = run_gang(
        tmp_path,
        make_job((sys.executable, str(file)), devices_per_process=2, processes_per_host=SIZE),
    )
    assert codes == [0], gang.stderr + gang.stdout
    assert printed_sums(gang.stdout) == expected_sums(SIZE)
    assert "asked with b''" in gang.stdout
    listening = re.findall(r"listens at (\w+)", gang.stdout)
    # 127.0.0.1, little end first.
    assert listening, gang.stdout
    assert all(address.endswith("0100007F") for address in listening), gang.stdout


def test_initialize_keeps_the_timeouts_of_the_program_and_may_be_called_again(
    tmp_path: Path,
) -> None:
    text = """
    import jax
    import jax._src.distributed as private
    def print_timeouts(*args, heartbeat_timeout_seconds, shutdown_timeout_seconds, **_):
        print("got", args[5], heartbeat_timeout_seconds, shutdown_timeout_seconds, args[6])
        private._jax.get_distributed_runtime_client()
    private._jax.get_distributed_runtime_client = lambda **kwargs: print("client", kwargs)
    private.global_state.initialize = print_timeouts
    jax.distributed.initialize(heartbeat_timeout_seconds=7)
    jax.distributed.initialize(shutdown_timeout_seconds=900)
    jax.distributed.initialize("mine:1234", 1, 0, coordinator_bind_address="0.0.0.0:1234")
    joined = private.global_state
    joined.client, joined.coordinator_address = "joined", "ours:1"
    jax.distributed.initialize(), jax.distributed.initialize("mine:1234", 1, 0)
    joined.client = None
    """
    gang, codes = run_script(tmp_path, text, timeouts_s={"rendezvous": 77.0})
    assert codes == [0], gang.stdout
    # A process waits a week for the others, unless the program says otherwise. JAX passes its
    # shutdown timeout only to the service.
    assert gang.stdout.splitlines() == [
        "[0] got 77 7 604800 None",
        "[0] client {'shutdown_timeout': 604800}",
        "[0] got 77 30 900 None",
        "[0] client {'shutdown_timeout': 900}",
        "[0] got 77 30 604800 None",
        "[0] client {'shutdown_timeout': 604800}",
    ]
    # A second call does nothing.
    assert len(gang.summary["notes"]) == 1
    assert "(coordinator_bind_address, coordinator_address):" in gang.summary["notes"][0]


RAISES = (
    PREAMBLE
    + """
if rank == 1:
    open(os.environ["MARKS"] + "/raised-1", "w").close()
    raise ValueError("a bad batch")
while True:
    together(1)
"""
)


def test_uncaught_exception_is_the_verdict(tmp_path: Path) -> None:
    with Gang(
        tmp_path, make_job((sys.executable, str(write_script(tmp_path, RAISES)))), hosts=SIZE
    ) as gang:
        gang.start()
        gang.wait_for_marks("raised-1")
        raised = time.monotonic()
        pids = gang.child_pids()
        gang.wait_until_gone(pids)
        assert time.monotonic() - raised <= 3 * SLACK
        assert gang.wait() == [83] * SIZE
    assert gang.verdict["message"] == "rank 1 raised: ValueError: a bad batch"
    assert "script.py" in gang.verdict["traceback"]
    assert gang.stdout.count("ValueError: a bad batch") == 1


def test_exception_with_a_custom_excepthook_is_the_verdict(tmp_path: Path) -> None:
    text = """
    import sys
    sys.excepthook = lambda *args: print("own hook", args[1])
    raise ValueError("a bad batch")
    """
    gang, codes = run_script(tmp_path, text)
    assert codes == [83]
    assert gang.verdict["message"] == "rank 0 raised: ValueError: a bad batch"
    assert "own hook a bad batch" in gang.stdout


def test_rank_that_exits_early_is_named(tmp_path: Path) -> None:
    leaves = RAISES.replace('raise ValueError("a bad batch")', "sys.exit(0)")
    gang, codes = run_script(tmp_path, leaves, hosts=SIZE)
    assert codes == [83] * SIZE
    message = gang.verdict["message"]
    assert message.startswith("rank 1's program ended while other ranks were still")
    shows("program ended while other ranks were still running", message)


def test_killed_rank_is_named_although_its_peers_fail_too(tmp_path: Path) -> None:
    killed = RAISES.replace('raise ValueError("a bad batch")', "os.kill(os.getpid(), 9)")
    gang, codes = run_script(tmp_path, killed, hosts=SIZE)
    assert codes == [137] * SIZE
    assert gang.verdict["message"].startswith("rank 1 was killed by SIGKILL")
    shows("exit 137", gang.verdict["message"])


def test_bare_program_without_the_hook_fails_with_a_warning(tmp_path: Path) -> None:
    command = (sys.executable, "-I", str(write_script(tmp_path, SUM)))
    gang, codes = run_gang(tmp_path, make_job(command))
    assert codes == [83]
    assert re.search(r"warning: rank \d has not loaded jaxlaunch's sitecustomize.py", gang.stderr)
    assert "`python -I`" in gang.stderr
    assert "Number of processes must be defined" in (gang.verdict["traceback"] or "")


def test_sitecustomize_of_the_user_runs_as_if_alone(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    write_script(
        theirs, "import sys\nprint('theirs', __name__, 'jax' in sys.modules)\n", "sitecustomize.py"
    )
    text = (
        "import sys, sitecustomize\nprint(sitecustomize.__file__, sum('/site' == p[-5:] for p "
        "in sys.path))"
    )
    path = os.pathsep.join(map(str, (ROOT, theirs)))
    gang, codes = run_script(tmp_path, text, env={"PYTHONPATH": path})
    assert codes == [0]
    assert "[0] theirs sitecustomize False" in gang.stdout
    assert f"[0] {theirs}/sitecustomize.py 0" in gang.stdout


def test_rank_that_computes_while_its_peers_wait_in_a_collective_is_named(tmp_path: Path) -> None:
    hangs = (
        PREAMBLE
        + """
def say_step():
    os.write(int(os.environ["JAXLAUNCH_PROGRESS_FD"]), b'{"phase": "step", "step": 9}\\n')
say_step()
def alone():
    time.sleep(3600)
alone() if rank == 1 else together(1)
"""
    )
    gang, codes = run_script(tmp_path, hangs, timeouts_s={"step": 2.0}, hosts=SIZE)
    assert codes == [82] * SIZE
    assert gang.verdict["rank"] == 1
    assert "rank 1 in step in alone (script.py" in gang.verdict["message"]
    assert "rank 0 in step in " in gang.verdict["message"]


def test_cluster_of_jaxlaunch_is_not_first_on_tpu(tmp_path: Path) -> None:
    text = "import jax\n" + FIRST
    gang, codes = run_script(tmp_path, text, platform="tpu", env={"JAX_PLATFORMS": "cpu"})
    assert codes == [0] and gang.stdout == "[0] first ompi\n"


def test_python_started_by_the_program_does_not_report_for_it(tmp_path: Path) -> None:
    text = """
    import subprocess, sys
    program = "raise SystemError('of the grandchild')"
    child = subprocess.run([sys.executable, "-c", program], close_fds=False)
    print("grandchild", child.returncode)
    """
    gang, codes = run_script(tmp_path, text)
    assert codes == [0], gang.stderr
    assert "[0] grandchild 1" in gang.stdout and gang.verdict["cause"] == "done"
