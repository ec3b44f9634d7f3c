"""Causes in the containers of pods: they do not start, fail or do not end. Pure functions.

A Job with an image that cannot be pulled never fails, and would wait forever. A pod finishes when
all its containers have ended, and fails if one of them has failed. Init containers with
restartPolicy Always (native sidecars) are exceptions: Kubernetes ends them with the program.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxlaunch import contract
from jaxlaunch.launcher.diagnose.explain.answer import (
    Answer,
    Evidence,
    describe_unread_kinds,
    first_answer,
    waiting_answer,
)
from jaxlaunch.launcher.diagnose.text import (
    JOB_NAME,
    RENDER,
    SUBMIT,
    SUBMIT_AGAIN,
    Command,
    HostGroup,
    NextStep,
    Text,
    advise_ask,
    advise_change,
    advise_resubmit,
    advise_run,
    advise_wait,
    describe_event,
    host_group,
    kubectl_command,
    launcher_command,
    quote_message,
)
from jaxlaunch.launcher.jobs.status import hosts
from jaxlaunch.launcher.jobs.status.hosts import Container, Host
from jaxlaunch.launcher.jobs.status.snapshot import Snapshot
from jaxlaunch.launcher.kubernetes.objects import pod_template, seconds_since
from jaxlaunch.launcher.kubernetes.resources import parse_quantity

# --- images ---------------------------------------------------------------------------------------

_PULL_FAILURES = (
    "ErrImagePull",
    "ImagePullBackOff",
    "ErrImageNeverPull",
    "InvalidImageName",
    "ImageInspectError",
    "RegistryUnavailable",
)
_REPEATED_REASON = re.compile(rf"Error: ({'|'.join(_PULL_FAILURES)})$")
_PULL_SECRETS = re.compile(r"image pull secrets \(([^)]+)\)")

# Patterns of messages of registries and container runtimes, their meaning, and the next step. The
# first match counts.
_PULL_ERRORS = (
    (
        r"unauthorized|authentication required|denied|forbidden|\b40[13]\b",
        "the registry requires credentials, or the image does not exist",
        advise_change("check the name, and image_pull_secrets: in job.yaml."),
    ),
    (
        r"no match for platform|exec format",
        "the image is not built for the node's CPU architecture",
        advise_change("build it for that architecture."),
    ),
    (
        r"not found|manifest unknown|does not exist|no such image|\b404\b",
        "the image does not exist",
        advise_change("check its name and tag, and that it was pushed."),
    ),
    (
        r"toomanyrequests|rate limit|\b429\b",
        "the registry's rate limit is reached",
        advise_wait("wait, or mirror the image."),
    ),
    (
        r"x509|certificate",
        "the node does not trust the registry's certificate",
        advise_ask("ask the cluster administrator to install the certificate on the nodes."),
    ),
    (
        r"no such host|dial tcp|i/o timeout|connection refused|deadline exceeded|EOF",
        "the node cannot reach the registry",
        advise_change("check the registry's name and the nodes' network."),
    ),
    (
        r"no space left",
        "the node's disk is full",
        advise_change("use a smaller image, or ask the cluster administrator to free disk space."),
    ),
)
_PULL_REASONS = {
    "InvalidImageName": (
        "that is not a valid image name",
        advise_change("write it as REGISTRY/NAME:TAG in job.yaml."),
    ),
    "ErrImageNeverPull": (
        "the node does not have it, and imagePullPolicy is Never",
        advise_change("load it onto the node, or set another policy."),
    ),
}


def explain_image_pull(snapshot: Snapshot) -> Answer | None:
    """Explain containers that wait for an image that cannot be pulled."""
    waiting_hosts = [
        host
        for host in snapshot.hosts
        if host.waiting.get("reason") in _PULL_FAILURES and not host.is_leaving
    ]
    if not waiting_hosts:
        return None
    host = waiting_hosts[0]
    state = {"message": "", **host.waiting}
    events = list(
        snapshot.find_events(
            "Failed", "ErrImageNeverPull", "InspectFailed", kind="Pod", on_hosts=waiting_hosts
        )
    )
    # The kubelet also reports the reason of the waiting container, without the registry's message.
    detailed_events = (item for item in events if not _REPEATED_REASON.match(item["message"]))
    event = next(detailed_events, next(iter(events), None))
    message = state["message"]
    if state["reason"] == "ImagePullBackOff" and event is not None:
        message = f"{event['message']} {message}"
    meaning, step = _missing_pull_secret(snapshot, waiting_hosts) or _pull_error(
        state["reason"], message
    )
    group = host_group(waiting_hosts, snapshot)
    template = "{hosts} cannot pull image {image}: {meaning}"
    headline = Text(template, hosts=group, image=host.image, meaning=meaning)
    evidence = (*_pod_evidence(host, state), *describe_event(event))
    return waiting_answer("image", headline, evidence, step)


def _missing_pull_secret(
    snapshot: Snapshot, waiting_hosts: Sequence[Host]
) -> tuple[Text, NextStep] | None:
    """Return the meaning and the next step if an image pull secret is missing."""
    event = snapshot.find_event(
        "FailedToRetrieveImagePullSecret", kind="Pod", on_hosts=waiting_hosts
    )
    match = None if event is None else _PULL_SECRETS.search(event["message"])
    if match is None:
        return None
    names = match[1].split(", ")
    words = ("create", "secret", "docker-registry", names[0], "--docker-server=REGISTRY")
    template = "create it in the job's namespace: {create} …"
    step = advise_change(template, create=kubectl_command(*words))
    template = "Secret{names:|s} {names: and } of image_pull_secrets {names:does|do} not exist"
    return Text(template, names=names), step


def _pull_error(reason: str, message: str) -> tuple[Text, NextStep]:
    """Return the meaning and the next step of an image that cannot be pulled."""
    if reason in _PULL_REASONS:
        meaning, step = _PULL_REASONS[reason]
        return Text(meaning), step
    for pattern, meaning, step in _PULL_ERRORS:
        if re.search(pattern, message, re.IGNORECASE):
            return Text(meaning), step
    return quote_message(message.strip() or reason), advise_change("see the registry's message.")


# --- containers that do not start -----------------------------------------------------------------

_CONFIG_REASONS = (
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
    "PreCreateHookError",
)
_START_REASONS = ("StartError", "ContainerCannotRun")
_SANDBOX_EVENTS = ("FailedCreatePodSandBox", "FailedPodSandBoxStatus", "NetworkNotReady")
_MOUNT_EVENTS = ("FailedMount", "FailedAttachVolume", "FailedMapVolume")
# A temporary error: the next attempt of the kubelet succeeds.
_SLOW_KUBELET = re.compile(r"failed to sync (configmap|secret) cache")
# If a container takes longer to be created, the headline has the duration.
_SLOW_START_S = 20.0

_MISSING_OBJECT = re.compile(r'(?P<kind>secret|configmap) "(?P<name>[^"]+)" not found', re.I)
# Name of the ConfigMap with the code of the job, from launcher/manifests/code.
_BUNDLE_NAME = re.compile(r"jaxlaunch-[0-9a-f]{12}")
_MISSING_KEY = re.compile(
    r"couldn't find key (?P<key>\S+) in (?P<kind>Secret|ConfigMap) \S+?/(?P<name>\S+)"
)
_MISSING_REFERENCE = re.compile(
    r"references non-existent (?P<kind>secret|config) key: (?P<key>\S+)"
)
_VOLUME_NAME = re.compile(r'for volume "(?P<name>[^"]+)"')
_RUNS_AS_ROOT = re.compile(r"image will run as root|non-numeric user|runAsNonRoot")
_MISSING_AGENT = re.compile(r"No module named '?jaxlaunch\b")
_COMMAND_ERROR = re.compile(
    r"\bexec\b|no such file|permission denied|executable file|chdir|command", re.I
)
# With a lower limit a container may not start: runc and its first process need 6 to 12 MiB of it.
_MIN_MEMORY = parse_quantity("16Mi")
_EXEC_ERROR = re.compile(r'exec: "(?P<command>[^"]+)": (?P<what>[^:\n]+)')


def explain_not_started(snapshot: Snapshot) -> Answer | None:
    """Explain containers that the kubelet cannot create or start."""
    causes = (
        _explain_config_error,
        _explain_start_error,
        _explain_missing_agent,
        _explain_init_failure,
        _explain_mount,
        _explain_sandbox,
        _explain_init_run,
        _explain_slow_start,
    )
    return first_answer(causes, snapshot, [host for host in snapshot.hosts if not host.is_leaving])


def explain_unstarted_program(snapshot: Snapshot) -> Answer | None:
    """Explain pods that ended before their program was started."""
    causes = (_explain_start_error, _explain_missing_agent, _explain_init_failure)
    return first_answer(causes, snapshot, snapshot.hosts)


def _pod_evidence(host: Host, state: Mapping[str, Any]) -> Evidence:
    """Return the line of evidence about a container's state."""
    template = "Pod {pod}: {reason}: {message}"
    if "exitCode" in state:
        template = "Pod {pod}: {reason} (exit {exitCode}): {message}"
    return (Text(template, pod=host.pod, **{"message": "", **state}),)


