"""Pods that have a node, and whose containers do not start. Pure."""

from __future__ import annotations

import re

from jaxlaunch.launcher.diagnose.explain import unread
from jaxlaunch.launcher.diagnose.explain.answer import Answer, one_line, quoted, which
from jaxlaunch.launcher.jobs.status import hosts
from jaxlaunch.launcher.jobs.status.hosts import Host
from jaxlaunch.launcher.jobs.status.snapshot import Snapshot
from jaxlaunch.launcher.kubernetes.objects import Obj, age, seconds_since, template
from jaxlaunch.launcher.kubernetes.quantity import amount

_CONFIG = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "PreCreateHookError")
_START = ("StartError", "ContainerCannotRun")
_SANDBOX = ("FailedCreatePodSandBox", "FailedPodSandBoxStatus", "NetworkNotReady")
_MOUNT = ("FailedMount", "FailedAttachVolume", "FailedMapVolume")
_SLOW_KUBELET = re.compile(r"failed to sync (configmap|secret) cache")  # it tries again, and then has them
_SLOW_S = 20.0  # of creating a container, after which the headline says how long it takes

_MISSING = re.compile(r'(?P<kind>secret|configmap) "(?P<name>[^"]+)" not found', re.I)
_BUNDLE = re.compile(r"jaxlaunch-[0-9a-f]{12}")  # launcher/manifests/code names it
_KEY = re.compile(r"couldn't find key (?P<key>\S+) in (?P<kind>Secret|ConfigMap) \S+?/(?P<name>\S+)")
_REFERENCED = re.compile(r"references non-existent (?P<kind>secret|config) key: (?P<key>\S+)")
_OF_VOLUME = re.compile(r'for volume "(?P<name>[^"]+)"')
_ROOT = re.compile(r"image will run as root|non-numeric user|runAsNonRoot")
_AGENTLESS = re.compile(r"No module named '?jaxlaunch\b")
_OF_COMMAND = re.compile(r"\bexec\b|no such file|permission denied|executable file|chdir|command", re.I)
_LEAST_MEMORY = amount("16Mi")  # runc with what it starts needs 6 to 12 MiB of the container's own limit
_COMMAND = re.compile(r'exec: "(?P<command>[^"]+)": (?P<what>[^:\n]+)')


def not_started(snapshot: Snapshot) -> Answer | None:
    """Containers that the kubelet cannot create or start."""
    here = [host for host in snapshot.hosts if not host.is_leaving]
    for cause in (_config_error, _unstartable, _agentless, _init_failed, _mounting, _sandbox, _init_runs, _slow):
        if (answer := cause(snapshot, here)) is not None:
            return answer
    return None


def never_ran(snapshot: Snapshot) -> Answer | None:
    """Pods that ended before their program was started."""
    return next(
        filter(None, (cause(snapshot, snapshot.hosts) for cause in (_unstartable, _agentless, _init_failed))), None
    )


def _config_error(snapshot: Snapshot, here: list[Host]) -> Answer | None:
    """A Secret, a ConfigMap or a user that is wrong; the kubelet keeps trying."""
    waiting = [host for host in here if host.waiting.get("reason") in _CONFIG]
    if not waiting:
        return None
    host = waiting[0]
    message = host.waiting.get("message", "")
    evidence = (f"Pod {host.pod}: {host.waiting['reason']}: {one_line(message)}",)
    who = which(waiting, snapshot.expected_hosts)
    return _reference(snapshot, message, who, evidence) or _other(host, message, who, evidence)


def _reference(snapshot: Snapshot, message: str, who: str, evidence: tuple[str, ...]) -> Answer | None:
    """A Secret or a ConfigMap, or a key of it, that does not exist."""
    if (match := _KEY.search(message)) is not None:
        kind, name, key = match["kind"], match["name"], match["key"]
        what, move = f"{kind} {name} has no key {key}", f"add the key to {name}, or use another in job.yaml."
    elif (match := _MISSING.search(message)) is not None:
        kind = {"secret": "Secret", "configmap": "ConfigMap"}[match["kind"].lower()]
        name = match["name"]
        create = "secret generic" if kind == "Secret" else "configmap"
        what, move = (
            f"{kind} {name} does not exist",
            f"create it in the job's namespace: kubectl create {create} {name} --from-literal=KEY=VALUE",
        )
        if kind == "ConfigMap" and _BUNDLE.fullmatch(name):  # named after its contents: no other will do
            move = "`launcher submit` of the same job creates it: it holds the code and the agent that the job brings."
        if (
            name == f"{snapshot.jobset['metadata']['name']}-gang"
        ):  # the hosts that run have the certificates that it had
            move = "`launcher submit --replace` makes one for all hosts: they trust no other than that they began with."
    elif (match := _REFERENCED.search(message)) is not None:
        kind = {"secret": "Secret", "config": "ConfigMap"}[match["kind"]]
        name = _mounted(snapshot, message, kind)
        what = f"{f'its {kind}' if name is None else f'{kind} {name}'} has no key {match['key']}"
        move = f"add the key{'' if name is None else f' to {name}'}, or use another in job.yaml."
    else:
        return None
    return Answer(f"{kind.lower()}-missing", f"waits: {who} cannot start: {what}", evidence, move)


