"""Commands in real pods that start their program through another, or several of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jaxlaunch.launcher.job.defaults import Defaults
from tests.cluster.access import Access
from tests.cluster.gangs import Gang, Workspace, make_workspace, read_verdicts

JOINS = """
import os, sys, jax
jax.distributed.initialize({arguments})
import jax.numpy as jnp
from jax.experimental import multihost_utils
def square(number):
    return number * number
if __name__ == "__main__":
    import jaxlaunch
    print("sum", multihost_utils.process_allgather(jnp.ones(1)).sum())
    jaxlaunch.report(step=3)
    {ends}
    print("end of rank", jax.process_index())
"""
RAISES = (
    'if jax.process_index() == 1: raise ValueError("bad batch 17")\n'
    "    multihost_utils.process_allgather(jnp.ones(1))"
)
SPAWNS = (
    "import multiprocessing\n"
    '    with multiprocessing.get_context("spawn").Pool(2) as pool:\n'
    "        print(sum(pool.map(square, range(8))))"
)
SLURM = 'cluster_detection_method="slurm"'
# The program is the last argument of a shell, which writes it into a file.
WRITES = 'printf "%s" "$0" > /tmp/train.py; '
WRAPPER = (
    "import subprocess, sys; "
    "sys.exit(subprocess.run(sys.argv[1:], start_new_session=True).returncode)"
)


def make_command(line: str, *, arguments: str = "", ends: str = "pass") -> list[str]:
    return ["sh", "-c", WRITES + line, JOINS.format(arguments=arguments, ends=ends)]


COMMANDS = {
    "wrapped": make_command(f"exec python -c '{WRAPPER}' python /tmp/train.py", ends=RAISES),
    "workers": make_command("exec python /tmp/train.py", ends=SPAWNS),
    "slurm": make_command("exec python /tmp/train.py", arguments=SLURM),
    "twice": make_command(
        "python /tmp/train.py & python /tmp/train.py & wait $!; code=$?; wait; exit $code"
    ),
}
# How each ends, with the restarts of its JobSet and the code of its verdict.
ENDS = {"wrapped": ("Failed", 83), "workers": ("Completed", 0), "slurm": ("Completed", 0)}


@pytest.fixture(scope="module")
def gangs(cluster: Access, image: str) -> Iterator[dict[str, Gang]]:
    """Start every command on two hosts. Only the wrapped one may not restart."""
    with make_workspace(cluster, image) as workspace:
        yield {name: start_gang(workspace, name) for name in COMMANDS}


def start_gang(workspace: Workspace, name: str) -> Gang:
    restarts = {"in_place": 0, "crash": 0} if name == "wrapped" else {}
    command = COMMANDS[name]
    return workspace.start(name, Defaults(), hosts=2, command=command, restarts=restarts)


@pytest.mark.parametrize("name", ENDS)
def test_program_behind_a_wrapper_ends_its_job(gangs: dict[str, Gang], name: str) -> None:
    end, code = ENDS[name]
    gang = gangs[name]
    assert gang.wait_for_end() == end, gang.read_lines()
    assert gang.counters == (0, 0)
    verdicts = read_verdicts(gang.hosts)
    assert {verdict.code for verdict in verdicts} == {code}
    if code:
        assert {verdict.message for verdict in verdicts} == {
            "rank 1 raised at step 3: ValueError: bad batch 17"
        }


def test_second_process_of_a_rank_fails_its_job_without_a_restart(gangs: dict[str, Gang]) -> None:
    gang = gangs["twice"]
    assert gang.wait_for_end() == "Failed"
    assert gang.counters == (0, 0)
    verdict = read_verdicts(gang.hosts)[0]
    assert verdict.code == 64 and "`processes_per_host`" in verdict.message