def _explain_config_error(snapshot: Snapshot, present_hosts: list[Host]) -> Answer | None:
    """Explain a missing Secret or ConfigMap, or a wrong user. The kubelet keeps retrying."""
    waiting_hosts = [
        host for host in present_hosts if host.waiting.get("reason") in _CONFIG_REASONS
    ]
    if not waiting_hosts:
        return None
    host, group = waiting_hosts[0], host_group(waiting_hosts, snapshot)
    message, evidence = host.waiting.get("message", ""), _pod_evidence(host, host.waiting)
    if (answer := _explain_reference(snapshot, message, group, evidence)) is not None:
        return answer
    if _RUNS_AS_ROOT.search(message):
        reason = Text("image {image} runs as root, and the pod has runAsNonRoot", image=host.image)
        step = advise_change("set a numeric USER in the image, or user: in the cluster defaults.")
        return waiting_answer("runs-as-root", _cannot_start(group, reason), evidence, step)
    if match := _EXEC_ERROR.search(message):
        return _command_answer(match["command"], match["what"], group, evidence)
    reason = quote_message(message if message.strip() else host.waiting["reason"])
    template = "fix what the kubelet's message names; `{render}` shows the pod."
    step = advise_change(template, render=RENDER)
    return waiting_answer("container", _cannot_start(group, reason), evidence, step)


