"""Which hosts join, which do not, and which are refused, by name and value."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.agent.gang import config
from tests.found import shows
from tests.gang.agents import PATIENCE_S, ROOT, Gang, make_job, run_gang, write_program

SHORT = {"rendezvous": 2.0}


@pytest.mark.parametrize(
    ("present", "words"),
    [
        ((0, 2), "rendezvous: host 1 did not join"),
        ((1,), "rendezvous: hosts 0, 2 did not join"),
        ((0,), "hosts 1, 2"),
    ],
)
def test_missing_hosts_are_named(tmp_path: Path, present: tuple[int, ...], words: str) -> None:
    with Gang(tmp_path, make_job(write_program(tmp_path, ""), timeouts_s=SHORT), hosts=3) as gang:
        codes = gang.start(*present).wait()
    assert codes == [81] * len(present)
    if 0 not in present:
        words = "rendezvous: cannot join host 0 at 127.0.0.1"
        assert "connection refused for" in gang.stderr
    assert words in gang.stderr
    assert words in gang.verdict["message"]
    if 0 not in present:
        shows("rendezvous: cannot join host 0 at …: connection refused", gang.verdict["message"])
    else:
        shows("rendezvous: host 1 did not join within", gang.verdict["message"])


def test_unresolved_name_of_the_leader_is_reported(tmp_path: Path) -> None:
    with Gang(tmp_path, make_job(write_program(tmp_path, ""), timeouts_s=SHORT), hosts=2) as gang:
        codes = gang.start(1, env={contract.LEADER: "no-such-host.invalid:4711"}).wait()
    assert codes == [81]
    assert "cannot join host 0 at no-such-host.invalid:4711: name not resolved for" in gang.stderr
    shows("rendezvous: cannot join host 0 at …: name not resolved", gang.stderr)


def test_leader_whose_pod_address_cannot_be_bound_listens_everywhere(tmp_path: Path) -> None:
    with Gang(tmp_path, make_job(write_program(tmp_path, "")), hosts=2) as gang:
        # Not the loopback address of `launcher run`.
        address = {contract.LEADER: f"127.0.0.2:{gang.port}", contract.POD_IP: "192.0.2.7"}
        codes = gang.start(env=address).wait()
    assert codes == [0, 0], gang.stderr
    note = "the pod's address, 192.0.2.7, is not one of its interfaces"
    assert note in gang.stderr and any(note in text for text in gang.summary["notes"])


def test_second_host_with_the_same_index_is_refused(tmp_path: Path) -> None:
    command = write_program(tmp_path, "mark('up'); wait_for('go')")
    with Gang(tmp_path, make_job(command), hosts=2) as gang:
        gang.start(1, env={contract.POD_UID: "first"})
        gang.start(0).wait_for_marks("up-0", "up-1")
        gang.start(1, env={contract.POD_UID: "second"}, name="second")
        assert gang.agents["second"].wait(PATIENCE_S) == 81
        gang.release("go")
        assert gang.wait() == [0, 0, 81]
    assert "pod second) has the same index as host 1" in gang.stderr
    assert "pod first), which has already joined" in gang.stderr


def test_different_jax_version_is_refused_on_every_host(tmp_path: Path) -> None:
    fake = tmp_path / "fake" / "jax-9.9.9.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: jax\nVersion: 9.9.9\n")
    with Gang(tmp_path, make_job(write_program(tmp_path, "")), hosts=3) as gang:
        gang.start(0, 1)
        gang.start(2, env={"PYTHONPATH": f"{ROOT}{os.pathsep}{fake.parent}"})
        assert gang.wait() == [64, 64, 64]
    ours = config.read_versions()["jax"]
    assert gang.verdict["message"] == f"host 2 has jax 9.9.9, host 0 has {ours}"
    assert (gang.verdict["host"], gang.verdict["cause"]) == (2, "bad_spec")
    shows("has jax 0.10.2, host 0 has", gang.verdict["message"])


def test_different_spec_is_refused_on_every_host(tmp_path: Path) -> None:
    job = make_job(write_program(tmp_path, ""))
    with Gang(tmp_path, job, hosts=2) as gang:
        gang.start(0)
        gang.start(1, env={contract.JOB: dataclasses.replace(job, grace_s=1.0).to_json()})
        assert gang.wait() == [64, 64]
    assert "host 1 has a different job: spec " in gang.verdict["message"]
    shows("host 1 has a different job: spec", gang.verdict["message"])


def test_hosts_of_another_generation_or_run_are_not_admitted(tmp_path: Path) -> None:
    command = write_program(tmp_path, "mark('up'); wait_for('go')")
    with Gang(tmp_path, make_job(command, timeouts_s={"rendezvous": 60.0}), hosts=2) as gang:
        gang.start(0)
        gang.start(1, env={contract.GENERATION: "7"}, name="stray")
        gang.wait_until(
            "the refusal",
            lambda: "belongs to another set of pods: it has generation 7" in gang.stderr,
        )
        gang.start(1, env={contract.UID: "uid-2"}, name="stranger")
        gang.wait_until(
            "its line",
            lambda: "host 0 did not admit this host: connection closed; it may be" in gang.stderr,
        )
        gang.wait_until(
            "the leader's line", lambda: "127.0.0.1: it does not have this run's key" in gang.stderr
        )
        gang.start(1).wait_for_marks("up-0", "up-1")
        gang.release("go")
        assert [gang.agents[host].wait(PATIENCE_S) for host in (0, 1)] == [0, 0]
    lines = gang.stderr.splitlines()
    shows(
        "belongs to another set of pods",
        next(line for line in lines if "another set of pods" in line),
    )
    shows("did not admit this host", next(line for line in lines if "did not admit" in line))


def test_hosts_of_slices_are_numbered_consecutively(tmp_path: Path) -> None:
    command = write_program(tmp_path, "print('rank', RANK, 'of', SIZE)")
    with Gang(tmp_path, make_job(command), hosts=2) as gang:
        for slice_index in (0, 1):
            env = {
                contract.HOSTS: "1",
                contract.SLICES: "2",
                contract.SLICE: str(slice_index),
                contract.INDEX: "0",
            }
            gang.start(slice_index, env=env)
        assert gang.wait() == [0, 0]
    assert sorted(gang.stdout.splitlines()) == ["[0] rank 0 of 2", "[1] rank 1 of 2"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (contract.LEADER, "nowhere"),
        (contract.INDEX, "2"),
        (contract.JOB, "{"),
        (contract.HOSTS, "x"),
    ],
)
def test_wrong_environment_is_refused_by_name_and_value(
    tmp_path: Path, name: str, value: str
) -> None:
    gang, codes = run_gang(tmp_path, make_job(None), hosts=1, env={name: value})
    assert codes == [64]
    assert name in gang.stderr and value in gang.stderr and "Traceback" not in gang.stderr


def test_port_in_use_is_reported(tmp_path: Path) -> None:
    command = write_program(tmp_path, "mark('up'); wait_for('go')")
    with Gang(tmp_path, make_job(command)) as gang:
        gang.start(0).wait_for_marks("up-0")
        gang.start(0, name="second")
        gang.agents["second"].wait(PATIENCE_S)
        gang.release("go")
        assert gang.wait() == [0, 81]
    assert "Is another agent of this host still running?" in gang.stderr
