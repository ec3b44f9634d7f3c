"""`launcher profile`: a trace of the next steps of a run, and where they spend their time.

The command asks the agents of the run for a profile, and then polls them until every process has
finished or failed to trace. An agent accepts such requests only from its own host, which is over
loopback here and by port-forward in a pod.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from jaxlaunch.contract import PROFILE_END_STATES, PROFILE_STEPS
from jaxlaunch.launcher.cli import options, output
from jaxlaunch.launcher.errors import ApiError, ClusterError, UnreachableError, UserError
from jaxlaunch.launcher.jobs import dependents
from jaxlaunch.launcher.jobs.status import hosts
from jaxlaunch.launcher.kubernetes import streams
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.kinds import PODS
from jaxlaunch.launcher.kubernetes.labels import NAME_LABEL
from jaxlaunch.launcher.local import run_folders
from jaxlaunch.launcher.local.status import list_agents

# The largest number of hosts that are profiled. With more hosts, only host 0 is.
MAX_HOSTS = 8
_POLL_S = 1.0
# Tries of a GET request to a cluster.
_MAX_TRIES = 3
# Timeout of a request to an agent of this machine.
_TIMEOUT_S = 10.0

# The JSON answer of an agent.
Answer = Mapping[str, Any]


class AgentUnreachableError(Exception):
    """An agent does not answer, because its run has ended or is restarting."""


class Agent(NamedTuple):
    """The agent of a host, and a function that sends it a request."""

    # A name such as "host 0".
    name: str
    # Maps method and target to HTTP status and answer. Raises AgentUnreachableError.
    send_request: Callable[[str, str], tuple[int, Answer]]


@click.command("profile")
@options.run_argument
@options.cluster_options()
@click.option(
    "--steps",
    type=click.IntRange(1, PROFILE_STEPS),
    default=5,
    show_default=True,
    help="How many steps to trace.",
)
@options.output_option("text", "json")
def profile_command(
    run: str, namespace: str | None, context: str | None, steps: int, output_format: str
) -> None:
    """Profile the next steps of RUN.

    The command shows where these steps spend their time. RUN is a run folder on this machine, the
    name of one in runs/, or a job on a cluster: with -n or --context, or if there is no such
    folder. The job is not interrupted; the trace is written to its run folder.
    """
    answers = profile_agents(_find_agents(run, namespace, context), steps, output.show_messages)
    if output_format == "json":
        output.show_data(
            {"ranks": {str(rank): answer for rank, answer in answers.items()}}, output_format
        )
    else:
        output.show_lines(*_describe_profile(answers))
    if not any(answer["state"] == "done" for answer in answers.values()):
        raise UserError("\n".join(["No rank was profiled.", *_describe_failures(answers)]))


def _find_agents(run: str, namespace: str | None, context: str | None) -> list[Agent]:
    is_remote = namespace is not None or context is not None
    if not is_remote and (folder := run_folders.find_run(run)) is not None:
        return local_agents(folder)
    try:
        cluster = Cluster.connect(context, output.show_messages)
    except ClusterError as error:
        if is_remote:
            raise
        message = f"There is no run folder {run} or runs/{run} here. {error.message}"
        raise UserError(message, error.hint) from None
    return cluster_agents(cluster, namespace or cluster.namespace, run)


def _describe_profile(answers: Mapping[int, Answer]) -> Iterator[str]:
    """Yield the table of the first rank, and the folder of every trace."""
    done = {rank: answer for rank, answer in answers.items() if answer["state"] == "done"}
    for rank, answer in list(done.items())[:1]:
        summary = answer["summary"]
        last_step = summary["first_step"] + summary["steps"] - 1
        devices = f"{summary['devices']} devices of rank {rank} ({summary['device']})"
        yield f"steps {summary['first_step']}-{last_step} on {devices}"
        yield from answer["table"]
    for rank, answer in done.items():
        step_ms = answer["summary"]["step_s"] * 1e3
        yield f"rank {rank}: {step_ms:.3f} ms a step, in {answer['folder']}"
    if done:
        yield from _describe_failures(answers)


def _describe_failures(answers: Mapping[int, Answer]) -> Iterator[str]:
    for rank, answer in answers.items():
        if answer["state"] == "failed":
            yield f"rank {rank}: {answer['fault']}"
        elif answer["state"] == "gone":
            yield f"rank {rank}: its process ended first"


# --- requests to the agents -----------------------------------------------------------------------


def local_agents(folder: Path) -> list[Agent]:
    """Return the agents of a run on this machine. Raises UserError if they are not running here."""
    try:
        agents = [
            Agent(f"host {agent.host}", _loopback_sender(agent.address))
            for agent in list_agents(folder)
        ]
    except FileNotFoundError:
        agents = []
    if not agents:
        hint = "start it with `launcher run`, or add -n NAMESPACE for a job on a cluster."
        raise UserError(f"{folder} is not running, or its processes have not started yet.", hint)
    return agents


def _loopback_sender(address: str) -> Callable[[str, str], tuple[int, Answer]]:
    def send_request(method: str, target: str) -> tuple[int, Answer]:
        connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_S)
        try:
            connection.request(method, target)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise AgentUnreachableError(str(error)) from None
        finally:
            connection.close()

    return send_request


def cluster_agents(cluster: Cluster, namespace: str, name: str) -> list[Agent]:
    """Return the agents of a job on a cluster. Raises UserError if none runs."""
    jobset = hosts.select_lead(dependents.get_managed_jobset(cluster, name, namespace))
    pods = cluster.list(PODS, namespace, labels=f"{NAME_LABEL}={name}")
    newest = hosts.newest_hosts(jobset, pods)
    running = [host for host in newest if host.running and not host.is_init]
    if not running or running[0].number != 0:
        hint = f"see `launcher explain -n {namespace} {name}`."
        raise UserError(f"Job {name} is not running: host 0 has no process.", hint)
    port = hosts.metrics_port(jobset)
    assert port is not None, "every JobSet of the launcher has a metrics port"
    return [
        Agent(host.name, _forwarding_sender(cluster, namespace, host.pod, port)) for host in running
    ]


def _forwarding_sender(
    cluster: Cluster, namespace: str, pod: str, port: int
) -> Callable[[str, str], tuple[int, Answer]]:
    def send_request(method: str, target: str) -> tuple[int, Answer]:
        head = f"{method} {target} HTTP/1.1\r\nHost: {pod}\r\nContent-Length: 0\r\n\r\n"
        for tries_left in reversed(range(_MAX_TRIES if method == "GET" else 1)):
            try:
                response = streams.exchange_bytes(cluster, namespace, pod, port, head.encode())
                status_line, _, body = response.partition(b"\r\n\r\n")
                return int(status_line.split()[1]), json.loads(body)
            except (UnreachableError, ValueError, LookupError) as error:
                fault = str(error)
            except ApiError as error:
                if error.status != 404:
                    raise
                raise AgentUnreachableError(error.message) from None
            time.sleep(_POLL_S if tries_left else 0)
        raise AgentUnreachableError(fault)

    return send_request


def profile_agents(
    agents: Sequence[Agent], steps: int, say: Callable[[str], None]
) -> dict[int, Answer]:
    """Profile the next steps, and return the last answer of each rank: done, failed or gone."""
    if len(agents) > MAX_HOSTS:
        say(f"only {agents[0].name} of {len(agents)} hosts is profiled")
        agents = agents[:1]
    profile_ids: dict[Agent, int] = {}
    states: dict[Agent, dict[int, Answer]] = {}
    for agent in agents:
        if answer := _start_profile(agent, steps, agent is agents[0], say):
            profile_ids[agent], states[agent] = answer["id"], _answers_by_rank(answer)
    reported: set[int] = set()
    while waiting := [
        agent for agent in states if not all(map(_has_ended, states[agent].values()))
    ]:
        time.sleep(_POLL_S)
        for agent in waiting:
            states[agent] = _poll_profile(agent, profile_ids[agent], states[agent])
            for rank, answer in states[agent].items():
                if answer["state"] == "tracing" and rank not in reported:
                    reported.add(rank)
                    say(f"rank {rank} traces {answer['steps']} steps from step {answer['step']}")
    return dict(sorted(item for ranks in states.values() for item in ranks.items()))


def _start_profile(
    agent: Agent, steps: int, is_first: bool, say: Callable[[str], None]
) -> Answer | None:
    """Ask an agent for a profile. Prints its refusal, or raises UserError if it is the first."""
    try:
        status, answer = agent.send_request("POST", f"/profile?steps={steps}")
    except AgentUnreachableError as error:
        status, answer = 0, {"error": f"it does not answer: {error}"}
    if status == 202:
        return answer
    refusal = f"{agent.name} refused the profile: {answer.get('error', answer)}."
    if is_first:
        raise UserError(refusal)
    say(refusal)
    return None


def _poll_profile(
    agent: Agent, profile_id: int, previous_answers: Mapping[int, Answer]
) -> dict[int, Answer]:
    """Return the state of each rank, `gone` if the agent or its profile no longer exists."""
    try:
        answer = agent.send_request("GET", "/profile")[1]
        if answer.get("id") != profile_id:
            raise AgentUnreachableError(
                "another profile was requested since, or the agent restarted"
            )
        return _answers_by_rank(answer)
    except AgentUnreachableError:
        return {
            rank: answer if _has_ended(answer) else {"state": "gone"}
            for rank, answer in previous_answers.items()
        }


def _answers_by_rank(answer: Answer) -> dict[int, Answer]:
    return {int(rank): rank_answer for rank, rank_answer in answer["ranks"].items()}


def _has_ended(answer: Answer) -> bool:
    return answer["state"] in PROFILE_END_STATES
