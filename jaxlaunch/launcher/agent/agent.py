"""The agent of one host.

The agent reads its configuration from environment variables. It runs one event loop with this
host's member of the gang and, on host 0, the leader. If it cannot start the loop, it logs the error
and exits with a code of the contract.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gzip
import os
import posixpath
import shutil
import signal
import sys
import tarfile
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from jaxlaunch import contract
from jaxlaunch.contract import Action
from jaxlaunch.launcher.agent import metrics_server
from jaxlaunch.launcher.agent.gang import config as configuration
from jaxlaunch.launcher.agent.gang.clock import Clock, process_age_s
from jaxlaunch.launcher.agent.gang.config import Config, ConfigError, coordinator_warning
from jaxlaunch.launcher.agent.gang.protocol import Hello
from jaxlaunch.launcher.agent.host.folders import FolderError, RemoteFolder, SiteFolder
from jaxlaunch.launcher.agent.host.member import Member
from jaxlaunch.launcher.agent.host.processes import adopt_orphans, die_with_parent
from jaxlaunch.launcher.agent.io import resources
from jaxlaunch.launcher.agent.io.loop import Loop
from jaxlaunch.launcher.agent.io.output import OutputStream
from jaxlaunch.launcher.agent.leader.publishers import PodLog
from jaxlaunch.launcher.agent.leader.reporter import LeaderReport, record_end_without_leader
from jaxlaunch.launcher.agent.leader.server import Server
from jaxlaunch.launcher.agent.metrics_server import MetricsServer
from jaxlaunch.records import codec, log_lines
from jaxlaunch.records.log_lines import TerminationMessage
from jaxlaunch.records.verdict import Failure, FailureKind, Verdict, verdict_for_code
from jaxlaunch.runs import history, host_load
from jaxlaunch.runs.run_folder import RunFolder

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Time for slow readers of stdout and stderr at the end of the agent.
FLUSH_TIMEOUT_S = 2.0
# This host writes the summary when host 0 is lost.
DEPUTY_HOST = 1


def run_agent() -> int:
    """Run this host's agent and return its exit code."""
    try:
        config = configuration.read_config(os.environ)
        _check_certificates(config)
        if config.code is not None:
            unpack_code(*config.code)
    except (ConfigError, CodeError) as error:
        return _report_refusal(contract.BAD_SPEC, str(error))
    except OSError as error:
        return _report_refusal(contract.STORAGE, f"cannot unpack the job's code: {error}")
    if config.is_pod and os.geteuid() == 0:
        # A later pod may run as another user of root's group, and must be able to change the files
        # of this one.
        os.umask(0o002)
    fault = config.fault or resources.find_fault(config.job, is_pod=config.is_pod)
    config = dataclasses.replace(config, fault=fault)
    run_folder_copy = _copy_run_folder(config)
    if run_folder_copy is not None:
        config = dataclasses.replace(config, run_dir=run_folder_copy.folder)
    try:
        agent = Agent(config, run_folder_copy)
    except OSError as error:
        hint = ""
        if error.errno == errno.EADDRINUSE:
            hint = " Is another agent of this host still running?"
        message = f"the agent of host {config.host} cannot start: {error}.{hint}"
        return _report_refusal(contract.LOST, message)
    else:
        return agent.run()
    finally:
        if run_folder_copy is not None and not run_folder_copy.close():
            message = "the run folder was not copied to its bucket completely"
            print(f"agent {config.host}: {message}", file=sys.stderr)


def _check_certificates(config: Config) -> None:
    """Raise ConfigError if this Python cannot use the certificates."""
    if config.certificates is None:
        return
    try:
        from jaxlaunch.launcher.agent.io import tls

        tls.load_contexts(config.certificates)
    except (ImportError, OSError) as error:
        hint = "`gang_secret: false` runs the job without it"
        fault = f"cannot use the certificates in {config.certificates}: {error}"
        raise ConfigError(f"{fault}; {hint}") from None


def _copy_run_folder(config: Config) -> RemoteFolder | None:
    """Copy the run folder from its bucket, and pass the local path to child processes.

    Returns:
        The copy, or None if the run folder is not in a bucket or could not be copied.
    """
    url = os.environ.get(contract.RUN_URL)
    if not url:
        return None
    try:
        run_folder_copy = RemoteFolder(url, config)
    except (FolderError, OSError) as error:
        print(f"agent {config.host}: {error}; earlier attempts stay unknown", file=sys.stderr)
        return None
    os.environ[contract.RUN_DIR] = str(run_folder_copy.folder)
    return run_folder_copy


def _report_refusal(exit_code: int, message: str) -> int:
    print(f"agent: {message}", file=sys.stderr)
    if os.environ.get(contract.NODE):
        facts = Failure(FailureKind.REFUSED, detail=message)
        write_termination_message(verdict_for_code(exit_code, facts), None, 0, 0)
    return contract.DONE if _may_fail(os.environ) else exit_code


