"""Whether it was memory: the kernel took the whole container, or one process in it. Pure."""

from __future__ import annotations

from launcher import hosts
from launcher.causes.answer import which
from launcher.hosts import Host
from launcher.objects import template
from launcher.seen import World
from trainer import contract


def killed_for_memory(world: World) -> list[Host]:
    """Hosts whose container says OOMKilled. On cgroup v1 the agent may outlive its child and still leave that word."""
    return [host for host in world.hosts if host.ended.get("reason") == "OOMKilled" or host.oom_before]


def is_oom(world: World) -> bool:
    """Whether these pods ended for want of memory.

    A container keeps that word for a process that was killed long before its end: the verdict knows better.
    """
    said = world.told.verdict.verdict if world.told.verdict is not None else None
    if said is not None and said.code not in (contract.KILLED, contract.LOST):
        return False
    return bool(killed_for_memory(world)) or (said is not None and "OOMKilled" in said.message)


def oom_sentence(world: World) -> str:
    """Who was killed, and at what limit."""
    killed, limit = killed_for_memory(world), _limit(world)
    at = f"; its memory limit is {limit}" if limit else "; it has no memory limit: the node itself ran out"
    said = world.told.verdict.verdict if world.told.verdict is not None else None
    if said is None or said.code != contract.KILLED or said.rank is None:
        return f"{which(killed, world.wanted)} was OOMKilled{at}"
    step = f" at step {said.step}" if said.step is not None else ""
    return f"rank {said.rank} was OOMKilled{step}{at}"


def killed_sentence(world: World, host: Host) -> str:
    """Of a host that ended with 137 and no word of who killed it: runtimes lose the kernel's word now and then."""
    limit = _limit(world)
    at = f"its memory limit is {limit}" if limit else "it has no memory limit"
    return f"{host.name} was killed by SIGKILL (exit 137), as the kernel does for want of memory; {at}"


def _limit(world: World) -> str | None:
    main = hosts.main_container(template(world.jobset or {}).get("spec", {}))
    found = ((main.get("resources") or {}).get("limits") or {}).get("memory")
    return None if found is None else str(found)
