"""Texts as data: templates with fields, which `Renderer` turns into strings at the edge.

A `Text` has no string methods, so that no code can depend on its wording. The template is also its
key in a catalog, as in gettext: `localize` may map it to another template with the same fields. In
a template `{pods:pod}` writes "1 pod" or "4 pods", `{hosts:is|are}` a singular or a plural word,
`{spent:age}` a duration, and `{parts:; }` a list with this separator. Strings from Kubernetes,
Kueue and the agents are written on one line and truncated.
"""

from __future__ import annotations

import dataclasses
import enum
import shlex
import string
from collections.abc import Collection, Mapping
from typing import Any

from jaxlaunch.launcher.jobs.status.hosts import Host
from jaxlaunch.launcher.jobs.status.snapshot import Snapshot
from jaxlaunch.launcher.kubernetes.objects import Obj, format_age
from jaxlaunch.launcher.wording import format_count

MAX_MESSAGE_CHARS = 600  # characters of an event, a condition or a log line
MAX_LISTED_HOSTS = 8
# Placeholders in a command for the name of the job, and for the words that say which job is
# submitted: its file and the overrides.
JOB_NAME, JOB_FILE = "NAME", "JOB_FILE"


@dataclasses.dataclass(frozen=True, init=False)
class Text:
    """A text that has not been rendered."""

    template: str
    fields: Mapping[str, Any]

    def __init__(self, template: str, /, **fields: Any) -> None:
        object.__setattr__(self, "template", template)
        object.__setattr__(self, "fields", fields)

    def __add__(self, other: Text) -> Text:
        return Text("{first}{second}", first=self, second=other) if other.template else self


EMPTY_TEXT = Text("")


@dataclasses.dataclass(frozen=True)
class Command:
    """A command in a text. If it is namespaced, rendering adds `-n NAMESPACE`."""

    words: tuple[str, ...]
    is_namespaced: bool = True


def launcher_command(*words: str, is_namespaced: bool = True) -> Command:
    """Return a command of launcher."""
    return Command(("launcher", *words), is_namespaced)


def kubectl_command(*words: str, is_namespaced: bool = True) -> Command:
    """Return a command of kubectl."""
    return Command(("kubectl", *words), is_namespaced)


# Resumes a stopped job, and submits an ended one again. For a run on this machine both are
# `launcher run`.
SUBMIT = launcher_command("submit", JOB_FILE)
SUBMIT_AGAIN = launcher_command("submit", JOB_FILE, "--replace")
DOCTOR = launcher_command("doctor")
PLAN = launcher_command("plan", JOB_FILE, is_namespaced=False)
RENDER = launcher_command("render", JOB_FILE, is_namespaced=False)
PREPARE = launcher_command("prepare", JOB_FILE, is_namespaced=False)


class Action(enum.StrEnum):
    """Kind of action that a situation requires."""

    # The job continues by itself.
    WAIT = "wait"
    # Run the command that the text names.
    RUN = "run"
    # Change the job, its image, its data or an object that it needs.
    CHANGE = "change"
    # Change the same and submit again, since the job has ended.
    RESUBMIT = "resubmit"
    # Ask the cluster administrator, or the owner of what the text names.
    ASK = "ask"


@dataclasses.dataclass(frozen=True)
class NextStep:
    """Advice for the user. For RESUBMIT the text has no period, since a step may follow."""

    action: Action
    text: Text
    resume_step: int | None = None

    def list_commands(self) -> list[Command]:
        """Return the commands in the text."""
        return [field for field in self.text.fields.values() if isinstance(field, Command)]

    def full_text(self) -> Text:
        """Return the complete text."""
        if self.action is not Action.RESUBMIT:
            return self.text
        if self.resume_step is None:
            return Text("{text}.", text=self.text)
        return Text("{text}: it resumes from step {step}.", text=self.text, step=self.resume_step)


def advise_wait(template: str = "wait.", **fields: Any) -> NextStep:
    """Return the advice to wait."""
    return NextStep(Action.WAIT, Text(template, **fields))


def advise_run(template: str = "{command}", **fields: Any) -> NextStep:
    """Return the advice to run a command."""
    return NextStep(Action.RUN, Text(template, **fields))


def advise_change(template: str, **fields: Any) -> NextStep:
    """Return the advice to change something while the job exists."""
    return NextStep(Action.CHANGE, Text(template, **fields))