def _may_fail(environ: Mapping[str, str]) -> bool:
    """Return whether the job may fail, False if JAXLAUNCH_JOB is malformed."""
    try:
        # Other fields of the job may be the reason of a refusal.
        fields = codec.parse_record(environ.get(contract.JOB, ""))
    except ValueError:
        return False
    return isinstance(fields, dict) and fields.get("may_fail") is True


class Agent:
    """The agent of one host, which runs until the gang ends."""

    def __init__(self, config: Config, run_folder_copy: RemoteFolder | None = None) -> None:
        """Create the parts of the agent and open its HTTP port.

        Args:
            config: Configuration of this agent.
            run_folder_copy: Local copy of the run folder, if the run folder is in a bucket.

        Raises:
            OSError: The HTTP port or the leader's port is in use.
        """
        self._config = config
        self._loop = Loop()
        self._site_folder = SiteFolder()
        self._stdout = OutputStream(self._loop, 1, patience_s=config.output_patience_s)
        self._stderr = OutputStream(self._loop, 2)
        self._verdict: Verdict | None = None
        # Whether this host leaves while the rest of the gang continues.
        self._leaves_alone = False
        self._started_at = time.time()
        self._run_folder = RunFolder(config.run_dir, self._say_from_any_thread)
        clock = Clock(time.monotonic() - process_age_s()) if config.is_leader else None
        replies: dict[str, metrics_server.Reply] = {
            "/profile": lambda *request: self._member.reports.profiles.reply(*request)
        }
        if config.is_pod:
            replies["/output"] = lambda method, query, is_local: self._output_reply(is_local)
        self._server = MetricsServer(
            self._loop,
            "127.0.0.1" if config.is_local else "",
            config.job.metrics_port,
            lambda: [child.metrics_path for child in self._member.processes.alive_children()],
            self._render_metrics,
            replies,
        )
        hello = Hello.from_config(config, self._server.port)
        self._member = Member(
            config,
            self._loop,
            self._site_folder,
            hello,
            self._stdout,
            clock,
            say=self.say,
            finish=self._finish,
            on_orphaned=self._record_lost_leader,
            take_ranks=run_folder_copy.take_ranks if run_folder_copy else lambda ranks: None,
        )
        self._leader: Server | None = None
        if clock is not None:
            pod_log = PodLog(config.generation, self._write_line if config.is_pod else None)
            self._leader = Server(
                config,
                self._loop,
                hello,
                clock,
                self._run_folder,
                pod_log,
                say=self.say,
                finish=self._finish,
            )
        if run_folder_copy is not None:
            self._loop.on_exit_of(run_folder_copy.pid, self._on_copier_end)

    def _on_copier_end(self, code: int) -> None:
        ending = f"signal {-code}" if code < 0 else f"exit code {code}"
        copier = "the process that copies the run folder to its bucket"
        self.say(f"{copier} ended with {ending}: nothing new reaches the bucket")

    def say(self, text: str) -> None:
        """Write a message for people to stderr."""
        self._write_line(f"agent {self._config.host}: {text}")

    def _write_line(self, line: str) -> None:
        self._stderr.write_line(line.encode(errors="backslashreplace"))

    def _say_from_any_thread(self, text: str) -> None:
        # Only the thread of the loop may use the streams. Another thread writes the summaries.
        if threading.current_thread() is threading.main_thread():
            self.say(text)
        else:
            self._loop.call_later(0.0, lambda: self.say(text))

    def run(self) -> int:
        """Run the loop until there is a verdict, and return its exit code."""
        replaces = self._config.job.replaces
        if replaces and history.is_done(self._run_folder.read_records(self._config.uid)):
            self.say("the run has finished: there is nothing left to do")
            self._stderr.flush(FLUSH_TIMEOUT_S)
            self._site_folder.close()
            return contract.DONE
        # The member has installed its handlers. Children inherit the mask, so it must be cleared
        # before a fork.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        adopt_orphans()
        parent = os.environ.get(contract.PARENT, "")
        if parent.isdecimal() and not die_with_parent(signal.SIGTERM, int(parent)):
            self._member.request_stop()
        if self._leader is not None:
            if (warning := coordinator_warning(self._config)) is not None:
                self.say(warning)
            self._leader.start_waiting()
        self._member.connect_to_leader()
        try:
            self._loop.run()
        finally:
            self._member.processes.shut_down()
            self._member.processes.flush_logs()
            self._stdout.flush(FLUSH_TIMEOUT_S)
            self._stderr.flush(FLUSH_TIMEOUT_S)
            self._site_folder.close()
        assert self._verdict is not None, "the loop ends with a verdict"
        if self._config.is_pod:
            write_termination_message(
                self._verdict,
                self._config.host,
                self._config.generation,
                self._member.state.attempt,
            )
        code = self._verdict.code
        if replaces:
            code = contract.agent_exit_code(code, does_gang_continue=self._leaves_alone)
        # A Job that fails would end or restart the other roles. The termination message has the
        # verdict.
        return contract.DONE if self._config.job.may_fail and code != contract.LEFT_GANG else code

    def _finish(self, verdict: Verdict, leaves_alone: bool) -> None:
        """End the agent with its first verdict.

        If the verdict fails the job, the agent first waits for one more scrape of its metrics.
        """
        if self._verdict is not None:
            return
        self._verdict, self._leaves_alone = verdict, leaves_alone
        fails_job = contract.outcome_for_code(verdict.code).action is Action.FAIL
        if not fails_job or self._member.state.signalled_at is not None:
            self._loop.stop()
            return
        for number in STOP_SIGNALS:
            self._loop.on_signal(number, self._loop.stop)
        self._server.after_scrape(self._loop.stop)

    def _record_lost_leader(self, verdict: Verdict) -> None:
        """Write the record and the summary in place of the lost leader."""
        if self._config.host == DEPUTY_HOST:
            member = self._member
            statuses = [child.progress.status for child in member.processes.children.values()]
            attempt = member.state.attempt
            report = LeaderReport.from_message(member.gang, attempt, self._started_at)
            record_end_without_leader(self._run_folder, self._config, report, statuses, verdict)

    def _output_reply(self, is_local: bool) -> tuple[HTTPStatus, Mapping[str, Any]]:
        """Return the last lines of this host's processes for `launcher logs`."""
        if not is_local:
            reason = "output is served on loopback only: connect by a port-forward"
            return HTTPStatus.FORBIDDEN, {"error": reason}
        children = self._member.processes.children
        return HTTPStatus.OK, {str(rank): child.last_lines for rank, child in children.items()}

    def _render_metrics(self, child_texts: Sequence[str]) -> str:
        """Return the answer to /metrics, given the metrics of this host's processes."""
        now, member = time.monotonic(), self._member
        ranks = {rank: child.progress for rank, child in member.processes.children.items()}
        silence_s = 0.0 if self._config.is_leader else now - member.leader.last_message_at
        memory, timeouts_s = host_load.read_memory(), member.reports.timeouts_s
        agent_text = metrics_server.render_agent_metrics(
            self._config.generation, member.gang, ranks, timeouts_s, silence_s, memory, now
        )
        return metrics_server.merge_expositions([agent_text, *child_texts])