def _cannot_start(group: HostGroup, reason: Text) -> Text:
    return Text("{hosts} cannot start: {reason}", hosts=group, reason=reason)


def _explain_reference(
    snapshot: Snapshot, message: str, group: HostGroup, evidence: Evidence
) -> Answer | None:
    """Explain a kubelet's message about a missing Secret or ConfigMap, or a missing key of one."""
    if match := _MISSING_KEY.search(message):
        kind, name = match["kind"], match["name"]
        reason = Text("{kind} {name} has no key {key}", **match.groupdict())
        step = advise_change("add the key to {name}, or use another in job.yaml.", name=name)
    elif match := _MISSING_OBJECT.search(message):
        kind, name = _KINDS[match["kind"].lower()], match["name"]
        reason = Text("{kind} {name} does not exist", kind=kind, name=name)
        step = _advise_creation(snapshot, kind, name)
    elif match := _MISSING_REFERENCE.search(message):
        kind = _KINDS[match["kind"]]
        volume_object = _mounted_object(snapshot, message, kind)
        subject, end = (
            ("its {kind}", "") if volume_object is None else ("{kind} {name}", " to {name}")
        )
        reason = Text(
            subject + " has no key {key}", kind=kind, name=volume_object, key=match["key"]
        )
        template = f"add the key{end}, or use another in job.yaml."
        step = advise_change(template, name=volume_object)
    else:
        return None
    return waiting_answer(f"{kind.lower()}-missing", _cannot_start(group, reason), evidence, step)


