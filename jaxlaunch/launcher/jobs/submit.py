"""A job's manifests onto a cluster: at most four writes, and one JobSet however often it is submitted.

The JobSet is written first: the others have its uid as their owner and are deleted with it. Whether a write whose
response was lost has happened is decided by a GET.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxlaunch.launcher.errors import ClusterError, UserError, exceeds_quota
from jaxlaunch.launcher.jobs import stop
from jaxlaunch.launcher.jobs.dependents import GIVE_UP_S, PAUSE_S, Dependents, gone, owner
from jaxlaunch.launcher.jobs.gang_secret import GangSecret
from jaxlaunch.launcher.jobs.ownership import whose
from jaxlaunch.launcher.jobs.status.hosts import is_ours
from jaxlaunch.launcher.kubernetes.client import ApiError, Cluster, Unreachable
from jaxlaunch.launcher.kubernetes.kinds import CONFIGMAPS, JOBSETS, KINDS, SECRETS, Kind
from jaxlaunch.launcher.kubernetes.labels import SPEC_HASH
from jaxlaunch.launcher.kubernetes.objects import terminal_state

GONE_S = 300.0  # until a deleted JobSet is gone

Obj = dict[str, Any]
Say = Callable[[str], None]


class Submitted(NamedTuple):
    """The JobSet as the cluster has it, and what was done."""

    jobset: Mapping[str, Any]
    how: str  # created, replaced, resumed or unchanged


class Submission:
    """One job, to be submitted to one namespace; run again it makes no second JobSet."""

    def __init__(self, cluster: Cluster, manifests: Sequence[Obj], say: Say) -> None:
        self._cluster, self._say = cluster, say
        self._jobset, *self._others = manifests
        self._name = str(self._jobset["metadata"]["name"])
        self._namespace = str(self._jobset["metadata"]["namespace"])
        secrets = [one for one in self._others if one["kind"] == SECRETS.kind]
        self._secret = GangSecret(cluster, secrets[0], self._name, say) if secrets else None
        self._dependents = Dependents(cluster, self._others, self._namespace)
        self._is_sent = False
        self._has_removed = False  # an earlier JobSet, whose quota the server gives back a moment later

    def run(self, *, replace: bool = False) -> Submitted:
        """Creates the job, or completes and returns the one that exists.

        Raises UserError for a name that is taken, ClusterError when the cluster refuses or does not answer.
        """
        self._dependents.refuse_others_policy()
        for manifest in self._others:
            if not self._try(KINDS[manifest["kind"]], manifest, replace):
                self._dependents.refuse_other_contents(manifest)
        jobset, how = self._settle(replace)
        for manifest in self._others:
            try:
                if self._secret is not None and manifest is self._secret.manifest:
                    is_new = how in ("created", "replaced")
                    self._secret.attach(owner(jobset), is_new=is_new, has_removed=self._has_removed)
                else:
                    self._dependents.attach(manifest, jobset, has_removed=self._has_removed)
            except ClusterError as fault:  # what the server let pass a moment ago
                fault.message = f"{fault.message}\n{self.what_exists()}"
                raise
            except UserError as fault:  # another's is in its place: submitting again would not complete the job
                without = f"JobSet {self._name} exists without it; {self._how_to_remove()}"
                if manifest["kind"] in (CONFIGMAPS.kind, SECRETS.kind) and how in ("created", "replaced"):
                    without = self._taken_back(jobset)
                fault.message = f"{fault.message}\n{without}"
                raise
        return Submitted(jobset, how)

    def _try(self, kind: Kind, manifest: Obj, replace: bool) -> bool:
        """Has the server judge an object, and keep none; False when there is one of that name.

        A JobSet whose ConfigMap is refused afterwards would hang: its pods wait for it. A quota that is used up is
        judged before whether the object exists; that what `replace` deletes uses it up is said, and is no refusal.
        """
        try:
            self._cluster.create(kind, manifest, dry_run=True)
        except ApiError as error:
            if error.reason == "AlreadyExists":
                return False
            if not exceeds_quota(error):
                raise
            jobset = self._get()
            if kind is SECRETS:  # which are not read: that of the same job is there
                exists = jobset is not None and self._is_same(jobset)
            else:
                exists = self._cluster.get(kind, manifest["metadata"]["name"], self._namespace) is not None
            if exists:
                return False
            if not replace or jobset is None:
                raise
            self._say(f"{error.message}: the earlier JobSet {self._name} counts too until it is deleted")
        return True

    def rehearse(self, *, replace: bool = False) -> list[str]:
        """What the server would do with every manifest, as `NAME created`; it keeps none."""
        self._dependents.refuse_others_policy()
        self._found()
        lines = []
        for manifest in (self._jobset, *self._others):
            kind, how = KINDS[manifest["kind"]], "created"
            if not self._try(kind, manifest, replace):
                how = self._would(replace) if kind is JOBSETS else "unchanged"
                self._dependents.refuse_other_contents(manifest)
            lines.append(f"{kind.titled(manifest['metadata']['name'])} {how}")
        return lines

    def _would(self, replace: bool) -> str:
        """What would be done about the JobSet that exists. Of one that may take its place, or might with `--replace`,
        the server has judged the name alone."""
        found = self._get()
        if found is None:
            return "created"
        try:
            must_go = self._must_go(found, replace)
        except UserError:
            self._try(JOBSETS, _renamed(self._jobset), True)
            raise
        if must_go:
            self._try(JOBSETS, _renamed(self._jobset), replace)
            return "replaced"
        return "resumed" if stop.is_stopped(self._cluster, found) else "unchanged"

    def what_exists(self) -> str:
        """A sentence for a user who pressed Ctrl-C and waits. Makes one short request."""
        self._cluster.hurry()
        name = f"JobSet {self._name} in namespace {self._namespace}"
        try:
            found = self._get()
        except ClusterError:
            unknown = "may exist: its creation had been sent" if self._is_sent else "was not created"
            return f"{name} {unknown}, and the server does not answer. Submitting again does not create a second one."
        if found is None and self._is_sent:
            sent = "but its creation had been sent: `launcher list` shows whether it exists"
            return f"{name} does not exist now, {sent}. Nothing else was created."
        if found is None:
            return f"{name} was not created, nor was anything else."
        if not self._is_same(found):
            return f"nothing was created; {name} was there before."
        known = [one for one in self._others if one["kind"] != SECRETS.kind]  # which are not read
        missing = [one["metadata"]["name"] for one in known if not self._is_there(one)]
        without = f" without {', '.join(missing)}" if missing else ""
        return f"{name} exists{without}. Submitting again completes it; {self._how_to_remove()}"

    def _how_to_remove(self) -> str:
        return f"`launcher delete -n {self._namespace} {self._name}` removes it."

    def _is_there(self, manifest: Obj) -> bool:
        try:
            return self._cluster.get(KINDS[manifest["kind"]], manifest["metadata"]["name"], self._namespace) is not None
        except ClusterError:
            return False

    # --- the JobSet ---------------------------------------------------------------------------------------------------

    def _get(self) -> Obj | None:
        return self._cluster.get(JOBSETS, self._name, self._namespace)

    def _found(self) -> Obj | None:
        """The JobSet of this name that is there before one is created. None: nor is there a Secret of its gang."""
        if self._secret is None:
            return self._get()
        return self._secret.wait_until_free(self._get, has_removed=self._has_removed)

    def _settle(self, replace: bool) -> tuple[Obj, str]:
        """The JobSet with exactly this spec, and how it came to be."""
        how = "created"
        while True:
            found = self._found()
            if found is None:
                found, is_new = self._create()
                if is_new:
                    return found, how
            if not self._must_go(found, replace):
                break
            how = "replaced"
            self._remove(found)
        if not stop.is_stopped(self._cluster, found):
            return found, "unchanged"
        stop.resume(self._cluster, found)
        return found, "resumed"

    def _must_go(self, found: Obj, replace: bool) -> bool:
        """Whether the JobSet of this name is to be deleted. Raises UserError when it is in the way and may not be."""
        where = f"JobSet {self._name} in namespace {self._namespace}"
        if not is_ours(found):
            message = f"{where} exists and is not managed by launcher{whose(found)}. It was not changed."
            raise UserError(message, "use another name.")
        if "deletionTimestamp" in found["metadata"]:
            if replace:
                return True
            raise UserError(f"{where} is being deleted.", "wait until it is gone, or let --replace wait.")
        if (ended := terminal_state(found)) is not None:
            if replace:
                return True
            raise UserError(f"{where} has already {ended.lower()}{whose(found)}.", "--replace runs it again.")
        if self._is_same(found):
            return False
        if stop.is_stopped(self._cluster, found):
            if replace:
                return True
            raise UserError(
                f"{where} is stopped and differs from this file{whose(found)}.",
                "--replace deletes it and runs this one.",
            )
        hint = f"`launcher stop -n {self._namespace} {self._name}` ends it first, or use another name."
        raise UserError(f"{where} is running and differs from this file{whose(found)}. It was not changed.", hint)

    def _is_same(self, found: Obj) -> bool:
        def sha(one: Obj) -> Any:
            return one["metadata"].get("annotations", {}).get(SPEC_HASH)

        return is_ours(found) and sha(found) == sha(self._jobset)

    def _create(self) -> tuple[Obj, bool]:
        """The JobSet of this name, of which there was none, and whether it is the one that was sent: a response may
        have been lost."""
        end = time.monotonic() + GIVE_UP_S
        was_sent = False
        while True:
            try:
                self._is_sent = True
                return self._cluster.create(JOBSETS, self._jobset), True
            except (ApiError, Unreachable) as error:
                fault = error
            if isinstance(fault, ApiError):
                exists = fault.reason == "AlreadyExists"
                if exceeds_quota(fault):  # judged before whether it exists
                    exists = True
                    if not self._has_removed and self._look(fault) is None:
                        raise self._explained(fault)
                elif not exists and fault.status < 500:
                    raise self._explained(fault)
            else:
                exists = False
                if not fault.sent:
                    raise fault
            found = self._look(fault)
            if found is not None:
                return found, self._is_same(found) and (was_sent or not exists)
            was_sent = was_sent or not exists
            if time.monotonic() + _pause(fault) > end:
                raise self._explained(fault)
            time.sleep(_pause(fault))

    def _look(self, fault: ClusterError) -> Obj | None:
        """The JobSet, if it was created after all. Raises ClusterError when the server does not answer."""
        try:
            return self._get()
        except Unreachable:
            message = f"{fault.message}\nWhether JobSet {self._name} was created is unknown."
            raise ClusterError(message, "submit again: that does not create a second one.") from None

    def _explained(self, fault: ApiError | Unreachable) -> ClusterError:
        """The fault, with what to do about it where the server's own message does not say."""
        if "failed calling webhook" in fault.message:
            fault.hint = "is the controller that serves the webhook running? `launcher doctor` checks."
        elif "unknown field" in fault.message:
            fault.hint = "the cluster's JobSet is older than 0.10.1, or `pod:` holds a field that it does not know."
        return fault

    def _remove(self, found: Obj) -> None:
        """Deletes the JobSet, and waits for the end of all that it owns."""
        uid = found["metadata"]["uid"]
        self._say(f"deleting the earlier JobSet {self._name}")
        self._has_removed = True
        self._cluster.delete(JOBSETS, self._name, self._namespace, uid=uid, propagation="Foreground")
        if not gone(self._cluster, JOBSETS, found, GONE_S):
            message = f"JobSet {self._name} is still being deleted after {GONE_S:.0f} s."
            hint = f"`launcher explain -n {self._namespace} {self._name}` shows what blocks it."
            raise ClusterError(message, hint)

    def _taken_back(self, jobset: Obj) -> str:
        """Deletes the JobSet that was just made, whose pods would use what another put there; says what was done."""
        uid = jobset["metadata"]["uid"]
        try:
            self._cluster.delete(JOBSETS, self._name, self._namespace, uid=uid, propagation="Foreground")
        except ClusterError as fault:
            return f"JobSet {self._name} exists and its pods use that: delete it now. {fault.message}"
        return f"JobSet {self._name} was deleted again: its pods would have used that."


def _renamed(manifest: Obj) -> Obj:
    """The same object under a name that no other has, about as long: a JobSet's name is in others."""
    name = manifest["metadata"]["name"]
    fresh = f"x{uuid.uuid4().hex}"[: max(8, len(name))]
    return {**manifest, "metadata": {**manifest["metadata"], "name": fresh}}


def _pause(fault: ApiError | Unreachable) -> float:
    """Seconds until the next try."""
    asked = fault.retry_after_s if isinstance(fault, ApiError) else None
    return PAUSE_S if asked is None else asked
