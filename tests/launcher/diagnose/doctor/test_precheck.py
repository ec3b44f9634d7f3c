"""What keeps a job from being submitted, and what is only noted."""

from __future__ import annotations

from typing import Any, cast

import pytest

from jaxlaunch.launcher.diagnose import text
from jaxlaunch.launcher.diagnose.doctor import checks
from jaxlaunch.launcher.errors import ApiError, ClusterError, UserError
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.kinds import NAMESPACES, Kind
from tests.launcher.diagnose.words import replace_words
from tests.launcher.objects import jobset


class FakeCluster:
    """A cluster with JobSet and one namespace."""

    context = "kind"

    def __init__(self, *, may: bool = True, enforced: str = "privileged") -> None:
        self._may = may
        self._labels = {"pod-security.kubernetes.io/enforce": enforced}

    def served_versions(self, group: str) -> list[str]:
        return ["v1alpha2", "v1beta1"]

    def get(self, kind: Kind, name: str, namespace: str | None = None) -> dict[str, Any] | None:
        if kind is NAMESPACES:
            return {"metadata": {"name": name, "labels": self._labels}}
        raise ApiError("no", None, 403)

    def list(self, kind: Kind, namespace: str | None = None) -> list[dict[str, Any]]:
        return []

    def is_allowed(self, *_: object, **__: object) -> bool:
        return self._may


def check_job(cluster: FakeCluster, *, force: bool = False) -> list[str]:
    job = jobset(1, network="hostnetwork", priority="high")
    return checks.check_submission(
        cast(Cluster, cluster), [job], replace=False, watch=False, force=force
    )


def test_unknown_or_temporary_problems_are_only_notes() -> None:
    assert check_job(FakeCluster())[0] == (
        "whether PriorityClass high exists is not known: you have no permission to read it."
    )


def test_missing_rights_and_strict_namespace_are_errors_unless_forced() -> None:
    with pytest.raises(
        ClusterError, match=r"^Missing RBAC permissions in namespace team: create jobsets\S*, get "
    ):
        check_job(FakeCluster(may=False))
    with pytest.raises(
        UserError, match="Namespace team enforces Pod Security level restricted"
    ) as raised:
        check_job(FakeCluster(enforced="restricted"))
    assert not isinstance(raised.value, ClusterError) and (raised.value.hint or "").endswith(
        " --force submits it."
    )
    assert any(
        "enforces Pod Security" in note
        for note in check_job(FakeCluster(enforced="restricted"), force=True)
    )


def test_responsibility_does_not_depend_on_wording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "localize", replace_words)
    with pytest.raises(ClusterError):
        check_job(FakeCluster(may=False, enforced="restricted"))
    with pytest.raises(UserError) as raised:
        check_job(FakeCluster(enforced="restricted"))
    assert raised.value.exit_code == 2 and len(check_job(FakeCluster())) == len(
        check_job(FakeCluster(), force=True)
    )
