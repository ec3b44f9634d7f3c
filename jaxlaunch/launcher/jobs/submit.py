"""Submission of a job to a cluster. It is idempotent: submitting again creates no second JobSet.

All objects but the JobSet are first sent as dry runs. Then the JobSet is created, and after it the
other objects: they refer to its uid as their owner, so that Kubernetes deletes them with it. If the
response to a write is lost, a GET shows whether the write has happened. The Secret of a gang is
never read, so that users do not need the permission. A dry run shows whether it exists.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxlaunch.launcher.errors import ClusterError, UserError, exceeds_quota
from jaxlaunch.launcher.jobs import lifecycle
from jaxlaunch.launcher.jobs.dependents import (
    RETRY_PAUSE_S,
    RETRY_TIMEOUT_S,
    Dependents,
    add_owner,
    delete_jobset,
    describe_creator,
    owner_reference,
    wait_until_gone,
)
from jaxlaunch.launcher.jobs.status.hosts import is_ours
from jaxlaunch.launcher.kubernetes.client import ApiError, Cluster, UnreachableError
from jaxlaunch.launcher.kubernetes.kinds import CONFIGMAPS, JOBSETS, SECRETS, Kind, manifest_kind
from jaxlaunch.launcher.kubernetes.labels import SPEC_HASH, SUBMITTED_WORDS
from jaxlaunch.launcher.kubernetes.objects import terminal_state

# Limit for the deletion of a JobSet.
DELETE_TIMEOUT_S = 300.0
# Limit for the deletion of an earlier gang's Secret, and for the creation of the new one.
SECRET_TIMEOUT_S = 30.0
# A wait for the deletion of a Secret is reported to the user if it is longer than this.
_QUIET_WAIT_S = 2.0
# The arguments of a submission are not recorded if their JSON is longer.
_MAX_WORDS_BYTES = 4_000

Obj = dict[str, Any]
Say = Callable[[str], None]


class SubmitResult(NamedTuple):
    """The JobSet in the cluster, and the effect of the submission."""

    jobset: Mapping[str, Any]
    # One of created, replaced, resumed or unchanged.
    outcome: str


def record_words(
    jobset: Obj, job_file: Path, overrides: Sequence[str], defaults_file: Path | None
) -> None:
    """Record the arguments of the submission on the JobSet, for the commands in `explain`."""
    option_words = [] if defaults_file is None else ["--defaults", str(defaults_file)]
    changes = [change for change in overrides if not change.startswith("namespace=")]
    text = json.dumps([str(job_file), *changes, *option_words])
    if len(text) <= _MAX_WORDS_BYTES:
        jobset["metadata"]["annotations"][SUBMITTED_WORDS] = text


class Submission:
    """Idempotent submission of one job to one namespace."""

    def __init__(self, cluster: Cluster, manifests: Sequence[Obj], say: Say) -> None:
        self._cluster, self._say = cluster, say
        self._jobset, *self._others = manifests
        self._name = str(self._jobset["metadata"]["name"])
        self._namespace = str(self._jobset["metadata"]["namespace"])
        secrets = [manifest for manifest in self._others if manifest["kind"] == SECRETS.kind]
        self._secret = GangSecret(cluster, secrets[0], self._name, say) if secrets else None
        self._dependents = Dependents(cluster, self._others, self._namespace)
        self._was_sent = False
        # Whether an earlier JobSet was deleted. The server releases its quota a moment later.
        self._has_deleted_earlier = False

    def submit(self, *, replace: bool = False) -> SubmitResult:
        """Create the job, or complete and return the existing one.

        Raises:
            UserError: If another object has the name.
            ClusterError: If the cluster rejects a request or does not answer.
        """
        self._dependents.check_network_policy()
        for manifest in self._others:
            if not self._would_create(manifest_kind(manifest), manifest, replace):
                self._dependents.check_existing(manifest)
        jobset, outcome = self._ensure_jobset(replace)
        is_new = outcome in ("created", "replaced")
        has_deleted_earlier = self._has_deleted_earlier
        for manifest in self._others:
            try:
                if self._secret is not None and manifest is self._secret.manifest:
                    self._secret.create_owned(
                        jobset, is_new=is_new, has_deleted_earlier=has_deleted_earlier
                    )
                else:
                    self._dependents.create_owned(
                        manifest, jobset, has_deleted_earlier=has_deleted_earlier
                    )
            except ClusterError as error:
                # The dry run of the object has succeeded, so the job may work after another submit.
                error.message = f"{error.message}\n{self.describe_existing()}"
                raise
            except UserError as error:
                # Another object has the name, so submitting again would not complete the job.
                consequence = f"JobSet {self._name} exists without it; {self._removal_hint}"
                if manifest["kind"] in (CONFIGMAPS.kind, SECRETS.kind) and is_new:
                    consequence = self._delete_created(jobset)
                error.message = f"{error.message}\n{consequence}"
                raise
        return SubmitResult(jobset, outcome)

    def find_jobset(self) -> Obj | None:
        """Return the JobSet, or None if it does not exist or has another spec."""
        existing = self._get_jobset()
        return existing if existing is not None and self._has_same_spec(existing) else None

    def _would_create(self, kind: Kind, manifest: Obj, replace: bool) -> bool:
        """Send an object as a dry run. Return False if an object of that name exists.

        All objects are checked before the JobSet is created, because its pods would wait forever
        for a ConfigMap that is rejected afterwards. The server checks the quota before it checks
        whether the object exists, so an exceeded quota does not mean that it does not. The JobSet
        that `replace` deletes uses quota too, so that an exceeded quota is then only reported.
        """
        try:
            self._cluster.create(kind, manifest, dry_run=True)
        except ApiError as error:
            if error.reason == "AlreadyExists":
                return False
            if not exceeds_quota(error):
                raise
            jobset = self._get_jobset()
            if kind is SECRETS:
                # A Secret is not read. It exists if its job does.
                exists = jobset is not None and self._has_same_spec(jobset)
            else:
                name = manifest["metadata"]["name"]
                exists = self._cluster.get(kind, name, self._namespace) is not None
            if exists:
                return False
            if not replace or jobset is None:
                raise
            note = f"the earlier JobSet {self._name} counts too until it is deleted"
            self._say(f"{error.message}: {note}")
        return True

    def dry_run(self, *, replace: bool = False) -> list[str]:
        """Return what the server would do with each manifest, as `KIND/NAME created`.

        Nothing is written: objects are sent as dry runs.
        """
        self._dependents.check_network_policy()
        self._find_before_creation()
        lines = []
        for manifest in (self._jobset, *self._others):
            kind, outcome = manifest_kind(manifest), "created"
            if not self._would_create(kind, manifest, replace):
                outcome = self._outcome_for_existing(replace) if kind is JOBSETS else "unchanged"
                self._dependents.check_existing(manifest)
            lines.append(f"{kind.qualified_name(manifest['metadata']['name'])} {outcome}")
        return lines

    def _outcome_for_existing(self, replace: bool) -> str:
        """Return the outcome of a submission for the existing JobSet, with dry runs.

        A dry run under an existing name fails before the server checks the object. A JobSet that
        would replace the existing one is therefore sent under an unused name. The name has about
        the same length, because the names of Jobs and pods contain it.
        """
        existing = self._get_jobset()
        if existing is None:
            return "created"
        fresh_name = f"x{uuid.uuid4().hex}"[: max(8, len(self._name))]
        renamed = {**self._jobset, "metadata": {**self._jobset["metadata"], "name": fresh_name}}
        try:
            must_replace = self._must_replace(existing, replace)
        except UserError:
            self._would_create(JOBSETS, renamed, True)
            raise
        if must_replace:
            self._would_create(JOBSETS, renamed, replace)
            return "replaced"
        return "resumed" if lifecycle.is_stopped(self._cluster, existing) else "unchanged"

    def describe_existing(self) -> str:
        """Return what exists of the job, for a user who pressed Ctrl-C. Requests are kept short."""
        self._cluster.limit_call_time()
        name = f"JobSet {self._name} in namespace {self._namespace}"
        try:
            existing = self._get_jobset()
        except ClusterError:
            creation_note = (
                "may exist: its creation had been sent" if self._was_sent else "was not created"
            )
            again = "Submitting again does not create a second one."
            return f"{name} {creation_note}, and the server does not answer. {again}"
        if existing is None and self._was_sent:
            creation_note = (
                "but its creation had been sent: `launcher list` shows whether it exists"
            )
            return f"{name} does not exist now, {creation_note}. Nothing else was created."
        if existing is None:
            return f"{name} was not created, nor was anything else."
        if not self._has_same_spec(existing):
            return f"nothing was created; {name} was there before."
        missing_names = []
        for manifest in self._others:
            kind, other_name = manifest_kind(manifest), manifest["metadata"]["name"]
            # A Secret is not read.
            if kind is not SECRETS:
                try:
                    is_there = self._cluster.get(kind, other_name, self._namespace) is not None
                except ClusterError:
                    is_there = False
                missing_names += [] if is_there else [other_name]
        missing_note = f" without {', '.join(missing_names)}" if missing_names else ""
        return f"{name} exists{missing_note}. Submitting again completes it; {self._removal_hint}"

    @property
    def _removal_hint(self) -> str:
        return f"`launcher delete -n {self._namespace} {self._name}` removes it."

    # --- the JobSet -------------------------------------------------------------------------------

    def _get_jobset(self) -> Obj | None:
        return self._cluster.get(JOBSETS, self._name, self._namespace)

    def _find_before_creation(self) -> Obj | None:
        """Return the JobSet, or None if neither it nor a Secret of its gang exists."""
        if self._secret is None:
            return self._get_jobset()
        return self._secret.wait_until_free(
            self._get_jobset, has_deleted_earlier=self._has_deleted_earlier
        )

    def _ensure_jobset(self, replace: bool) -> tuple[Obj, str]:
        """Create, replace, resume or keep the JobSet. Return it and the outcome."""
        outcome = "created"
        while True:
            jobset = self._find_before_creation()
            if jobset is None:
                jobset, is_new = self._create_jobset()
                if is_new:
                    return jobset, outcome
            if not self._must_replace(jobset, replace):
                break
            outcome = "replaced"
            self._delete_jobset(jobset)
        if not lifecycle.is_stopped(self._cluster, jobset):
            return jobset, "unchanged"
        lifecycle.resume_job(self._cluster, jobset)
        return jobset, "resumed"

    def _must_replace(self, existing: Obj, replace: bool) -> bool:
        """Return whether the existing JobSet must be deleted first.

        Raises UserError if it must be, and `replace` is False or the JobSet is in use.
        """
        location = f"JobSet {self._name} in namespace {self._namespace}"
        creator = describe_creator(existing)
        if not is_ours(existing):
            message = f"{location} exists and is not managed by launcher{creator}."
            raise UserError(f"{message} It was not changed.", "use another name.")
        if "deletionTimestamp" in existing["metadata"]:
            message = f"{location} is being deleted."
            hint = "wait until it is gone, or let --replace wait."
        elif (final_state := terminal_state(existing)) is not None:
            message = f"{location} has already {final_state.lower()}{creator}."
            hint = "--replace runs it again."
        elif self._has_same_spec(existing):
            return False
        elif lifecycle.is_stopped(self._cluster, existing):
            message = f"{location} is stopped and differs from this file{creator}."
            hint = "--replace deletes it and runs this one."
        else:
            message = f"{location} is running and differs from this file{creator}."
            command = f"`launcher stop -n {self._namespace} {self._name}`"
            hint = f"{command} ends it first, or use another name."
            raise UserError(f"{message} It was not changed.", hint)
        if replace:
            return True
        raise UserError(message, hint)

    def _has_same_spec(self, existing: Obj) -> bool:
        jobsets = existing, self._jobset
        digests = {jobset["metadata"].get("annotations", {}).get(SPEC_HASH) for jobset in jobsets}
        return is_ours(existing) and len(digests) == 1

    def _create_jobset(self) -> tuple[Obj, bool]:
        """Create the JobSet. Return the JobSet of that name, and whether this call created it.

        After an error the JobSet is read back, because the response may have been lost. If it is
        there with the same spec, it counts as created by this call unless it existed before.
        """
        deadline = time.monotonic() + RETRY_TIMEOUT_S
        was_sent = False
        while True:
            try:
                self._was_sent = True
                return self._cluster.create(JOBSETS, self._jobset), True
            except (ApiError, UnreachableError) as error:
                failure = error
            pause_s = RETRY_PAUSE_S
            if isinstance(failure, ApiError):
                pause_s = RETRY_PAUSE_S if failure.retry_after_s is None else failure.retry_after_s
                exists = failure.reason == "AlreadyExists"
                # The server checks the quota before it checks whether the object exists.
                if exceeds_quota(failure):
                    exists = True
                    if not self._has_deleted_earlier and self._get_after_error(failure) is None:
                        raise _add_hint(failure)
                elif not exists and failure.status < 500:
                    raise _add_hint(failure)
            else:
                exists = False
                if not failure.was_sent:
                    raise failure
            existing = self._get_after_error(failure)
            if existing is not None:
                return existing, self._has_same_spec(existing) and (was_sent or not exists)
            was_sent = was_sent or not exists
            if time.monotonic() + pause_s > deadline:
                raise _add_hint(failure)
            time.sleep(pause_s)

    def _get_after_error(self, error: ClusterError) -> Obj | None:
        """Return the JobSet if it exists despite the error. Raises ClusterError if unreachable."""
        try:
            return self._get_jobset()
        except UnreachableError:
            message = f"{error.message}\nWhether JobSet {self._name} was created is unknown."
            hint = "submit again: that does not create a second one."
            raise ClusterError(message, hint) from None

    def _delete_jobset(self, existing: Obj) -> None:
        """Delete the JobSet, and wait until all objects that it owns are gone."""
        self._say(f"deleting the earlier JobSet {self._name}")
        self._has_deleted_earlier = True
        delete_jobset(self._cluster, existing)
        if not wait_until_gone(self._cluster, JOBSETS, existing, DELETE_TIMEOUT_S):
            message = f"JobSet {self._name} is still being deleted after {DELETE_TIMEOUT_S:.0f} s."
            hint = f"`launcher explain -n {self._namespace} {self._name}` shows what blocks it."
            raise ClusterError(message, hint)

    def _delete_created(self, jobset: Obj) -> str:
        """Delete a new JobSet whose pods would use somebody else's object. Return a message."""
        try:
            delete_jobset(self._cluster, jobset)
        except ClusterError as error:
            exists = f"JobSet {self._name} exists and its pods use that: delete it now."
            return f"{exists} {error.message}"
        return f"JobSet {self._name} was deleted again: its pods would have used that."