_KINDS = {"secret": "Secret", "configmap": "ConfigMap", "config": "ConfigMap"}


def _advise_creation(snapshot: Snapshot, kind: str, name: str) -> NextStep:
    """Return what to do about a missing Secret or ConfigMap."""
    if name == f"{snapshot.jobset['metadata']['name']}-gang":
        # A new Secret would not match the certificates of the hosts that already run.
        return advise_resubmit(
            "`{again}` creates one for all hosts, which accept only the one they started with",
            again=SUBMIT_AGAIN,
        )
    if kind == "ConfigMap" and _BUNDLE_NAME.fullmatch(name):
        # Its name is a digest of its contents, so the user cannot create another one.
        return advise_change(
            "`{submit}` creates it: it holds the code and the agent that the job brings.",
            submit=SUBMIT,
        )
    words = ("secret", "generic") if kind == "Secret" else ("configmap",)
    create = kubectl_command("create", *words, name, "--from-literal=KEY=VALUE")
    return advise_change("create it in the job's namespace: {create}", create=create)


def _mounted_object(snapshot: Snapshot, message: str, kind: str) -> str | None:
    """Return the name of the Secret or ConfigMap in the volume that a message names.

    A projected volume may have several, so the result for it is None.
    """
    match = _VOLUME_NAME.search(message)
    source, key = ("secret", "secretName") if kind == "Secret" else ("configMap", "name")
    for volume in pod_template(snapshot.jobset).get("spec", {}).get("volumes") or ():
        if match is not None and volume.get("name") == match["name"]:
            name: str | None = (volume.get(source) or {}).get(key)
            return name
    return None


def _command_answer(command: str, problem: str, group: HostGroup, evidence: Evidence) -> Answer:
    template = "cannot start on {hosts}: command {command}: {what}"
    step = advise_change(
        "check that the image has the command; one without jaxlaunch needs agent: inject, and "
        "every one needs python."
    )
    headline = Text(template, hosts=group, command=command, what=problem)
    return Answer("command", headline, evidence, step)


def _explain_start_error(snapshot: Snapshot, present_hosts: list[Host]) -> Answer | None:
    """Explain a command that could not be started. The pod has failed (restartPolicy Never)."""
    failed_hosts = [
        host for host in present_hosts if host.terminated.get("reason") in _START_REASONS
    ]
    if not failed_hosts:
        return None
    host, group = failed_hosts[0], host_group(failed_hosts, snapshot)
    message, evidence = host.terminated.get("message", ""), _pod_evidence(host, host.terminated)
    if match := _EXEC_ERROR.search(message):
        return _command_answer(match["command"], match["what"], group, evidence)
    if _COMMAND_ERROR.search(message):
        command = hosts.jobset_main_container(snapshot.jobset).get("command", ())[:1]
        return _command_answer(" ".join(command), message, group, evidence)
    # The container runtime failed before it started the command. The usual reason is a memory limit
    # that is too low.
    if host.memory_limit is not None and parse_quantity(host.memory_limit) < _MIN_MEMORY:
        template = (
            "cannot start on {hosts}: its memory limit of {limit} is too low for the "
            "container runtime to start it"
        )
        return Answer("oom", Text(template, hosts=group, limit=host.memory_limit), evidence)
    template = "cannot start on {hosts}: the container runtime failed: {message}"
    headline = Text(template, hosts=group, message=message)
    step = advise_ask(
        "ask the cluster administrator: the message comes from the node's container runtime."
    )
    return Answer("container", headline, evidence, step)


