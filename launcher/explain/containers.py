"""Pods that have a node and an image, and whose program does not start. Pure."""

from __future__ import annotations

import re

from launcher import hosts
from launcher.causes.answer import Answer, quoted, shown, which
from launcher.hosts import Host
from launcher.objects import age, seconds_since, template
from launcher.seen import World

_CONFIG = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "PreCreateHookError")
_START = ("StartError", "ContainerCannotRun")
_SANDBOX = ("FailedCreatePodSandBox", "FailedPodSandBoxStatus", "NetworkNotReady")
_MOUNT = ("FailedMount", "FailedAttachVolume", "FailedMapVolume")
_SLOW_S = 20.0  # until a container that is being created is worth a word

_MISSING = re.compile(r'(?P<kind>secret|configmap) "(?P<name>[^"]+)" not found', re.I)
_KEY = re.compile(r"couldn't find key (?P<key>\S+) in (?P<kind>Secret|ConfigMap) \S+?/(?P<name>\S+)")
_REFERENCED = re.compile(r"references non-existent (?P<kind>secret|config) key: (?P<key>\S+)")
_ROOT = re.compile(r"image will run as root|non-numeric user|runAsNonRoot")
_AGENTLESS = re.compile(r"No module named '?launcher\b")
_COMMAND = re.compile(r'exec: "(?P<command>[^"]+)": (?P<what>[^:\n]+)')


def not_started(world: World) -> Answer | None:
    """Containers that the kubelet cannot make or start."""
    here = [host for host in world.hosts if not host.is_leaving]
    for question in (_refused, _unstartable, _agentless, _init_failed, _mounting, _sandbox, _slow):
        if (answer := question(world, here)) is not None:
            return answer
    return None


def never_ran(world: World) -> Answer | None:
    """Of pods that ended: their program was never started."""
    return next(filter(None, (ask(world, world.hosts) for ask in (_unstartable, _agentless, _init_failed))), None)


def _refused(world: World, here: list[Host]) -> Answer | None:
    """A secret, a ConfigMap or a user that is wrong: the kubelet goes on trying."""
    waiting = [host for host in here if host.waiting.get("reason") in _CONFIG]
    if not waiting:
        return None
    host = waiting[0]
    message = host.waiting.get("message", "")
    evidence = (f"Pod {host.pod}: {host.waiting['reason']}: {shown(message)}",)
    who = which(waiting, world.wanted)
    return _reference(message, who, evidence) or _other(host, message, who, evidence)


def _reference(message: str, who: str, evidence: tuple[str, ...]) -> Answer | None:
    """A Secret or a ConfigMap, or a key of it, that is not there."""
    if (match := _KEY.search(message)) is not None:
        kind, name, key = match["kind"], match["name"], match["key"]
        what, move = f"{kind} {name} has no key {key}", f"add the key to {name}, or name another in job.yaml."
    elif (match := _MISSING.search(message)) is not None:
        kind = {"secret": "Secret", "configmap": "ConfigMap"}[match["kind"].lower()]
        name = match["name"]
        what, move = (
            f"{kind} {name} does not exist",
            f"make it in the job's namespace: kubectl create {kind.lower()} {name}",
        )
    elif (match := _REFERENCED.search(message)) is not None:
        kind = {"secret": "Secret", "config": "ConfigMap"}[match["kind"]]
        what, move = f"its {kind} has no key {match['key']}", "add the key, or name another in job.yaml."
    else:
        return None
    return Answer(f"{kind.lower()}-missing", f"waits: {who} cannot start: {what}", evidence, move)


def _other(host: Host, message: str, who: str, evidence: tuple[str, ...]) -> Answer:
    if _ROOT.search(message):
        headline = f"waits: {who} cannot start: image {host.image} wants to run as root, which the pod forbids"
        return Answer("runs-as-root", headline, evidence, "build it with a numeric USER, or set the profile's user.")
    if (match := _COMMAND.search(message)) is not None:
        return _bad_command(match["command"], match["what"], who, evidence)
    headline = f"waits: {who} cannot start: {shown(message) or host.waiting['reason']}"
    return Answer(
        "container", headline, evidence, "what the kubelet says is at fault in the pod: see `launcher render`."
    )


