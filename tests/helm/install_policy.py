"""Write the admission policy of k8s/install.yaml from that of the chart: `make generated`.

The chart's policy belongs to one release: it knows the release's namespaces, submitters, priority
classes and networks. That of install.yaml is for all namespaces, and judges who has the role
jaxlaunch-user there. It leaves out what install.yaml cannot know (which ServiceAccounts, host
paths and users the jobs of a cluster need; Pod Security levels limit these) and what the role
allowed before (ConfigMaps, NetworkPolicies and Workloads).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from tests.helm.charts import Helm

NAME = "jaxlaunch"
LABELS = {"app.kubernetes.io/name": "jaxlaunch"}
BEGIN = (
    "# Generated from helm/launcher/templates/admission (make generated) until the next `# end`.\n"
)
END = "# end\n"
# Of the chart's values, those with which it does not judge containers and the host's network.
VALUES = {"admissionPolicy": {"hostNetwork": True, "privileged": True, "root": True}}
RESOURCES = {"jobsets", "jobs", "pods", "secrets"}
LEFT_OUT = {"hostPaths", "accounts", "schedulers"}
# The right of jaxlaunch-user by which the policy knows whom it judges: no object has this kind.
IS_SUBMITTER = """\
!request.userInfo.username.startsWith("system:serviceaccount:kube-system:")
&& authorizer.group("jaxlaunch.io").resource("jobs").namespace(request.namespace)
.check("submit").allowed()"""
OWN_CLASSES = "!(name in [])", 'name.startsWith("system-")'
PRIORITY_MESSAGE = """\
variables.named + ": priority class " + variables.priorities.join(", ") + " is not allowed in"
+ " namespace " + request.namespace + ": it is Kubernetes' own, whose pods preempt all others."
+ " Leave it out, or use another."
"""
ASK = re.compile(r"ask whoever installed the chart \(release \S+ of namespace \S+\) to")
TAINT_VALUE = re.compile(r'add a system taint to"\n\+ " admissionPolicy\.systemTaints')
TAINT_PLACE = 'change"\n+ " ValidatingAdmissionPolicy jaxlaunch'

Object = dict[str, Any]


def update_policy(text: str) -> str:
    """Return install.yaml with the current policy."""
    head, rest = text.split(BEGIN)
    return head + BEGIN + make_policy() + END + rest.split(END, 1)[1]


def make_policy() -> str:
    """Return the policy and its binding as YAML documents."""
    with Helm() as helm:
        files = helm.files(VALUES, NAME, NAME)
    policy = yaml.safe_load(files["admission/policy.yaml"])
    binding = yaml.safe_load(files["admission/binding.yaml"])
    for document in (policy, binding):
        document["metadata"] = {"name": NAME, "labels": LABELS}
    binding["spec"]["policyName"] = NAME
    policy["spec"] = _select_rules(policy["spec"])
    dumped = [
        yaml.dump(item, Dumper=_Dumper, sort_keys=False, width=110) for item in (policy, binding)
    ]
    return "---\n".join(dumped) + "---\n"


def _select_rules(spec: Object) -> Object:
    rules = spec["matchConstraints"]["resourceRules"]
    rules = [rule for rule in rules if set(rule["resources"]) <= RESOURCES]
    kinds = {"JobSet", "Job", "Pod", "Secret"}
    validations = []
    for validation in spec["validations"]:
        of_kind = re.match(r'request\.kind\.kind != "(\w+)"', validation["expression"])
        if "priorities" in validation["expression"]:
            validation["messageExpression"] = PRIORITY_MESSAGE.strip()
        is_left_out = LEFT_OUT & _find_variables([validation])
        if not is_left_out and (of_kind is None or of_kind[1] in kinds):
            validations.append({key: _reword(text) for key, text in validation.items()})
    variables = {item["name"]: item["expression"] for item in spec["variables"]}
    assert OWN_CLASSES[0] in variables["priorities"]
    variables["priorities"] = variables["priorities"].replace(*OWN_CLASSES)
    used = set[str]()
    wanted = _find_variables(validations)
    while wanted - used:
        used |= wanted
        wanted = _find_variables([{"expression": variables[name]} for name in used])
    conditions = {item["name"]: item for item in spec["matchConditions"]}
    return {
        "failurePolicy": spec["failurePolicy"],
        "matchConstraints": {"resourceRules": rules},
        "matchConditions": [
            {"name": "by-a-submitter", "expression": IS_SUBMITTER},
            conditions["by-no-administrator"],
        ],
        "variables": [
            {"name": name, "expression": text} for name, text in variables.items() if name in used
        ],
        "validations": validations,
    }


def _find_variables(items: Sequence[Mapping[str, str]]) -> set[str]:
    texts = (text for item in items for text in item.values())
    return {name for text in texts for name in re.findall(r"\bvariables\.(\w+)", text)}


def _reword(text: str) -> str:
    """Return a text without the chart's release and values."""
    text = TAINT_VALUE.sub(TAINT_PLACE, ASK.sub("ask the cluster administrator to", text))
    assert "admissionPolicy." not in text and "chart" not in text, text
    return text


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
