"""Writes on the job's JobSet how far it is; only the pods of a job with a service account have a token for that."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from jaxlaunch.contract import ANNOTATION
from jaxlaunch.records.progress_annotation import Recorded

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # where Kubernetes mounts it
_PATH = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/{}/jobsets/{}?fieldManager=jaxlaunch-agent"
_TIMEOUT_S = 10.0


def has_token(account: Path = ACCOUNT) -> bool:
    """Whether this pod may talk to the API server at all."""
    return (account / "token").is_file()


class JobSet:
    """The JobSet of that name in the pod's namespace."""

    def __init__(
        self,
        name: str,
        say: Callable[[str], None],
        account: Path = ACCOUNT,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._name, self._say, self._account, self._environ = name, say, account, environ
        self._has_failed = False
        self._is_refused = False

    def annotate(self, known: Recorded) -> None:
        """Replaces the annotation; a server that cannot be reached is tried again next time. Says the first failure."""
        if self._is_refused:
            return
        patch = {"metadata": {"uid": known.uid, "annotations": {ANNOTATION: known.to_json()}}}
        try:
            code, answer = self._patch(json.dumps(patch).encode())
        except (OSError, http.client.HTTPException, ValueError) as error:
            return self._failed(str(error) or type(error).__name__)
        self._is_refused = 400 <= code < 500 and code != 429
        if code >= 300:
            self._failed(f"HTTP {code}: {answer}")

    def _patch(self, body: bytes) -> tuple[int, str]:
        """The status, and the begin of the answer's message."""
        import ssl  # 20 ms, which most jobs need not wait for

        context = ssl.create_default_context(cafile=str(self._account / "ca.crt"))
        host, port = self._environ["KUBERNETES_SERVICE_HOST"], int(self._environ["KUBERNETES_SERVICE_PORT"])
        connection = http.client.HTTPSConnection(host, port, timeout=_TIMEOUT_S, context=context)
        path = _PATH.format((self._account / "namespace").read_text().strip(), self._name)
        token = (self._account / "token").read_text().strip()  # it is replaced about once an hour
        kind = {"Content-Type": "application/merge-patch+json", "Authorization": f"Bearer {token}"}
        try:
            connection.request("PATCH", path, body, kind)
            answer = connection.getresponse()
            return answer.status, answer.read(300).decode(errors="replace")
        finally:
            connection.close()

    def _failed(self, why: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._say(f"how far the job is cannot be written on its JobSet (patch jobsets {self._name}): {why}")