def _mounted(snapshot: Snapshot, message: str, kind: str) -> str | None:
    """The Secret or ConfigMap of the volume that a message names; None where it has several."""
    volume = _OF_VOLUME.search(message)
    volumes = template(snapshot.jobset).get("spec", {}).get("volumes") or ()
    found: Obj = next((one for one in volumes if volume is not None and one.get("name") == volume["name"]), {})
    key, name = ("secret", "secretName") if kind == "Secret" else ("configMap", "name")
    named: str | None = (found.get(key) or {}).get(name)
    return named


def _other(host: Host, message: str, who: str, evidence: tuple[str, ...]) -> Answer:
    if _ROOT.search(message):
        headline = f"waits: {who} cannot start: image {host.image} runs as root, and the pod has runAsNonRoot"
        return Answer(
            "runs-as-root", headline, evidence, "set a numeric USER in the image, or user: in the cluster defaults."
        )
    if (match := _COMMAND.search(message)) is not None:
        return _bad_command(match["command"], match["what"], who, evidence)
    headline = f"waits: {who} cannot start: {one_line(message) or host.waiting['reason']}"
    return Answer(
        "container", headline, evidence, "fix what the kubelet's message names; `launcher render` shows the pod."
    )


def _bad_command(command: str, what: str, who: str, evidence: tuple[str, ...]) -> Answer:
    headline = f"cannot start on {who}: command {command}: {what.strip()}"
    move = (
        "check that the image has the command; one without jaxlaunch needs agent: inject, and every one needs python."
    )
    return Answer("command", headline, evidence, move)


def _unstartable(snapshot: Snapshot, here: list[Host]) -> Answer | None:
    """The container runtime could not start the command; with restartPolicy Never that ends the pod."""
    ended = [host for host in here if host.ended.get("reason") in _START]
    if not ended:
        return None
    host = ended[0]
    message = host.ended.get("message", "")
    evidence = (f"Pod {host.pod}: {host.ended['reason']} (exit {host.ended.get('exitCode')}): {one_line(message)}",)
    who, match = which(ended, snapshot.expected_hosts), _COMMAND.search(message)
    if match is None and not _OF_COMMAND.search(message):
        return _runtime_failed(host, one_line(message), who, evidence)
    command = match["command"] if match else " ".join(_main_container(snapshot).get("command", ())[:1])
    return _bad_command(command, match["what"] if match else one_line(message), who, evidence)


def _runtime_failed(host: Host, message: str, who: str, evidence: tuple[str, ...]) -> Answer:
    """The container runtime itself failed, before it came to the command: most often for lack of memory."""
    limit = host.memory_limit
    if limit is not None and amount(limit) < _LEAST_MEMORY:
        headline = (
            f"cannot start on {who}: its memory limit of {limit} is too low for the container runtime to start it"
        )
        return Answer("oom", headline, evidence)
    headline = f"cannot start on {who}: the container runtime failed: {message}"
    move = "ask the cluster administrator: the message is of the node's container runtime."
    return Answer("container", headline, evidence, move)


def _agentless(snapshot: Snapshot, here: list[Host]) -> Answer | None:
    """The image was to bring the agent, and has none."""
    ended = [host for host in here if _AGENTLESS.search(host.ended.get("message", ""))]
    if not ended:
        return None
    host = ended[0]
    who, image = which(ended, snapshot.expected_hosts), host.image or _image(snapshot)
    headline = f"cannot start on {who}: image {image} does not contain jaxlaunch"
    evidence = (f"Pod {host.pod}: {one_line(host.ended['message'])}",)
    return Answer("agent", headline, evidence)


