"""Asks the agents of a run for a profile of its next steps, and waits for what their processes find.

An agent takes such requests from its own machine alone: here over loopback, in a pod through the API server.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from launcher import hosts, stop
from launcher.agent.memory import AGENTS
from launcher.agent.profiles import ENDED
from launcher.cluster import Cluster
from launcher.errors import ApiError, Unreachable, UserError
from launcher.jobset import NAME_LABEL
from launcher.kinds import PODS
from launcher.objects import template

HOSTS = 8  # that are asked; of a larger gang host 0 alone
METRICS_PORT = "metrics"  # of the container, by name
_POLL_S = 1.0
_TRIES = 3  # of a look, on a cluster
_PATIENCE_S = 10.0  # of an agent that is asked

Say = Callable[[str], None]
Found = Mapping[str, Any]


class Gone(Exception):
    """The agent does not answer any more: its run ended, or starts anew."""


class Agent(NamedTuple):
    """An agent, and a way to it."""

    name: str  # host 0
    ask: Callable[[str, str], tuple[int, Found]]  # method and target -> status and answer; raises Gone


def here(folder: Path) -> list[Agent]:
    """The agents of a run on this machine. Raises UserError when they do not run here."""
    try:
        listed = json.loads((folder / AGENTS).read_text())
    except FileNotFoundError:
        listed = []
    agents = [Agent(f"host {one['host']}", _over_loopback(one["address"])) for one in listed if _is_alive(one)]
    if not agents:
        raise UserError(
            f"{folder} is not running, or its processes have not started yet.",
            "`launcher run` starts it; -n NAMESPACE names a job on a cluster.",
        )
    return agents


def _is_alive(agent: Mapping[str, Any]) -> bool:
    """Whether it runs on this machine: the folder of a job on a cluster lists other ones."""
    return str(agent["address"]).startswith("127.0.0.1:") and Path(f"/proc/{agent['pid']}").exists()


def _over_loopback(address: str) -> Callable[[str, str], tuple[int, Found]]:
    def ask(method: str, target: str) -> tuple[int, Found]:
        connection = http.client.HTTPConnection(address, timeout=_PATIENCE_S)
        try:
            connection.request(method, target)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Gone(str(error)) from None
        finally:
            connection.close()

    return ask


def on_cluster(cluster: Cluster, namespace: str, name: str) -> list[Agent]:
    """The agents of a job on a cluster. Raises UserError when there is no such job, or host 0 does not run."""
    jobset = stop.own(cluster, name, namespace)
    pods = cluster.list(PODS, namespace, labels=f"{NAME_LABEL}={name}")
    running = [host for host in hosts.newest(jobset, pods) if host.running and not host.is_init]
    if not running or running[0].number != 0:
        raise UserError(f"Job {name} does not run: host 0 has no process.", f"`launcher explain {name}` says why.")
    ports = hosts.main_container(template(jobset)["spec"])["ports"]
    port = next(int(one["containerPort"]) for one in ports if one["name"] == METRICS_PORT)
    return [Agent(host.name, _through(cluster, namespace, host.pod, port)) for host in running]


def _through(cluster: Cluster, namespace: str, pod: str, port: int) -> Callable[[str, str], tuple[int, Found]]:
    def ask(method: str, target: str) -> tuple[int, Found]:
        request = f"{method} {target} HTTP/1.1\r\nHost: {pod}\r\nContent-Length: 0\r\n\r\n".encode()
        for left in reversed(range(_TRIES if method == "GET" else 1)):
            try:
                head, _, body = cluster.through(namespace, pod, port, request).partition(b"\r\n\r\n")
                return int(head.split()[1]), json.loads(body)
            except (Unreachable, ValueError, LookupError) as error:
                fault = str(error)
            except ApiError as error:
                if error.status != 404:
                    raise
                raise Gone(error.message) from None
            time.sleep(_POLL_S if left else 0)
        raise Gone(fault)

    return ask


def profile(agents: Sequence[Agent], steps: int, say: Say) -> dict[int, Found]:
    """What each rank answered at last: its `state` is done, failed or gone. Raises UserError when none was asked."""
    if len(agents) > HOSTS:
        say(f"only {agents[0].name} of {len(agents)} hosts is profiled")
        agents = agents[:1]
    asked = {agent: answer for agent in agents if (answer := _ask(agent, steps, agent is agents[0], say))}
    standing = {agent: _ranks(answer) for agent, answer in asked.items()}
    told: set[int] = set()
    while waiting := [agent for agent, ranks in standing.items() if not _has_ended(ranks)]:
        time.sleep(_POLL_S)
        for agent in waiting:
            standing[agent] = _look(agent, asked[agent]["id"], standing[agent])
            for rank, one in standing[agent].items():
                if one["state"] == "tracing" and rank not in told:
                    told.add(rank)
                    say(f"rank {rank} traces {one['steps']} steps from step {one['step']}")
    return dict(sorted((rank, one) for ranks in standing.values() for rank, one in ranks.items()))


def _ask(agent: Agent, steps: int, is_first: bool, say: Say) -> Found | None:
    """What the agent answers at first. The first agent's refusal is everyone's; a later one is said, and gives none."""
    try:
        status, answer = agent.ask("POST", f"/profile?steps={steps}")
    except Gone as gone:
        status, answer = 0, {"error": f"it does not answer: {gone}"}
    if status == 202:
        return answer
    refusal = f"{agent.name} takes no profile: {answer.get('error', answer)}."
    if is_first:
        raise UserError(refusal)
    say(refusal)
    return None


def _look(agent: Agent, number: int, before: Mapping[int, Found]) -> dict[int, Found]:
    """How profile `number` stands now; with the agent, or its answers, what was not found yet is gone."""
    try:
        answer = agent.ask("GET", "/profile")[1]
        if answer.get("id") != number:
            raise Gone("it was asked for another profile since, or has started anew")
        return _ranks(answer)
    except Gone:
        return {rank: one if one["state"] in ENDED else {"state": "gone"} for rank, one in before.items()}


def _ranks(answer: Found) -> dict[int, Found]:
    return {int(rank): one for rank, one in answer["ranks"].items()}


def _has_ended(ranks: Mapping[int, Found]) -> bool:
    return all(one["state"] in ENDED for one in ranks.values())
