"""Texts as data: templates with fields, which `Renderer` turns into strings at the very end.

A `Text` has no string methods, so that no code can depend on its wording. Its template is also its
key in a catalog of translations, as in gettext: `localize` may return another template with the
same fields. A field may have one of these formats: `{pods:pod}` renders as "1 pod" or "4 pods",
`{hosts:is|are}` as a singular or a plural word, `{spent:age}` as a duration, and `{parts:; }` as a
list with this separator. Strings, which come from Kubernetes, Kueue and the agents, are rendered on
one line and truncated.
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

# Longer messages of events, conditions and logs are truncated.
MAX_MESSAGE_CHARS = 600
# A larger group of hosts is counted and not listed.
MAX_LISTED_HOSTS = 8
# Placeholders in a command: for the name of the job, and for the arguments of `launcher submit`
# that select it (its file and the overrides).
JOB_NAME, JOB_FILE = "NAME", "JOB_FILE"


@dataclasses.dataclass(frozen=True, init=False)
class Text:
    """A template and its fields, not rendered yet."""

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
    """A shell command in a text. `-n NAMESPACE` is added to it if `is_namespaced`."""

    words: tuple[str, ...]
    is_namespaced: bool = True
    # The command that reads the output of this one.
    reader: tuple[str, ...] = ()


def _join_command(command: Command) -> str:
    """Return a command as a person types it."""
    return " | ".join(shlex.join(words) for words in (command.words, command.reader) if words)


def launcher_command(*words: str, is_namespaced: bool = True) -> Command:
    """Return a `launcher` command with these arguments."""
    return Command(("launcher", *words), is_namespaced)


def kubectl_command(*words: str, is_namespaced: bool = True) -> Command:
    """Return a `kubectl` command with these arguments."""
    return Command(("kubectl", *words), is_namespaced)


# SUBMIT resumes a stopped job, and SUBMIT_AGAIN replaces an ended one. For a run on this machine
# both are rendered as `launcher run`.
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
    """Advice for the user.

    Attributes:
        action: Kind of action.
        text: The advice. For RESUBMIT it has no period, since `full_text` adds `resume_step`.
        resume_step: Step from which the job resumes, if it is known.
    """

    action: Action
    text: Text
    resume_step: int | None = None

    def list_commands(self) -> list[Command]:
        """Return the commands in the text."""
        return [field for field in self.text.fields.values() if isinstance(field, Command)]

    def full_text(self) -> Text:
        """Return the text, which for RESUBMIT ends with the step from which the job resumes."""
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
        if len(self) == self.expected > 1:
            return Text("all {expected:host}", expected=self.expected)
        if len(self) == self.expected:
            return Text("its host" if self.expected else "no host")
        if len(self) == 1:
            return Text("host {number}", number=self.numbers[0])
        if len(self) <= MAX_LISTED_HOSTS:
            *numbers, last = self.numbers
            return Text("hosts {numbers} and {last}", numbers=numbers, last=last)
        return Text("{number} of {expected:host}", number=len(self), expected=self.expected)


def host_group(hosts: Collection[Host], snapshot: Snapshot) -> HostGroup:
    """Return these hosts of a job as a group."""
    return HostGroup(tuple(host.number for host in hosts), snapshot.expected_hosts)


def quote_message(message: str) -> Text:
    """Return a message as a text, which is rendered on one line and truncated."""
    return Text("{message}", message=message)


def describe_event(event: Obj | None) -> tuple[Text, ...]:
    """Return the line of evidence about an event, or nothing if there is no event."""
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
    """Return the translation of a template. English is the only language; tests add another."""
    return template


class Renderer(string.Formatter):
    """Renders texts about one job.

    Args:
        name: Name of the job, for JOB_NAME in commands.
        namespace: Its namespace, or "" to leave it out of commands.
        job_words: Arguments with which the job was submitted, for JOB_FILE in commands.
        run_command: For a run on this machine, the command that replaces SUBMIT and SUBMIT_AGAIN.
        has_full_messages: Whether strings are rendered as they are, not on one line or truncated.
    """

    def __init__(
        self,
        name: str = JOB_NAME,
        namespace: str = "",
        *,
        job_words: tuple[str, ...] = (JOB_FILE,),
        run_command: Command | None = None,
        has_full_messages: bool = False,
    ) -> None:
        self._name = name
        self._namespace = namespace
        self._job_words, self._run_command = job_words, run_command
        self._has_full_messages = has_full_messages

    def render(self, text: Text) -> str:
        """Return the text as a string."""
        return self.vformat(localize(text.template), (), text.fields)

    def command_words(self, command: Command) -> list[str]:
        """Return the words of a command, with its placeholders replaced and the namespace added."""
        command = self._fill_in(command)
        return ["sh", "-c", _join_command(command)] if command.reader else list(command.words)

    def _fill_in(self, command: Command) -> Command:
        if self._run_command is not None and command in (SUBMIT, SUBMIT_AGAIN):
            command = self._run_command
        words = list[str]()
        for word in command.words:
            words += self._job_words if word == JOB_FILE else [word]
        words = [self._name if word == JOB_NAME else word for word in words]
        if self._namespace and command.is_namespaced:
            # `kubectl -n NAMESPACE get …`, but `launcher logs -n NAMESPACE …`.
            position = 1 if words[0] == "kubectl" else 2
            words[position:position] = ["-n", self._namespace]
        return dataclasses.replace(command, words=tuple(words))

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
                return _join_command(self._fill_in(value))
            case str():
                return value if self._has_full_messages else one_line(value)
            case list() | tuple():
                return (format_spec or ", ").join(self.format_field(part, "") for part in value)
            case int() if format_spec:
                return format_count(value, format_spec)
        return format(value, format_spec)
