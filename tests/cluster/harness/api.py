"""The API server as the harness and the tests' own preparations speak to it: plain dicts over HTTPS.

Not the code under test, and quicker than a kubectl for every call. Reads the kubeconfigs of this
harness and of kind: one cluster, certificates or a token inside.
"""

import base64
import http.client
import json
import ssl
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import yaml

MERGE = "application/merge-patch+json"


class Refused(RuntimeError):
    """The server said no; `status` is its number, the text its own."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status


class Call(NamedTuple):
    method: str
    path: str
    body: object = None
    content: str = "application/json"


class Api:
    def __init__(self, kubeconfig: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        context = by_name(config, "contexts", config["current-context"])["context"]
        cluster = by_name(config, "clusters", context["cluster"])["cluster"]
        user = by_name(config, "users", context["user"])["user"]
        self.server = urlsplit(cluster["server"])
        self.tls = tls(cluster, user)
        self.own = {"Authorization": f"Bearer {user['token']}"} if "token" in user else {}
        if "as" in user:
            self.own["Impersonate-User"] = user["as"]

    def call(
        self, method: str, path: str, body: object = None, content: str = "application/json"
    ) -> Any:
        """The answer, parsed where it is JSON. Raises Refused."""
        return next(self.calls([Call(method, path, body, content)]))

    def get(self, path: str) -> Any:
        return self.call("GET", path)

    def create(self, path: str, body: object) -> Any:
        return self.call("POST", path, body)

    def delete(self, *paths: str) -> None:
        """Gone or going; nothing to delete is fine."""
        with closing(self.connect()) as connection:
            for path in paths:
                try:
                    self.exchange(connection, Call("DELETE", path))
                except Refused as error:
                    if error.status != 404:
                        raise

    def merge(self, path: str, patch: object) -> Any:
        return self.call("PATCH", path, patch, MERGE)

    def calls(self, calls: Iterable[Call]) -> Iterator[Any]:
        """The answers one after the other, over one connection."""
        with closing(self.connect()) as connection:
            for call in calls:
                yield self.exchange(connection, call)

    def connect(self) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(self.server.netloc, context=self.tls, timeout=30)

    def exchange(self, connection: http.client.HTTPSConnection, call: Call) -> Any:
        headers = {"Content-Type": call.content} | self.own
        connection.request(
            call.method, call.path, None if call.body is None else json.dumps(call.body), headers
        )
        answer = connection.getresponse()
        text = answer.read().decode()
        is_json = answer.headers.get_content_type() == "application/json"
        if answer.status >= 400:
            raise Refused(answer.status, json.loads(text).get("message", text) if is_json else text)
        return json.loads(text) if is_json and text else text


def by_name(config: dict[str, Any], kind: str, name: str) -> dict[str, Any]:
    return next(entry for entry in config[kind] if entry["name"] == name)


def tls(cluster: dict[str, Any], user: dict[str, Any]) -> ssl.SSLContext:
    """The server's authority and the client's certificate; Python's ssl takes the latter from files alone."""
    context = ssl.create_default_context(cadata=decoded(cluster["certificate-authority-data"]))
    if "client-certificate-data" in user:
        with tempfile.NamedTemporaryFile("w") as pair:
            pair.write(decoded(user["client-certificate-data"]) + decoded(user["client-key-data"]))
            pair.flush()
            context.load_cert_chain(pair.name)
    return context


def decoded(data: str) -> str:
    return base64.b64decode(data).decode()
