"""Starts the agent from its environment; an error before it runs becomes the exit code."""

from __future__ import annotations

import dataclasses
import errno
import os
import sys

from jaxlaunch import contract
from jaxlaunch.launcher.agent import unpack
from jaxlaunch.launcher.agent.agent import Agent, write_termination_message
from jaxlaunch.launcher.agent.gang import config
from jaxlaunch.launcher.agent.gang.config import Config
from jaxlaunch.launcher.agent.host import preflight
from jaxlaunch.launcher.agent.host.remote_folder import FolderError, RemoteFolder
from jaxlaunch.records.failure import Failure, FailureKind
from jaxlaunch.records.verdict import verdict_for_code


def start() -> int:
    """Runs this host's agent; returns its exit code."""
    try:
        place = config.read(os.environ)
        _check_certificates(place)
        if place.code is not None:
            unpack.unpack(*place.code)
    except (config.ConfigError, unpack.CodeError) as error:
        return _refuse(contract.BAD_SPEC, str(error))
    except OSError as error:
        return _refuse(contract.STORAGE, f"cannot unpack the job's code: {error}")
    if place.is_pod and os.geteuid() == 0:
        os.umask(0o002)  # a later pod of another user has root's group, and goes on with what this one writes
    place = dataclasses.replace(place, fault=place.fault or preflight.fault(place.job, is_pod=place.is_pod))
    copied = _copied(place)
    try:
        if copied is None:
            return _run(place)
        return _run(dataclasses.replace(place, run_dir=copied.folder), copied)
    finally:
        if copied is not None and not copied.close():
            print(f"agent {place.host}: the run folder was not copied to its bucket whole", file=sys.stderr)


def _check_certificates(place: Config) -> None:
    """Raises ConfigError for certificates that this Python cannot use."""
    if place.certificates is None:
        return
    try:
        from jaxlaunch.launcher.agent.io import tls

        tls.contexts(place.certificates)
    except (ImportError, OSError) as error:
        hint = "`gang_secret: false` goes without"
        raise config.ConfigError(f"cannot use the certificates in {place.certificates}: {error}; {hint}") from None


def _copied(place: Config) -> RemoteFolder | None:
    """The run folder of a job that has it in a bucket, or None; the children are told its path here."""
    url = os.environ.get(contract.RUN_URL)
    if not url:
        return None
    try:
        copied = RemoteFolder(url, place)
    except (FolderError, OSError) as error:
        print(f"agent {place.host}: {error}; earlier attempts stay unknown", file=sys.stderr)
        return None
    os.environ[contract.RUN_DIR] = str(copied.folder)
    return copied


def _run(place: Config, copied: RemoteFolder | None = None) -> int:
    try:
        agent = Agent(place, copied)
    except OSError as error:
        is_taken = error.errno == errno.EADDRINUSE
        hint = " Is another agent of this host still running?" if is_taken else ""
        message = f"the agent of host {place.host} cannot start: {error}.{hint}"
        return _refuse(contract.LOST, message)
    return agent.run()


def _refuse(exit_code: int, message: str) -> int:
    print(f"agent: {message}", file=sys.stderr)
    if os.environ.get(contract.NODE):
        write_termination_message(verdict_for_code(exit_code, Failure(FailureKind.REFUSED, detail=message)), None, 0, 0)
    return exit_code