def advise_resubmit(template: str, **fields: Any) -> NextStep:
    """Return the advice to change something and to submit the job again."""
    return NextStep(Action.RESUBMIT, Text(template, **fields))


def advise_ask(template: str, **fields: Any) -> NextStep:
    """Return the advice to ask somebody with more rights."""
    return NextStep(Action.ASK, Text(template, **fields))


@dataclasses.dataclass(frozen=True)
class HostGroup:
    """Hosts of a job, as "host 3", "hosts 2 and 5", "all 4 hosts" or "17 of 64 hosts"."""

    numbers: tuple[int, ...]
    expected: int

    def __len__(self) -> int:
        return len(self.numbers)

    def describe(self) -> Text:
        """Return the words for the group."""
        if len(self) == self.expected:
            words = "its host" if self.expected else "no host"
            template = "all {expected:host}" if self.expected > 1 else words
            return Text(template, expected=self.expected)
        if len(self) == 1:
            return Text("host {number}", number=self.numbers[0])
        if len(self) <= MAX_LISTED_HOSTS:
            *numbers, last = self.numbers
            return Text("hosts {numbers} and {last}", numbers=numbers, last=last)
        return Text("{number} of {expected:host}", number=len(self), expected=self.expected)


def host_group(hosts: Collection[Host], snapshot: Snapshot) -> HostGroup:
    """Return the group of these hosts of a job."""
    return HostGroup(tuple(host.number for host in hosts), snapshot.expected_hosts)


def quote_message(message: str) -> Text:
    """Return a message of another program as a text, which is rendered on one line."""
    return Text("{message}", message=message)


def describe_event(event: Obj | None) -> tuple[Text, ...]:
    """Return an event as evidence: its object, reason, count and message."""
    if event is None:
        return ()
    template = "{kind} {object}: {reason}: {message}"
    if event["count"] > 1:
        template = "{kind} {object}: {reason} ({count} times): {message}"
    return (Text(template, **{**event, "object": event["names"][0]}),)


def one_line(text: str) -> str:
    """Return a message on one line, cut at MAX_MESSAGE_CHARS characters."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_MESSAGE_CHARS else f"{line[:MAX_MESSAGE_CHARS]}…"


def localize(template: str) -> str:
    """Return the translated template. There is only one language, but tests use another."""
    return template


class Renderer(string.Formatter):
    """Renders texts about one job. With `is_whole` strings are not truncated.

    `job_words` are the words with which the job was submitted, and `run_command` is the command of
    a run on this machine, which takes the place of a submission.
    """

    def __init__(
        self,
        name: str = JOB_NAME,
        namespace: str = "",
        *,
        job_words: tuple[str, ...] = (JOB_FILE,),
        run_command: Command | None = None,
        is_whole: bool = False,
    ) -> None:
        self._name = name
        self._namespace = namespace
        self._job_words, self._run_command = job_words, run_command
        self._is_whole = is_whole

    def render(self, text: Text) -> str:
        """Return the text as a string."""
        return self.vformat(localize(text.template), (), text.fields)

    def command_words(self, command: Command) -> list[str]:
        """Return the words of a command, with the name of the job and its namespace."""
        if self._run_command is not None and command in (SUBMIT, SUBMIT_AGAIN):
            command = self._run_command
        words = list[str]()
        for word in command.words:
            words += self._job_words if word == JOB_FILE else [word]
        words = [self._name if word == JOB_NAME else word for word in words]
        if self._namespace and command.is_namespaced:
            position = 1 if words[0] == "kubectl" else 2
            words[position:position] = ["-n", self._namespace]
        return words

    def format_field(self, value: Any, format_spec: str) -> str:
        """Return a field as a string, in one of the formats that the module's docstring lists."""
        if format_spec == "age":
            return format_age(value)
        if "|" in format_spec:
            singular, plural = format_spec.split("|")
            return singular if (value if isinstance(value, int) else len(value)) == 1 else plural
        match value:
            case Text():
                return self.render(value)
            case HostGroup():
                return self.render(value.describe())
            case Command():
                return shlex.join(self.command_words(value))
            case str():
                return value if self._is_whole else one_line(value)
            case list() | tuple():
                return (format_spec or ", ").join(self.format_field(part, "") for part in value)
            case int() if format_spec:
                return format_count(value, format_spec)
        return format(value, format_spec)