def _explain_missing_agent(snapshot: Snapshot, present_hosts: list[Host]) -> Answer | None:
    """Explain that the image does not contain the agent."""
    failed_hosts = [
        host for host in present_hosts if _MISSING_AGENT.search(host.terminated.get("message", ""))
    ]
    if not failed_hosts:
        return None
    host, group = failed_hosts[0], host_group(failed_hosts, snapshot)
    template = "cannot start on {hosts}: image {image} does not contain jaxlaunch"
    headline = Text(template, hosts=group, image=host.image or _main_image(snapshot))
    evidence = Text("Pod {pod}: {message}", pod=host.pod, message=host.terminated["message"])
    return Answer("agent", headline, (evidence,))


def _explain_init_failure(snapshot: Snapshot, present_hosts: list[Host]) -> Answer | None:
    """Explain a failed init container, or a sidecar that fails at every start."""
    failed_hosts = [
        host
        for host in present_hosts
        if host.is_init and not host.running and host.last_end.get("exitCode")
    ]
    if not failed_hosts:
        return None
    host = failed_hosts[0]
    headline = Text(
        "cannot start on {hosts}: init container {container} {end}",
        hosts=host_group(failed_hosts, snapshot),
        container=host.container,
        end=describe_end(host.last_end, host.memory_limit, no_limit_note=""),
    )
    evidence: Evidence = ()
    if message := host.last_end.get("message", ""):
        evidence = (Text("Pod {pod}: {message}", pod=host.pod, message=message),)
    return Answer("init", headline, evidence, advise_run(command=_logs_command(host)))


def _logs_command(host: Host, container: str | None = None, *options: str) -> Command:
    """Return the command that shows the log of a container, by default `host.container`."""
    return kubectl_command("logs", host.pod, "-c", container or host.container, *options)


def _explain_mount(snapshot: Snapshot, present_hosts: list[Host]) -> Answer | None:
    """Explain volumes that the kubelet cannot mount. The reason is only in an event."""
    waiting_hosts = [host for host in present_hosts if _is_being_created(host)]
    event = snapshot.find_event(*_MOUNT_EVENTS, kind="Pod", on_hosts=waiting_hosts)
    if not waiting_hosts or event is None or _SLOW_KUBELET.search(event["message"]):
        return None
    group, message = host_group(waiting_hosts, snapshot), event["message"]
    evidence = describe_event(event)
    if (answer := _explain_reference(snapshot, message, group, evidence)) is not None:
        return answer
    headline = Text("{hosts} cannot mount a volume: {why}", hosts=group, why=message)
    return waiting_answer("mount", headline, evidence)


def _is_being_created(host: Host) -> bool:
    return (
        host.node is not None and not host.has_started and not host.has_ended and not host.running
    )


def _explain_sandbox(snapshot: Snapshot, present_hosts: list[Host]) -> Answer | None:
    waiting_hosts = [host for host in present_hosts if _is_being_created(host)]
    event = snapshot.find_event(*_SANDBOX_EVENTS, kind="Pod", on_hosts=waiting_hosts)
    if not waiting_hosts or event is None:
        return None
    template = "the node cannot create the pod sandbox of {hosts}: {message}"
    headline = Text(template, hosts=host_group(waiting_hosts, snapshot), message=event["message"])
    return waiting_answer("sandbox", headline, describe_event(event))


def _explain_init_run(snapshot: Snapshot, present_hosts: list[Host]) -> Answer | None:
    """Explain a running init container, or a sidecar that is not ready yet."""
    waiting_hosts = [host for host in present_hosts if host.is_init and host.running]
    if not waiting_hosts:
        return None
    host, event = waiting_hosts[0], None
    template = "init container {name} has run for {spent:age}"
    if host.is_sidecar:
        template = "sidecar {name} has not been ready for {spent:age}"
        event = snapshot.find_event("Unhealthy", kind="Pod", on_hosts=waiting_hosts)
    elapsed_s = seconds_since(host.running.get("startedAt"), snapshot.now) or 0.0
    return _starting_answer(
        "init-runs",
        host_group(
            [other for other in waiting_hosts if other.container == host.container], snapshot
        ),
        Text(template, name=host.container, spent=elapsed_s),
        describe_event(event),
        advise_wait("wait; {logs} shows it.", logs=_logs_command(host)),
    )


