"""Helm's own engine at work: a call as a line of JSON on stdin, its answer as one on stdout.

Runs in the environment `helm`, and in a process of its own: the engine brings Go's runtime with it.
"""

import json
import sys

import helm_python
import kubernetes_validate


def lint(chart, values, kube_version):
    return helm_python.lint(chart, values, strict=True, namespace="ns", kube_version=kube_version)


def render(chart, values, name, namespace):
    with helm_python.Chart.load(chart) as loaded:
        return loaded.render(values, name=name, namespace=namespace)


def package(chart, destination):
    return helm_python.package(chart, destination=destination)


def release(kubeconfig, namespace, action, arguments):
    with helm_python.Config(kubeconfig_path=kubeconfig, namespace=namespace) as config:
        return getattr(config, action)(**arguments)


def validate(objects, version):
    """Validate objects by the strict schemas of a version; return the version of the schemas."""
    (used_version,) = {kubernetes_validate.validate(item, version, strict=True) for item in objects}
    return used_version


CALLS = {
    "lint": lint,
    "render": render,
    "package": package,
    "release": release,
    "validate": validate,
}

for line in sys.stdin:
    name, arguments = json.loads(line)
    try:
        answer = {"result": CALLS[name](**arguments)}
    except helm_python.HelmError as error:
        answer = {"refused": str(error)}
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
        answer = {"refused": error.message}
    print(json.dumps(answer), flush=True)
