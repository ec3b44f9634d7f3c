"""The chart as the tests speak to Helm's engine about it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests import environments

CHART = Path(__file__).parents[2] / "helm" / "launcher"
ENGINE = Path(__file__).parent / "engine.py"
Object = dict[str, Any]
Values = Mapping[str, Any]


class Refused(RuntimeError):
    """The engine, or the cluster behind it, said no; the text is its own."""


class Helm:
    """The engine in a child process, for as long as `with` lasts."""

    def __enter__(self) -> Helm:
        command = [str(environments.find_python("helm")), "-I", str(ENGINE)]
        self.child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.child.communicate()

    def call(self, what: str, /, **given: Any) -> Any:
        """The answer to one call of engine.py. Raises Refused."""
        assert self.child.stdin is not None and self.child.stdout is not None
        self.child.stdin.write(json.dumps([what, given]) + "\n")
        self.child.stdin.flush()
        answer = json.loads(self.child.stdout.readline() or '{"refused": "the engine died"}')
        if "refused" in answer:
            raise Refused(answer["refused"])
        return answer["result"]

    def lint(self, values: Values, version: str) -> Any:
        return self.call("lint", chart=str(CHART), values=values, kube_version=version)

    def package(self, destination: Path) -> Path:
        """The archive that is published."""
        return Path(self.call("package", chart=str(CHART), destination=str(destination)))

    def files(
        self, values: Values, name: str = "team", namespace: str = "ns", chart: Path = CHART
    ) -> dict[str, str]:
        """What each template renders to, by its path in templates/."""
        found = self.call("render", chart=str(chart), values=values, name=name, namespace=namespace)
        return {path.partition("/templates/")[2]: text for path, text in found.items()}

    def render(self, values: Values, name: str = "team", namespace: str = "ns") -> list[Object]:
        """Every object, those of the test with them."""
        return list(documents(self.files(values, name, namespace)))

    def validate(self, objects: list[Object], version: str) -> str:
        """The version by whose schemas they are right. Raises Refused where one is not, or no schema is for it."""
        return str(self.call("validate", objects=objects, version=version))

    def release(self, kubeconfig: Path, namespace: str, action: str, **arguments: Any) -> Any:
        """An action of Helm on a release: install, upgrade, test, rollback, uninstall, history."""
        return self.call(
            "release",
            kubeconfig=str(kubeconfig),
            namespace=namespace,
            action=action,
            arguments=arguments,
        )


def documents(files: Mapping[str, str]) -> Iterator[Object]:
    for path, text in sorted(files.items()):
        if path.endswith(".yaml"):
            yield from filter(None, yaml.load_all(text, Loader=yaml.CSafeLoader))


def one(objects: list[Object], kind: str, name: str | None = None) -> Object:
    """The only object of this kind, and of this name where it is given."""
    found = [
        each
        for each in objects
        if each["kind"] == kind and name in (None, each["metadata"]["name"])
    ]
    assert len(found) == 1, f"{kind} {name}: {len(found)}"
    return found[0]