def _starting_answer(
    situation: str,
    group: HostGroup,
    activity: Text,
    evidence: Evidence,
    next_step: NextStep | None = None,
) -> Answer:
    headline = Text("is starting: {hosts}: {what}", hosts=group, what=activity)
    clause = None
    if len(group) == 1 < group.expected:
        clause = Text("{hosts} is starting: {what}", hosts=group, what=activity)
    return Answer(situation, headline, evidence, next_step, clause)


def _explain_slow_start(snapshot: Snapshot, present_hosts: list[Host]) -> Answer | None:
    """Explain that the containers are still being created, and nothing has failed."""
    waiting_hosts = [host for host in present_hosts if _is_being_created(host)]
    if not waiting_hosts:
        return None
    group, host = host_group(waiting_hosts, snapshot), waiting_hosts[0]
    elapsed_s = seconds_since(min(other.created_at for other in waiting_hosts), snapshot.now) or 0.0
    if elapsed_s >= _SLOW_START_S and not host.is_seen_by_kubelet:
        template = "the kubelet of node {node} has not begun with it in {spent:age}"
        activity = Text(template, node=host.node, spent=elapsed_s)
        step = advise_wait(
            "wait, or ask the cluster administrator whether the kubelet runs: {describe}",
            describe=kubectl_command("describe", "node", host.node or "", is_namespaced=False),
        )
        evidence = describe_event(snapshot.newest_warning)
        return _starting_answer("starting", group, activity, evidence, step)
    pulling = snapshot.find_event("Pulling", kind="Pod", on_hosts=waiting_hosts)
    activity = Text("creating volumes and containers")
    if pulling is not None:
        activity = Text("pulling image {image}", image=host.image or _main_image(snapshot))
    if elapsed_s >= _SLOW_START_S:
        activity += Text(" for {spent:age}", spent=elapsed_s) + describe_unread_kinds(
            snapshot, "events"
        )
    return _starting_answer("starting", group, activity, describe_event(pulling))


def _main_image(snapshot: Snapshot) -> str:
    return str(hosts.jobset_main_container(snapshot.jobset).get("image", ""))


# --- other containers of the pods, which `pod:` or a webhook adds ---------------------------------

# The other containers of a pod may run for this long after the program.
_SIDECAR_GRACE_S = 15.0
_NATIVE_SIDECAR = Text("make it an init container with restartPolicy: Always (a native sidecar)")


class _ContainerMatch(NamedTuple):
    """A container that matches a condition, and the hosts in whose pods it does."""

    hosts: list[Host]
    container: Container


def explain_sidecar_failure(snapshot: Snapshot) -> Answer | None:
    """Explain that a container other than the program's ended the job."""
    attempt_end = snapshot.report.attempt_end
    if attempt_end is not None and attempt_end.verdict.code != contract.DONE:
        return None
    has_program_failed = any(host.terminated.get("exitCode") for host in snapshot.hosts)
    match = _find_container(snapshot.hosts, _has_failed)
    if has_program_failed or match is None:
        return None
    container = match.container
    headline = Text(
        "{container} {end}; the program itself finished",
        container=_describe_container(match, snapshot),
        end=describe_end(container.terminated, container.memory_limit),
    )
    evidence: Evidence = ()
    if message := container.terminated.get("message"):
        evidence = (Text("{name}: {message}", name=container.name, message=message),)
    logs = _logs_command(match.hosts[0], container.name)
    step = advise_run("{logs}; if it may fail, {native}.", logs=logs, native=_NATIVE_SIDECAR)
    return Answer("sidecar", headline, evidence, step)


def _has_failed(container: Container) -> bool:
    return bool(container.terminated.get("exitCode"))