def _init_failed(snapshot: Snapshot, here: list[Host]) -> Answer | None:
    """An init container that failed, or a sidecar that fails each time that the kubelet restarts it."""
    failed = [host for host in here if host.is_init and not host.running and host.last_end.get("exitCode")]
    if not failed:
        return None
    host, ended = failed[0], failed[0].last_end
    message, is_oom = ended.get("message", ""), ended.get("reason") == "OOMKilled"
    limit = f"; its memory limit is {host.memory_limit}" if host.memory_limit else ""
    end = f"was OOMKilled{limit}" if is_oom else f"ended with exit code {ended['exitCode']}"
    headline = f"cannot start on {which(failed, snapshot.expected_hosts)}: init container {host.container} {end}"
    evidence = (f"Pod {host.pod}: {one_line(message)}",) if message else ()
    move = f"kubectl logs {host.pod} -c {host.container}"
    return Answer("init", headline, evidence, move)


def _mounting(snapshot: Snapshot, here: list[Host]) -> Answer | None:
    """Volumes that the kubelet cannot mount; it keeps trying, and only events say why."""
    waiting = [host for host in here if _is_being_created(host)]
    event = snapshot.event(*_MOUNT, kind="Pod", of=waiting)
    if not waiting or event is None or _SLOW_KUBELET.search(event["message"]):
        return None
    who, message = which(waiting, snapshot.expected_hosts), event["message"]
    answer = _reference(snapshot, message, who, quoted(event))
    if answer is not None:
        return answer
    headline = f"waits: {who} cannot mount a volume: {one_line(message)}"
    return Answer("mount", headline, quoted(event))


def _is_being_created(host: Host) -> bool:
    return host.node is not None and not host.has_started and not host.has_ended and not host.running


def _sandbox(snapshot: Snapshot, here: list[Host]) -> Answer | None:
    waiting = [host for host in here if _is_being_created(host)]
    event = snapshot.event(*_SANDBOX, kind="Pod", of=waiting)
    if not waiting or event is None:
        return None
    who, message = which(waiting, snapshot.expected_hosts), one_line(event["message"])
    headline = f"waits: the node cannot create the pod sandbox of {who}: {message}"
    return Answer("sandbox", headline, quoted(event))


def _init_runs(snapshot: Snapshot, here: list[Host]) -> Answer | None:
    """An init container that runs: the program starts after it, or once it is ready, if it is a sidecar."""
    waiting = [host for host in here if host.is_init and host.running]
    if not waiting:
        return None
    host = waiting[0]
    same = [one for one in waiting if one.container == host.container]
    spent = age(seconds_since(host.running.get("startedAt"), snapshot.now) or 0.0)
    kind, does = ("sidecar", "has not been ready") if host.is_sidecar else ("init container", "has run")
    headline = f"is starting: {which(same, snapshot.expected_hosts)}: {kind} {host.container} {does} for {spent}"
    event = snapshot.event("Unhealthy", kind="Pod", of=waiting) if host.is_sidecar else None
    return Answer("init-runs", headline, quoted(event), f"wait; kubectl logs {host.pod} -c {host.container} shows it.")


def _slow(snapshot: Snapshot, here: list[Host]) -> Answer | None:
    """Nothing has failed; images and volumes take their time."""
    waiting = [host for host in here if _is_being_created(host)]
    if not waiting:
        return None
    who, host = which(waiting, snapshot.expected_hosts), waiting[0]
    spent = seconds_since(min(one.created for one in waiting), snapshot.now) or 0.0
    pulling = snapshot.event("Pulling", kind="Pod", of=waiting)
    image = host.image or _image(snapshot)
    what = "creating volumes and containers" if pulling is None else f"pulling image {image}"
    if spent >= _SLOW_S and not host.seen_by_kubelet:
        headline = f"is starting: {who}: the kubelet of node {host.node} has not begun with it in {age(spent)}"
        move = f"wait, or ask the cluster administrator whether the kubelet runs: kubectl describe node {host.node}"
        return Answer("starting", headline, quoted(snapshot.warning), move)
    late = f" for {age(spent)}{unread.because(snapshot, 'events')}" if spent >= _SLOW_S else ""
    headline = f"is starting: {who}: {what}{late}"
    return Answer("starting", headline, quoted(pulling))


def _image(snapshot: Snapshot) -> str:
    return str(_main_container(snapshot).get("image", ""))


def _main_container(snapshot: Snapshot) -> Obj:
    return hosts.main_container(template(snapshot.jobset).get("spec", {}))