def _bad_command(command: str, what: str, who: str, evidence: tuple[str, ...]) -> Answer:
    headline = f"cannot start on {who}: command {command}: {what.strip()}"
    move = "check that the image has it; an image without ours needs agent: inject, and any needs python."
    return Answer("command", headline, evidence, move)


def _unstartable(world: World, here: list[Host]) -> Answer | None:
    """The runtime could not start the command; with restartPolicy Never that ends the pod."""
    ended = [host for host in here if host.ended.get("reason") in _START]
    if not ended:
        return None
    host = ended[0]
    message = host.ended.get("message", "")
    evidence = (f"Pod {host.pod}: {host.ended['reason']} (exit {host.ended.get('exitCode')}): {shown(message)}",)
    match = _COMMAND.search(message)
    command = match["command"] if match else " ".join(hosts.main_container(_spec(world)).get("command", ())[:1])
    return _bad_command(command, match["what"] if match else shown(message), which(ended, world.wanted), evidence)


def _agentless(world: World, here: list[Host]) -> Answer | None:
    """The image was to bring the agent, and has none."""
    ended = [host for host in here if _AGENTLESS.search(host.ended.get("message", ""))]
    if not ended:
        return None
    host = ended[0]
    headline = f"cannot start on {which(ended, world.wanted)}: image {host.image or _image(world)} holds no jaxlaunch"
    evidence = (f"Pod {host.pod}: {shown(host.ended['message'])}",)
    return Answer("agent", headline, evidence, "agent: inject brings the agent; train: needs an image built with ours.")


def _init_failed(world: World, here: list[Host]) -> Answer | None:
    failed = [host for host in here if host.is_init and host.ended.get("exitCode")]
    if not failed:
        return None
    host = failed[0]
    code, said = host.ended["exitCode"], host.ended.get("message", "")
    why = "for want of memory (OOMKilled)" if host.ended.get("reason") == "OOMKilled" else f"with exit code {code}"
    headline = f"cannot start on {which(failed, world.wanted)}: init container {host.container} ended {why}"
    evidence = (f"Pod {host.pod}: {shown(said)}",) if said else ()
    move = f"kubectl logs {host.pod} -c {host.container}"
    return Answer("init", headline, evidence, move)


def _mounting(world: World, here: list[Host]) -> Answer | None:
    """Volumes that the kubelet cannot mount: it goes on trying, and only events say why."""
    waiting = [host for host in here if _is_being_made(host)]
    event = world.said(*_MOUNT, kind="Pod")
    if not waiting or event is None:
        return None
    who, message = which(waiting, world.wanted), event["message"]
    answer = _reference(message, who, quoted(event))
    if answer is not None:
        return answer
    headline = f"waits: {who} cannot mount a volume: {shown(message)}"
    return Answer("mount", headline, quoted(event), "check volumes: in job.yaml, and what the message names.")


def _is_being_made(host: Host) -> bool:
    return host.node is not None and not host.has_started and not host.has_ended and not host.running


def _sandbox(world: World, here: list[Host]) -> Answer | None:
    waiting = [host for host in here if _is_being_made(host)]
    event = world.said(*_SANDBOX, kind="Pod")
    if not waiting or event is None:
        return None
    headline = f"waits: the node cannot make the pod of {which(waiting, world.wanted)}: {shown(event['message'])}"
    return Answer("sandbox", headline, quoted(event), "the node's runtime or network is at fault: tell who runs it.")


def _slow(world: World, here: list[Host]) -> Answer | None:
    """Nothing is wrong yet; images and volumes take their time."""
    waiting = [host for host in here if _is_being_made(host)]
    if not waiting:
        return None
    who, host = which(waiting, world.wanted), waiting[0]
    spent = seconds_since(min(one.created for one in waiting), world.now) or 0.0
    pulling = world.said("Pulling", kind="Pod")
    image = host.image or _image(world)
    what = "volumes and containers are being made" if pulling is None else f"image {image} is being pulled"
    late = f" for {age(spent)}" if spent >= _SLOW_S else ""
    headline = f"is starting: {who}: {what}{late}"
    return Answer("starting", headline, quoted(pulling), "wait; a large image takes minutes on a new node.")


def _image(world: World) -> str:
    return str(hosts.main_container(_spec(world)).get("image", ""))


def _spec(world: World) -> dict[str, object]:
    found: dict[str, object] = dict(template(world.jobset or {}).get("spec", {}))
    return found