def explain_outliving_sidecar(snapshot: Snapshot) -> Answer | None:
    """Explain that the program has ended, and another container keeps its pod running."""
    ended_hosts = [
        host
        for host in snapshot.hosts
        if host.terminated and not (host.is_init or host.has_ended or host.is_leaving)
    ]
    match = _find_container(ended_hosts, lambda container: bool(container.running))
    if match is None:
        return None
    end = match.hosts[0].terminated
    elapsed_s = seconds_since(end.get("finishedAt"), snapshot.now)
    if elapsed_s is not None and elapsed_s < _SIDECAR_GRACE_S:
        return None
    since = "" if elapsed_s is None else " {spent:age} ago"
    headline = Text(
        f"does not end: its program ended{since} (exit {{code}}), but {{container}} still runs",
        spent=elapsed_s,
        code=end.get("exitCode", 0),
        container=_describe_container(match, snapshot),
    )
    step = advise_run(
        "`{stop}` ends it; to have container {container} end with the program, {native}.",
        stop=launcher_command("stop", JOB_NAME),
        container=match.container.name,
        native=_NATIVE_SIDECAR,
    )
    return Answer("sidecar", headline, next_step=step)


def explain_failing_sidecar(snapshot: Snapshot) -> Answer | None:
    """Explain that another container has failed, so that the job fails when the program ends."""
    match = _find_container(snapshot.hosts, _has_failed)
    if match is None:
        return _explain_sidecar_restarts(snapshot)
    container = match.container
    headline = Text(
        "runs, but {container} {end}: the job fails when its program ends",
        container=_describe_container(match, snapshot),
        end=describe_end(container.terminated, container.memory_limit),
    )
    step = advise_run(command=_logs_command(match.hosts[0], container.name))
    return Answer("sidecar", headline, next_step=step)


def _explain_sidecar_restarts(snapshot: Snapshot) -> Answer | None:
    """Explain a native sidecar that ends again and again, which does not make the Job fail."""

    def is_restarting(container: Container) -> bool:
        has_ended = bool(container.terminated or container.last_terminated)
        return container.is_sidecar and not container.running and has_ended

    match = _find_container(snapshot.hosts, is_restarting, is_init=True)
    if match is None:
        return None
    container = match.container
    headline = Text(
        "runs, but sidecar {name} of {hosts} ends again and again: exit code {code}",
        name=container.name,
        hosts=host_group(match.hosts, snapshot),
        code=(container.terminated or container.last_terminated).get("exitCode"),
    )
    step = advise_run(command=_logs_command(match.hosts[0], container.name, "--previous"))
    evidence = describe_event(snapshot.find_event("BackOff", kind="Pod"))
    return Answer("sidecar", headline, evidence, step)


def describe_end(
    end: Mapping[str, Any],
    memory_limit: str | None,
    no_limit_note: str = "; it has no memory limit",
) -> Text:
    """Return "ended with exit code 7" or "was OOMKilled; its memory limit is 40Mi"."""
    if end.get("reason") != "OOMKilled":
        return Text("ended with exit code {code}", code=end["exitCode"])
    limit = no_limit_note if memory_limit is None else "; its memory limit is {limit}"
    return Text("was OOMKilled" + limit, limit=memory_limit)


def _find_container(
    candidates: Sequence[Host], predicate: Callable[[Container], bool], *, is_init: bool = False
) -> _ContainerMatch | None:
    """Return the first matching container, and the hosts with a match of the same name."""
    pairs = [
        (host, container)
        for host in candidates
        for container in host.other_containers
        if container.is_init == is_init and predicate(container)
    ]
    if not pairs:
        return None
    container = pairs[0][1]
    matching_hosts = [host for host, other in pairs if other.name == container.name]
    return _ContainerMatch(matching_hosts, container)


def _describe_container(match: _ContainerMatch, snapshot: Snapshot) -> Text:
    template = "container {name} of {hosts}"
    return Text(template, name=match.container.name, hosts=host_group(match.hosts, snapshot))
