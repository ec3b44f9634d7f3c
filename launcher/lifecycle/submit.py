"""A job's manifests onto a cluster: at most three writes, and one JobSet however often it is submitted.

The JobSet goes first, for the others are owned by its uid and go when it goes. Whether a write whose answer was lost
has happened is decided by looking.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from launcher import stop
from launcher.cluster import ApiError, Cluster, Unreachable
from launcher.errors import ClusterError, UserError
from launcher.jobset import SPEC_HASH
from launcher.kinds import CONFIGMAPS, JOBSETS, NETWORK_POLICIES, Kind
from launcher.precheck import KINDS
from launcher.stop import has_finished, is_ours, whose

GIVE_UP_S = 30.0  # on a server that fails at what it is asked
GONE_S = 300.0  # for a JobSet that is deleted to be gone
_PAUSE_S = 0.5
_LOOK_AGAIN_S = 10.0  # a watch that had to begin anew does not tell of what went meanwhile

Obj = dict[str, Any]
Say = Callable[[str], None]


class Submitted(NamedTuple):
    """The JobSet as the cluster has it, and what became of it."""

    jobset: Mapping[str, Any]
    how: str  # created, replaced, resumed or unchanged


class Submission:
    """One job on its way to one namespace. Interrupted it can say what exists; run again it makes no second."""

    def __init__(self, cluster: Cluster, manifests: Sequence[Obj], say: Say) -> None:
        self._cluster, self._say = cluster, say
        self._jobset, *self._others = manifests
        self._name = str(self._jobset["metadata"]["name"])
        self._namespace = str(self._jobset["metadata"]["namespace"])
        self._is_sent = False

    def run(self, *, replace: bool = False) -> Submitted:
        """Creates the job, or finds it there, whole.

        Raises UserError for a name that is taken, ClusterError when the cluster refuses or stays silent.
        """
        self._refuse_others_policy()
        jobset, how = self._settle(replace)
        for manifest in self._others:
            self._attach(manifest, jobset)
        return Submitted(jobset, how)

    def rehearse(self, *, replace: bool = False) -> list[str]:
        """What the server says to every manifest, while it keeps none: `NAME created` for each."""
        self._refuse_others_policy()
        lines = []
        for manifest in (self._jobset, *self._others):
            kind, how = KINDS[manifest["kind"]], "created"
            try:
                self._cluster.create(kind, manifest, dry_run=True)
            except ApiError as error:
                if error.reason != "AlreadyExists":
                    raise
                how = self._found(replace) if kind is JOBSETS else "unchanged"
            lines.append(f"{kind.titled(manifest['metadata']['name'])} {how}")
        return lines

    def _found(self, replace: bool) -> str:
        """What would become of the JobSet that is there."""
        found = self._cluster.get(JOBSETS, self._name, self._namespace)
        if found is None:
            return "created"
        if self._must_go(found, replace):
            return "replaced"
        return "resumed" if stop.is_stopped(self._cluster, found) else "unchanged"

    def what_exists(self) -> str:
        """For somebody who interrupted, and waits: a sentence. Asks the server once, and not for long."""
        self._cluster.hurry()
        name = f"JobSet {self._name} in namespace {self._namespace}"
        try:
            found = self._cluster.get(JOBSETS, self._name, self._namespace)
        except ClusterError:
            unknown = "may exist: it had been sent" if self._is_sent else "was not created"
            return f"{name} {unknown}, and the server does not answer. Submitting again makes no second one."
        if found is None and self._is_sent:
            return f"{name} does not exist now, but had been sent: `launcher list` tells. Nothing else was created."
        if found is None:
            return f"{name} was not created, nor was anything else."
        if not self._is_same(found):
            return f"nothing was created; {name} was there before."
        missing = [one["metadata"]["name"] for one in self._others if not self._is_there(one)]
        without = f" without {', '.join(missing)}" if missing else ""
        return f"{name} exists{without}. Submitting again completes it; `launcher delete {self._name}` removes it."

    def _is_there(self, manifest: Obj) -> bool:
        try:
            return self._cluster.get(KINDS[manifest["kind"]], manifest["metadata"]["name"], self._namespace) is not None
        except ClusterError:
            return False

    # --- the JobSet ---------------------------------------------------------------------------------------------------

    def _settle(self, replace: bool) -> tuple[Obj, str]:
        """The JobSet, ours and this very one."""
        how = "created"
        while True:
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
        """Whether the JobSet of this name makes room. Raises UserError when it stays in the way."""
        where = f"JobSet {self._name} in namespace {self._namespace}"
        if not is_ours(found):
            raise UserError(f"{where} exists and is not ours{whose(found)}. It was not changed.", "use another name.")
        if "deletionTimestamp" in found["metadata"]:
            if replace:
                return True
            raise UserError(f"{where} is being deleted.", "wait for its end, or have it waited for: --replace.")
        if (ended := has_finished(found)) is not None:
            if replace:
                return True
            raise UserError(f"{where} has {ended} already{whose(found)}.", "--replace runs it again.")
        if self._is_same(found):
            return False
        if stop.is_stopped(self._cluster, found):
            if replace:
                return True
            raise UserError(f"{where} is stopped, and another job than this file's{whose(found)}.", "--replace it.")
        hint = f"`launcher stop {self._name}` ends it first, or use another name."
        raise UserError(f"{where} runs, and is another job than this file's{whose(found)}. It was not changed.", hint)

    def _is_same(self, found: Obj) -> bool:
        def sha(one: Obj) -> Any:
            return one["metadata"].get("annotations", {}).get(SPEC_HASH)

        return is_ours(found) and sha(found) == sha(self._jobset)

    def _create(self) -> tuple[Obj, bool]:
        """The JobSet of this name, and whether it is the one that was sent: an answer may have been lost."""
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
                if not exists and fault.status < 500:
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
        """Whether it was created after all. A server that does not say leaves it open."""
        try:
            return self._cluster.get(JOBSETS, self._name, self._namespace)
        except Unreachable:
            message = f"{fault.message}\nWhether JobSet {self._name} was created is not known."
            raise ClusterError(message, "submit again: it makes no second one.") from None

    def _explained(self, fault: ApiError | Unreachable) -> ClusterError:
        """The fault, with what to do where the server's own words do not say it."""
        if "failed calling webhook" in fault.message:
            fault.hint = "is the controller up that the webhook belongs to? `launcher doctor` asks."
        elif "unknown field" in fault.message:
            fault.hint = "the cluster's JobSet is older than 0.10, or `pod:` holds a field that it does not know."
        return fault

    def _remove(self, found: Obj) -> None:
        """Deletes the JobSet, and waits for the end of all that it owns."""
        uid = found["metadata"]["uid"]
        self._say(f"deleting the earlier JobSet {self._name}")
        self._cluster.delete(JOBSETS, self._name, self._namespace, uid=uid, propagation="Foreground")
        if not gone(self._cluster, JOBSETS, found, GONE_S):
            message = f"JobSet {self._name} is still being deleted after {GONE_S:.0f} s."
            raise ClusterError(message, "`launcher explain` says what holds it.")

    # --- what it owns -------------------------------------------------------------------------------------------------

    def _attach(self, manifest: Obj, jobset: Obj) -> None:
        """Creates it, unless it is there and this JobSet owns it. What jobs share gets one owner more; what an earlier
        JobSet left behind goes first."""
        kind, mine = KINDS[manifest["kind"]], owner(jobset)
        owned = manifest | {"metadata": manifest["metadata"] | {"ownerReferences": [mine]}}
        end = time.monotonic() + GIVE_UP_S
        while True:
            try:
                self._cluster.create(kind, owned)
                return
            except (ApiError, Unreachable) as fault:
                if isinstance(fault, ApiError) and fault.reason != "AlreadyExists" and fault.status < 500:
                    raise
                if time.monotonic() > end:
                    raise
            found = self._cluster.get(kind, manifest["metadata"]["name"], self._namespace)
            if found is None:
                time.sleep(_PAUSE_S)
            elif any(one["uid"] == mine["uid"] for one in found["metadata"].get("ownerReferences") or ()):
                return
            elif kind is CONFIGMAPS:
                self._join(found, mine)
            elif is_ours(found):
                self._cluster.delete(kind, found["metadata"]["name"], self._namespace, uid=found["metadata"]["uid"])
            else:
                raise self._not_ours(found)

    def _join(self, shared: Obj, mine: Obj) -> None:
        """Adds an owner to what jobs of the same contents share. The caller looks whether it is there.

        The reference alone is applied, so that its manager goes with it: a manager of anything else would stay listed,
        and thousands of jobs would in time fill the object. The uid keeps one that goes this moment from coming back
        empty.
        """
        known = {name: shared["metadata"][name] for name in ("name", "namespace", "uid")}
        reference = {"metadata": known | {"ownerReferences": [mine]}}
        named = {"apiVersion": CONFIGMAPS.api_version, "kind": CONFIGMAPS.kind}
        try:
            self._cluster.apply(CONFIGMAPS, named | reference, f"jaxlaunch-{mine['uid']}")
        except ApiError as fault:
            if fault.status < 500 and fault.reason != "Conflict":
                raise
        except Unreachable as fault:
            if not fault.sent:
                raise

    def _refuse_others_policy(self) -> None:
        """Before anything is written: a NetworkPolicy of this name that is somebody else's is never changed."""
        for manifest in self._others:
            if manifest["kind"] == NETWORK_POLICIES.kind:
                found = self._cluster.get(NETWORK_POLICIES, manifest["metadata"]["name"], self._namespace)
                if found is not None and not is_ours(found):
                    raise self._not_ours(found)

    def _not_ours(self, found: Obj) -> UserError:
        where = f"NetworkPolicy {found['metadata']['name']} in namespace {self._namespace}"
        hint = "use another name, or network_policy: false."
        return UserError(f"{where} exists and is not ours{whose(found)}. It was not changed.", hint)


