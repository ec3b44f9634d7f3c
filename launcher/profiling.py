"""Asks the agents of a run for a profile of its next steps, and waits for what their processes find."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from launcher.agent.memory import AGENTS
from launcher.agent.profiles import ENDED
from launcher.errors import UserError

HOSTS = 8  # that are asked; of a larger gang host 0 alone
_POLL_S = 0.5
_PATIENCE_S = 10.0  # of an agent that is asked

Say = Callable[[str], None]
Found = Mapping[str, Any]


class Gone(Exception):
    """The agent does not answer any more: its run ended, or starts anew."""


class Agent(NamedTuple):
    """An agent, and a way to it."""

    name: str  # host 0
    ask: Callable[[str, str], tuple[int, Found]]  # method and target -> status and answer; raises Gone


def folder_of(run: str) -> Path | None:
    """The run folder that is meant: a path, or the name of one in runs/; None where there is none."""
    candidates = (Path(run), Path("runs") / run)
    return next((folder.absolute() for folder in candidates if (folder / ".lock").is_file()), None)


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


def profile(agents: Sequence[Agent], steps: int, say: Say) -> dict[int, Found]:
    """What each rank answered at last: its `state` is done, failed or gone. Raises UserError when none was asked."""
    if len(agents) > HOSTS:
        say(f"only {agents[0].name} of {len(agents)} hosts is profiled")
        agents = agents[:1]
    standing = {agent: answer for agent in agents if (answer := _ask(agent, steps, agent is agents[0], say))}
    told: set[int] = set()
    while waiting := [agent for agent, ranks in standing.items() if not _has_ended(ranks)]:
        time.sleep(_POLL_S)
        for agent in waiting:
            standing[agent] = _look(agent, standing[agent])
            for rank, one in standing[agent].items():
                if one["state"] == "tracing" and rank not in told:
                    told.add(rank)
                    say(f"rank {rank} traces {one['steps']} steps from step {one['step']}")
    return dict(sorted((rank, one) for ranks in standing.values() for rank, one in ranks.items()))


def _ask(agent: Agent, steps: int, is_first: bool, say: Say) -> dict[int, Found]:
    """How the profile stands at first. The first agent's refusal is everyone's; a later one is said, and gives none."""
    try:
        status, answer = agent.ask("POST", f"/profile?steps={steps}")
    except Gone as gone:
        status, answer = 0, {"error": f"it does not answer: {gone}"}
    if status == 202:
        return _ranks(answer)
    refusal = f"{agent.name} takes no profile: {answer.get('error', answer)}."
    if is_first:
        raise UserError(refusal)
    say(refusal)
    return {}


def _look(agent: Agent, before: Mapping[int, Found]) -> dict[int, Found]:
    """How it stands now; with the agent, what its processes had not found yet is gone."""
    try:
        return _ranks(agent.ask("GET", "/profile")[1])
    except Gone:
        return {rank: one if one["state"] in ENDED else {"state": "gone"} for rank, one in before.items()}


def _ranks(answer: Found) -> dict[int, Found]:
    return {int(rank): one for rank, one in answer["ranks"].items()}


def _has_ended(ranks: Mapping[int, Found]) -> bool:
    return all(one["state"] in ENDED for one in ranks.values())
