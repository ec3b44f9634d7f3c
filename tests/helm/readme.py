"""Write the chart's README from values.yaml: `python -m tests.helm.readme`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

from tests.helm.charts import CHART

HEAD = """\
# launcher

{description}

```sh
helm install team-a helm/launcher --namespace team-a --create-namespace \\
  --set defaults.image=registry.example/train:1 \\
  --set-json 'rbac.submitters=[{{"kind": "Group", "name": "team-a"}}]'
helm test team-a --namespace team-a
```

Then `launcher submit job.yaml -n team-a` runs this job: image, queue and volumes come from the
cluster defaults in the ConfigMap `jaxlaunch`, which the chart creates.

```yaml
name: first
hosts: 2
accelerator: {{type: cpu}}
train:
  task: classify
```

`helm test` runs `launcher doctor` in a pod with a submitter's rights; if it fails, the pod is kept
so that you can read its log.

Requirements: Helm 3 or 4, Kubernetes {kubernetes}, JobSet 0.10.1 or newer. The user who installs
the chart needs all rights that its Roles grant, and the right to create a ValidatingAdmissionPolicy
and its binding; without the latter: `--set admissionPolicy.enabled=false`.

`helm uninstall` keeps PersistentVolumeClaims and namespaces (`helm.sh/resource-policy: keep`) and
deletes everything else. Cluster-scoped objects are named NAMESPACE.RELEASE, so that two releases
never share one. A namespace has one ConfigMap of cluster defaults: with two releases in it, set
`defaults.enabled=false` and `admissionPolicy.enabled=false` in one of them.

## Values

| key | default | meaning |
|---|---|---|
"""
KEY = re.compile(r"( *)([A-Za-z_][\w.]*):")


class Value(NamedTuple):
    key: str
    meaning: str


def make_readme() -> str:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    oldest = chart["kubeVersion"].removeprefix(">=").removesuffix(".0-0") + " or newer"
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    rows = [
        f"| `{value.key}` | `{default_json(values, value.key)}` | {value.meaning} |\n"
        for value in find_described()
    ]
    return HEAD.format(description=chart["description"], kubernetes=oldest) + "".join(rows)


def default_json(values: Any, key: str) -> str:
    for part in key.split("."):
        values = values[part]
    return json.dumps(values)


def find_described() -> list[Value]:
    """Return every key that is below a `# --` comment, in the file's order."""
    return [Value(key, meaning) for key, meaning in _keys() if meaning]


def find_undescribed() -> list[str]:
    """Return the keys without a comment of their own, of a parent or of a child."""
    keys = list(_keys())
    described_keys = [key for key, meaning in keys if meaning]
    return [
        key
        for key, meaning in keys
        if not meaning
        and not any(
            f"{key}.".startswith(f"{other}.") or other.startswith(f"{key}.")
            for other in described_keys
        )
    ]


def _keys() -> Iterator[tuple[str, str]]:
    """Yield every key of values.yaml with its comment, "" if it has none."""
    path: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in (CHART / "values.yaml").read_text().splitlines():
        bare = line.strip()
        if bare.startswith("# --"):
            comment = [bare.removeprefix("# --").strip()]
        elif bare.startswith("#") and comment:
            comment.append(bare.removeprefix("#").strip())
        elif match := KEY.match(line):
            path = [(indent, key) for indent, key in path if indent < len(match[1])] + [
                (len(match[1]), match[2])
            ]
            yield ".".join(key for _, key in path), " ".join(comment)
            comment = []


if __name__ == "__main__":
    print(make_readme(), end="")
