"""The Secret of a gang on the cluster, with its JobSet as its owner.

It is never read, so that submitting needs no right to: a dry run says whether one of its name is there.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxlaunch.launcher.errors import UserError, exceeds_quota
from jaxlaunch.launcher.kubernetes.client import ApiError, Cluster, Unreachable
from jaxlaunch.launcher.kubernetes.kinds import SECRETS

GIVE_UP_S = 30.0  # on a Secret that does not go, and on a server that answers with errors
_SILENT_S = 2.0  # of a wait that nobody is told of
_PAUSE_S = 0.5

if TYPE_CHECKING:
    from jaxlaunch.launcher.job.load import JobFile  # pydantic is most of a start, and few commands read a job

Obj = dict[str, Any]


def settled(file: JobFile, cluster: Cluster, namespace: str, say: Callable[[str], None]) -> JobFile:
    """The job with `gang_secret` as it is where the job file leaves it out: true for several hosts, if the user may."""
    if file.spec.gang_secret is not None:
        return file
    has_several = file.spec.host_count > 1
    may = has_several and cluster.may("create", SECRETS, namespace)
    if has_several and not may:
        say(
            f"the hosts' traffic is not encrypted, since you may not create Secrets in namespace {namespace}: "
            "the job's NetworkPolicy alone keeps others out (docs/kubernetes.md, Many hosts)"
        )
    return dataclasses.replace(file, spec=file.spec.model_copy(update={"gang_secret": may}))


class GangSecret:
    """The Secret of one job's gang, to be created by its manifest."""

    def __init__(self, cluster: Cluster, manifest: Obj, job: str, say: Callable[[str], None]) -> None:
        self.manifest = manifest
        self._cluster, self._job, self._say = cluster, job, say
        self._name, self._namespace = manifest["metadata"]["name"], manifest["metadata"]["namespace"]

    def wait_until_free(self, jobset: Callable[[], Obj | None], *, has_removed: bool) -> Obj | None:
        """The JobSet as `jobset` finds it, or None once there is none and no Secret of this name either.

        A new gang's pods would start with bytes that others may know, or some of them with those of the gang before,
        whose Secret goes seconds after its JobSet. `has_removed`: an earlier JobSet, whose quota is given back as late.
        Raises UserError for a Secret that does not go.
        """
        begin, has_said = time.monotonic(), False
        while (found := jobset()) is None and (fault := self._in_the_way(has_removed)) is not None:
            waited_s = time.monotonic() - begin
            if waited_s > GIVE_UP_S:
                raise fault if exceeds_quota(fault) else self._not_ours()
            if waited_s > _SILENT_S and not has_said:
                self._say(f"waiting for Secret {self._name} to go: it is there without JobSet {self._job}")
                has_said = True
            time.sleep(_PAUSE_S)
        return found

    def _in_the_way(self, has_removed: bool) -> ApiError | None:
        """Why the server would not create it now; None when it would."""
        try:
            self._cluster.create(SECRETS, self.manifest, dry_run=True)
        except ApiError as fault:
            if fault.reason == "AlreadyExists" or (has_removed and exceeds_quota(fault)):
                return fault
            raise
        return None

    def attach(self, owner: Obj, *, is_new: bool, has_removed: bool) -> None:
        """Creates it with the JobSet as its owner.

        Beside a JobSet that was there before, a Secret that is there is its own, and so is what uses up a quota, which
        the server judges first. Raises UserError for one that came beside a JobSet that `is_new`.
        """
        owned = self.manifest | {"metadata": self.manifest["metadata"] | {"ownerReferences": [owner]}}
        end = time.monotonic() + GIVE_UP_S
        was_sent = False
        while True:
            try:
                self._cluster.create(SECRETS, owned)
                return
            except (ApiError, Unreachable) as error:
                fault = error
            exists = isinstance(fault, ApiError) and fault.reason == "AlreadyExists"
            if exists and is_new and not was_sent:
                raise self._not_ours()
            if exists or (exceeds_quota(fault) and not is_new):
                return
            is_unknown = fault.sent if isinstance(fault, Unreachable) else fault.status >= 500
            may_pass = is_unknown or isinstance(fault, Unreachable) or (exceeds_quota(fault) and has_removed)
            if not may_pass or time.monotonic() > end:
                raise fault
            was_sent = was_sent or is_unknown
            time.sleep(_PAUSE_S)

    def _not_ours(self) -> UserError:
        where = f"Secret {self._name} in namespace {self._namespace}"
        message = f"{where} was there before JobSet {self._job}, so others may know what it holds. It was not changed."
        hint = f"`kubectl -n {self._namespace} delete secret {self._name}`, then submit again."
        return UserError(message, hint)