def _add_hint(error: ApiError | UnreachableError) -> ClusterError:
    """Add a hint to an error if the server's own message has none, and return the error."""
    if "failed calling webhook" in error.message:
        error.hint = "is the controller that serves the webhook running? `launcher doctor` checks."
    elif "unknown field" in error.message:
        problem = "the cluster's JobSet is older than 0.10.1"
        error.hint = f"{problem}, or `pod:` holds a field that it does not know."
    return error


class GangSecret:
    """The Secret of one job's gang, which its JobSet owns."""

    def __init__(self, cluster: Cluster, manifest: Obj, job: str, say: Say) -> None:
        self.manifest = manifest
        self._cluster, self._job, self._say = cluster, job, say
        self._name = manifest["metadata"]["name"]
        self._namespace = manifest["metadata"]["namespace"]

    def wait_until_free(
        self, get_jobset: Callable[[], Obj | None], *, has_deleted_earlier: bool
    ) -> Obj | None:
        """Return the existing JobSet, or wait until no Secret of this name exists and return None.

        If a Secret exists without a JobSet, others may know its contents, or it is the Secret of an
        earlier gang, which Kubernetes deletes seconds after its JobSet. In both cases the pods of a
        new gang must not start with it.

        Args:
            get_jobset: Returns the existing JobSet.
            has_deleted_earlier: Whether an earlier JobSet was deleted. The server releases its
                quota a moment later.

        Raises:
            UserError: If the Secret is not deleted in time.
        """
        started_at, was_reported = time.monotonic(), False
        while (jobset := get_jobset()) is None:
            try:
                self._cluster.create(SECRETS, self.manifest, dry_run=True)
                return None
            except ApiError as error:
                if error.reason != "AlreadyExists" and not (
                    has_deleted_earlier and exceeds_quota(error)
                ):
                    raise
                failure = error
            waited_s = time.monotonic() - started_at
            if waited_s > SECRET_TIMEOUT_S:
                raise failure if exceeds_quota(failure) else self._existing_secret_error()
            if waited_s > _QUIET_WAIT_S and not was_reported:
                was_reported, orphan = True, f"it is there without JobSet {self._job}"
                self._say(f"waiting for Secret {self._name} to go: {orphan}")
            time.sleep(RETRY_PAUSE_S)
        return jobset

    def create_owned(self, jobset: Obj, *, is_new: bool, has_deleted_earlier: bool) -> None:
        """Create the Secret with the JobSet as its owner.

        If the JobSet is not new, its Secret may exist, and its quota may be used. The server checks
        the quota first.

        Args:
            jobset: The JobSet, as the cluster has it.
            is_new: Whether this submission created the JobSet.
            has_deleted_earlier: Whether an earlier JobSet was deleted. The server releases its
                quota a moment later.

        Raises:
            UserError: If somebody else has created the Secret of a new JobSet.
        """
        owned = add_owner(self.manifest, owner_reference(jobset))
        deadline = time.monotonic() + SECRET_TIMEOUT_S
        was_sent = False
        while True:
            try:
                self._cluster.create(SECRETS, owned)
                return
            except (ApiError, UnreachableError) as error:
                failure = error
            exists = isinstance(failure, ApiError) and failure.reason == "AlreadyExists"
            if exists and is_new and not was_sent:
                raise self._existing_secret_error()
            if exists or (exceeds_quota(failure) and not is_new):
                return
            is_unreachable = isinstance(failure, UnreachableError)
            # The Secret may have been created despite the error.
            is_unknown = (
                failure.was_sent if isinstance(failure, UnreachableError) else failure.status >= 500
            )
            is_transient = (
                is_unknown or is_unreachable or (exceeds_quota(failure) and has_deleted_earlier)
            )
            if not is_transient or time.monotonic() > deadline:
                raise failure
            was_sent = was_sent or is_unknown
            time.sleep(RETRY_PAUSE_S)

    def _existing_secret_error(self) -> UserError:
        location = f"Secret {self._name} in namespace {self._namespace}"
        problem = f"{location} existed before JobSet {self._job}"
        command = f"`kubectl -n {self._namespace} delete secret {self._name}`"
        return UserError(
            f"{problem}, so others may know what it holds. It was not changed.",
            f"{command}, then submit again.",
        )