def _pause(fault: ApiError | Unreachable) -> float:
    """Until it is worth asking again."""
    asked = fault.retry_after_s if isinstance(fault, ApiError) else None
    return _PAUSE_S if asked is None else asked


def owner(jobset: Obj) -> Obj:
    """The reference by which an object goes when its JobSet goes."""
    metadata = jobset["metadata"]
    return {"apiVersion": JOBSETS.api_version, "kind": JOBSETS.kind, "name": metadata["name"], "uid": metadata["uid"]}


def gone(cluster: Cluster, kind: Kind, obj: Obj, limit_s: float) -> bool:
    """Waits until an object that is being deleted is no more; False when it takes longer."""
    metadata = obj["metadata"]
    name, namespace = metadata["name"], metadata["namespace"]
    end = time.monotonic() + limit_s
    found = cluster.get(kind, name, namespace)
    while found is not None and found["metadata"]["uid"] == metadata["uid"]:
        if time.monotonic() > end:
            return False
        since, fields = found["metadata"]["resourceVersion"], f"metadata.name={name}"
        slice_s = max(0.0, min(_LOOK_AGAIN_S, end - time.monotonic()))
        for event, _ in cluster.watch(kind, namespace, fields=fields, since=since, limit_s=slice_s):
            if event == "DELETED":
                break
        found = cluster.get(kind, name, namespace)
    return True