def write_termination_message(
    verdict: Verdict, host: int | None, generation: int, attempt: int
) -> None:
    """Write the pod's termination message. Errors are only logged.

    The message replaces anything that a program has written to the file.
    """
    fields = TerminationMessage(verdict, host, generation, attempt)
    message = log_lines.format_termination_message(fields)
    try:
        with open(log_lines.TERMINATION_LOG, "r+") as file:
            file.truncate()
            file.write(message)
    except OSError as error:
        print(f"agent: cannot write the termination message: {error}", file=sys.stderr)


# --- the job's code -------------------------------------------------------------------------------


class CodeError(Exception):
    """The archive of the job's code is damaged or has an entry that it must not have."""


def unpack_code(archive: str, folder: str) -> None:
    """Extract a gzipped tar archive of files, and of symbolic links that stay inside the folder.

    The folder may hold the files of a previous container of the pod, which are replaced.

    `tarfile.extractall` is not used, because its filters differ between the Python versions of
    images.

    Raises:
        CodeError: The archive is damaged, has another kind of entry, or an entry that leaves the
            folder.
        OSError: A file cannot be written.
    """
    # Links are created after all files, so that no file is written through a link.
    links: list[tuple[str, str]] = []
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                target = os.path.join(folder, _normalize_inside(member.name, member.name))
                os.makedirs(os.path.dirname(target), exist_ok=True)
                if member.issym():
                    source = posixpath.join(posixpath.dirname(member.name), member.linkname)
                    _normalize_inside(source, member.name)
                    links.append((member.linkname, target))
                elif (content := tar.extractfile(member)) is not None and member.isreg():
                    _remove_file(target)
                    with open(target, "wb") as file:
                        shutil.copyfileobj(content, file)
                    os.chmod(target, 0o755 if member.mode & 0o100 else 0o644)
                else:
                    fault = "is neither a regular file nor a symbolic link"
                    raise CodeError(f"{archive}: {member.name} {fault}")
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise CodeError(f"{archive} is damaged: {error}") from None
    for source, target in links:
        _remove_file(target)
        os.symlink(source, target)


def _remove_file(path: str) -> None:
    """Remove what a previous container of the pod left at a path, a link rather than its target."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _normalize_inside(path: str, entry_name: str) -> str:
    """Return the normalized path. Raises CodeError if it leads out of the folder."""
    normal = posixpath.normpath(path)
    if posixpath.isabs(normal) or normal.split("/")[0] == "..":
        raise CodeError(f"{entry_name} points outside of the folder that it is unpacked to")
    return normal
