"""Requests a profile of the next steps from the agents of a run, and waits for the results of their processes.

An agent accepts such requests from its own host only: here over loopback, in a pod by port-forward.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxlaunch import contract
from jaxlaunch.launcher.errors import ApiError, Unreachable, UserError
from jaxlaunch.launcher.jobs import ownership
from jaxlaunch.launcher.jobs.status import hosts
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.kinds import PODS
from jaxlaunch.launcher.kubernetes.labels import NAME_LABEL
from jaxlaunch.runs import run_folder
from jaxlaunch.runs.run_folder import Listed

HOSTS = 8  # that are profiled; of more than that only host 0
_POLL_S = 1.0
_TRIES = 3  # of a GET, on a cluster
_TIMEOUT_S = 10.0  # of a request to an agent here

Say = Callable[[str], None]
Answer = Mapping[str, Any]  # of an agent, as its JSON


class Gone(Exception):
    """The agent no longer answers: its run ended, or is restarting."""


class Agent(NamedTuple):
    """The agent of a host, and how to send it a request."""

    name: str  # host 0
    request: Callable[[str, str], tuple[int, Answer]]  # method and target -> HTTP status and answer; raises Gone


def here(folder: Path) -> list[Agent]:
    """The agents of a run on this machine. Raises UserError when they are not running here."""
    try:
        listed = run_folder.agents(folder)
    except FileNotFoundError:
        listed = []
    agents = [Agent(f"host {one.host}", _over_loopback(one.address)) for one in listed if _is_alive(one)]
    if not agents:
        raise UserError(
            f"{folder} is not running, or its processes have not started yet.",
            "start it with `launcher run`, or add -n NAMESPACE for a job on a cluster.",
        )
    return agents


def _is_alive(agent: Listed) -> bool:
    """Whether it runs on this machine: the run folder of a job on a cluster lists agents of other hosts."""
    return agent.address.startswith("127.0.0.1:") and Path(f"/proc/{agent.pid}").exists()


def _over_loopback(address: str) -> Callable[[str, str], tuple[int, Answer]]:
    def request(method: str, target: str) -> tuple[int, Answer]:
        connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_S)
        try:
            connection.request(method, target)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Gone(str(error)) from None
        finally:
            connection.close()

    return request


def on_cluster(cluster: Cluster, namespace: str, name: str) -> list[Agent]:
    """The agents of a job on a cluster. Raises UserError when there is no such job, or host 0 is not running."""
    jobset = ownership.own(cluster, name, namespace)
    pods = cluster.list(PODS, namespace, labels=f"{NAME_LABEL}={name}")
    running = [host for host in hosts.newest(jobset, pods) if host.running and not host.is_init]
    if not running or running[0].number != 0:
        hint = f"see `launcher explain -n {namespace} {name}`."
        raise UserError(f"Job {name} is not running: host 0 has no process.", hint)
    port = hosts.metrics_port(jobset)
    assert port is not None, "the JobSet is ours"
    return [Agent(host.name, _by_port_forward(cluster, namespace, host.pod, port)) for host in running]


def _by_port_forward(cluster: Cluster, namespace: str, pod: str, port: int) -> Callable[[str, str], tuple[int, Answer]]:
    def request(method: str, target: str) -> tuple[int, Answer]:
        sent = f"{method} {target} HTTP/1.1\r\nHost: {pod}\r\nContent-Length: 0\r\n\r\n".encode()
        for left in reversed(range(_TRIES if method == "GET" else 1)):
            try:
                head, _, body = cluster.port_forward(namespace, pod, port, sent).partition(b"\r\n\r\n")
                return int(head.split()[1]), json.loads(body)
            except (Unreachable, ValueError, LookupError) as error:
                fault = str(error)
            except ApiError as error:
                if error.status != 404:
                    raise
                raise Gone(error.message) from None
            time.sleep(_POLL_S if left else 0)
        raise Gone(fault)

    return request


def profile(agents: Sequence[Agent], steps: int, say: Say) -> dict[int, Answer]:
    """The last answer of each rank, its `state` done, failed or gone. Raises UserError when host 0 refuses."""
    if len(agents) > HOSTS:
        say(f"only {agents[0].name} of {len(agents)} hosts is profiled")
        agents = agents[:1]
    accepted = {agent: answer for agent in agents if (answer := _start(agent, steps, agent is agents[0], say))}
    states = {agent: _ranks(answer) for agent, answer in accepted.items()}
    reported: set[int] = set()
    while waiting := [agent for agent, ranks in states.items() if not _has_ended(ranks)]:
        time.sleep(_POLL_S)
        for agent in waiting:
            states[agent] = _poll(agent, accepted[agent]["id"], states[agent])
            for rank, one in states[agent].items():
                if one["state"] == "tracing" and rank not in reported:
                    reported.add(rank)
                    say(f"rank {rank} traces {one['steps']} steps from step {one['step']}")
    return dict(sorted((rank, one) for ranks in states.values() for rank, one in ranks.items()))


def _start(agent: Agent, steps: int, is_first: bool, say: Say) -> Answer | None:
    """The agent's first answer. Raises UserError when the first agent refuses; when a later one does, says so."""
    try:
        status, answer = agent.request("POST", f"/profile?steps={steps}")
    except Gone as gone:
        status, answer = 0, {"error": f"it does not answer: {gone}"}
    if status == 202:
        return answer
    refusal = f"{agent.name} refused the profile: {answer.get('error', answer)}."
    if is_first:
        raise UserError(refusal)
    say(refusal)
    return None


def _poll(agent: Agent, number: int, before: Mapping[int, Answer]) -> dict[int, Answer]:
    """The state of each rank in profile `number`; `gone` where the agent, or its profile, is."""
    try:
        answer = agent.request("GET", "/profile")[1]
        if answer.get("id") != number:
            raise Gone("another profile was requested since, or the agent restarted")
        return _ranks(answer)
    except Gone:
        return {rank: one if one["state"] in contract.PROFILED else {"state": "gone"} for rank, one in before.items()}


def _ranks(answer: Answer) -> dict[int, Answer]:
    return {int(rank): one for rank, one in answer["ranks"].items()}


def _has_ended(ranks: Mapping[int, Answer]) -> bool:
    return all(one["state"] in contract.PROFILED for one in ranks.values())
