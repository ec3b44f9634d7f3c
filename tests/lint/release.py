"""What a release is made of: workflows that keep to rules, one version, and pinned packages."""

from __future__ import annotations

import base64
import importlib.metadata
import re
import subprocess
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from jaxlaunch import installation
from jaxlaunch.launcher.agent import pack
from jaxlaunch.launcher.diagnose.doctor import namespace
from jaxlaunch.launcher.job import defaults
from jaxlaunch.launcher.jobs import cluster_defaults
from jaxlaunch.launcher.kubernetes.kinds import Right
from tests.lint.documents import PAGES, ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yaml"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VERSION = PYPROJECT["project"]["version"]
# The extra of torch has no list: requirements/lock.py says why.
EXTRAS = {
    extra: required
    for extra, required in PYPROJECT["project"]["optional-dependencies"].items()
    if extra != "transformers"
}
PERMISSIONS = {
    ("contents", "read"),
    ("contents", "write"),
    ("id-token", "write"),
    ("packages", "write"),
}
ENTRY = re.compile(r"[\w.-]+==[^\s;]+(?: ; [^\\\n]+)?(?: \\\n    --hash=sha256:[0-9a-f]{64})+\n")


def read_workflow(path: Path) -> dict[str, Any]:
    """Return a workflow; YAML 1.1 reads its key `on` as true."""
    return {
        "on" if key is True else key: value
        for key, value in yaml.safe_load(path.read_text()).items()
    }


def find_other_versions() -> Iterator[str]:
    versions = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    if versions[:2] != ["Unreleased", VERSION]:
        yield f"CHANGELOG.md begins with {versions[:2]}, not with Unreleased and {VERSION}"
    chart = yaml.safe_load((ROOT / "helm" / "launcher" / "Chart.yaml").read_text())
    if (chart["version"], chart["appVersion"]) != (VERSION, VERSION):
        yield f"helm/launcher/Chart.yaml is not of version {VERSION}"
    kind, _, encoded = chart["icon"].partition(",")
    icon = (ROOT / "docs" / "pictures" / "icon.svg").read_text().strip()
    if (kind, base64.b64decode(encoded).decode()) != ("data:image/svg+xml;base64", icon):
        yield "the icon of the chart is not docs/pictures/icon.svg"


def find_wrong_sizes_of_the_agent() -> Iterator[str]:
    (size,) = re.findall(r"one file of about (\d+) kB", (ROOT / "docs/your-code.md").read_text())
    if abs(len(pack.pack_agent()) / 1000 - int(size)) > 0.15 * int(size):
        yield f"docs/your-code.md: the agent has {len(pack.pack_agent()) / 1000:.0f} kB, not {size}"


def find_installs_from_an_index_without_the_package() -> Iterator[str]:
    command = re.compile(r"pip install ['\"]?jaxlaunch(?![-\w])")
    for path in (ROOT / "README.md", *PAGES) if not installation.ON_INDEX else ():
        if command.search(path.read_text()):
            yield f"{path.relative_to(ROOT)} installs jaxlaunch from an index"
    text = (ROOT / "docs/quickstart.md").read_text()
    if ("not on the Python Package Index" in text) == installation.ON_INDEX:
        yield "docs/quickstart.md is wrong about the Python Package Index"


def find_other_pythons() -> Iterator[str]:
    """Yield places with another oldest Python than pyproject.toml's, of package and agent."""
    package = PYPROJECT["project"]["requires-python"].removeprefix(">=")
    (target,) = set(PYPROJECT["tool"]["ruff"]["per-file-target-version"].values())
    agent = target.replace("py3", "3.")
    for file, pattern, oldest in (
        ("README.md", r"Python (3\.\d+) or newer", package),
        ("jaxlaunch/contract.py", r"Python >= (3\.\d+)", agent),
        ("jaxlaunch/launcher/agent/pack.py", r"Python >= (3\.\d+)", agent),
        ("jaxlaunch/launcher/agent/pack.py", r"jaxlaunch needs (3\.\d+)", agent),
        ("jaxlaunch/launcher/agent/pack.py", r"version_info < \((3, \d+)\)", agent),
        ("docs/your-code.md", r"CPython (3\.\d+)", agent),
    ):
        versions = [
            version.replace(", ", ".") for version in re.findall(pattern, (ROOT / file).read_text())
        ]
        if versions != [oldest]:
            yield f"{file}: {versions}, not {oldest}"
    (command,) = re.findall(r"oldest=\$\((.*)\)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    printed = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    if f"3.{printed.strip()}" != package:
        yield f".ci/run takes 3.{printed.strip()} for the oldest Python, not {package}"


def find_wrong_workflows() -> Iterator[str]:
    """Yield unneeded rights, pasted values, kept credentials and actions that are not pinned."""
    for path in WORKFLOWS:
        workflow, jobs = read_workflow(path), read_workflow(path)["jobs"]
        if workflow["permissions"] != {}:
            yield f"{path.name}: permissions of the whole workflow"
        for name, job in jobs.items():
            yield from (f"{path.name}: {name} {fault}" for fault in _find_job_faults(job))
        writers = [
            name for name, job in jobs.items() if job["permissions"].get("contents") == "write"
        ]
        if writers != (["publish"] if path.stem == "release" else []):
            yield f"{path.name}: {writers} may write"
        # Anyone who takes over an action can move its tags, and the release's jobs sign in the
        # project's name.
        for use in re.findall(r"\buses: (?!\./)(.+)$", path.read_text(), re.MULTILINE):
            if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", use):
                yield f"{path.name}: {use} is not a commit with its version"


def _find_job_faults(job: dict[str, Any]) -> Iterator[str]:
    if not set(job["permissions"].items()) <= PERMISSIONS:
        yield "has too many permissions"
    if job["runs-on"] == "ubuntu-latest" if "steps" in job else not job["uses"].startswith("./"):
        yield "runs on what is not pinned"
    for step in job.get("steps", ()):
        if "${{" in step.get("run", ""):
            yield "pastes a value into a script"
        is_checkout = step.get("uses", "").startswith("actions/checkout@")
        if is_checkout and step["with"]["persist-credentials"]:
            yield "keeps credentials"


def find_steps_that_a_release_lacks() -> Iterator[str]:
    jobs = read_workflow(ROOT / ".github" / "workflows" / "release.yaml")["jobs"]
    if jobs["test"]["uses"] != "./.github/workflows/ci.yaml":
        yield "a release is not tested as a change is"
    if jobs["image"]["strategy"]["matrix"] != {"extra": ["cpu", "cuda12", "cuda13", "tpu"]}:
        yield "a release has not an image for each accelerator"
    for name in ("image", "chart"):
        signs = re.search(
            r'cosign sign --yes "[^"]+@\$(?:DIGEST|digest)"', str(jobs[name]["steps"])
        )
        if (
            "test" not in jobs[name]["needs"]
            or jobs[name]["permissions"]["id-token"] != "write"
            or not signs
        ):
            yield f"release.yaml: {name} is not tested first and signed by digest"
    for name, words in (
        ("image", "cosign attest --yes --type spdxjson"),
        ("publish", "cosign sign-blob --yes"),
        ("publish", "*.cdx.json"),
        ("package", "twine check --strict dist/*"),
        ("package", "cyclonedx-py requirements requirements/train.txt"),
        ("package", "jaxlaunch-$VERSION.cdx.json"),
    ):
        if words not in str(jobs[name]["steps"]):
            yield f"release.yaml: {name} does not run {words}"
    nightly = read_workflow(ROOT / ".github" / "workflows" / "nightly.yaml")
    text = str(nightly["jobs"])
    if (
        "schedule" not in nightly["on"]
        or "install --quiet --upgrade jax " not in text
        or "make quick" not in text
    ):
        yield "nightly.yaml does not try the newest JAX"
    commands = re.findall(r"^make ([\w-]+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    if commands != [
        "check",
        "run",
        "test",
        "test-all",
    ]:  # what `make run` leaves must not change how a test ends
        yield f".ci/run runs {commands}"


def find_unpinned_images() -> Iterator[str]:
    text = (ROOT / "Dockerfile").read_text()
    sources = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    stages = {"${BASE}", *re.findall(r"^FROM .+ AS (\w+)$", text, re.MULTILINE)}
    jobs = [job for path in WORKFLOWS for job in read_workflow(path)["jobs"].values()]
    images = [name for name in sources if name not in stages]
    images += [job["container"]["image"] for job in jobs if "container" in job]
    for name in images:
        if not re.fullmatch(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", name):
            yield f"{name} is not pinned by its digest"
    (base,) = re.findall(r"^ARG BASE=(.+)$", text, re.MULTILINE)
    # Where the update bot finds it: it reads no ARG.
    first = re.findall(r"^FROM (.+)$", text, re.MULTILINE)[0]
    if not first.startswith("python:3.12-slim@sha256:") or not first.endswith(f" AS {base}"):
        yield "the image of the Dockerfile's first line is not its base"


def find_installs_without_hashes() -> Iterator[str]:
    """Yield what an image, a release or a checkout installs by a build's own search."""
    files = [
        ROOT / "Dockerfile",
        ROOT / "Makefile",
        ROOT / ".github" / "workflows" / "release.yaml",
    ]
    lines = "\n".join(path.read_text().replace("\\\n", " ") for path in files).splitlines()
    install = re.compile(r"\bpip\b.* install\b|^\t\$\(INSTALL\)")
    for command in (
        command for line in lines for command in re.split(r"&&|;", line) if install.search(command)
    ):
        if "--require-hashes" not in command and not {"--no-deps", "--no-build-isolation"} <= set(
            command.split()
        ):
            yield command.strip()


def find_pins_that_the_update_bot_misses() -> Iterator[str]:
    updates = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text())["updates"]
    folders = {
        update["package-ecosystem"]: update.get("directories") or [update["directory"]]
        for update in updates
    }
    if not folders["github-actions"] == folders["docker"] == ["/"]:
        yield "actions or images are not looked at"
    for kind, pattern in {
        "pip": "**/requirements/*.txt",
        "gomod": "tests/cluster/go/*/go.mod",
    }.items():
        seen = {path for folder in folders[kind] for path in ROOT.glob(folder.strip("/"))}
        command = [
            "git",
            "ls-files",
            "--cached",
            "--others",
            "--exclude-standard",
            f":(glob){pattern}",
        ]
        listed = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        pinned = {(ROOT / line).parent for line in listed.splitlines()}
        yield from (f"{kind}: {folder.relative_to(ROOT)}" for folder in pinned ^ seen)


# --- lists of packages ----------------------------------------------------------------------------


def read_pins(name: str) -> dict[str, str]:
    """Return the packages of a list and their versions."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    pairs = [entry.group().split(maxsplit=1)[0].split("==") for entry in ENTRY.finditer(text)]
    return {canonicalize_name(package): version for package, version in pairs}


def read_lists() -> dict[str, dict[str, str]]:
    return {
        path.stem: read_pins(path.stem) for path in sorted((ROOT / "requirements").glob("*.txt"))
    }


def find_wrong_lists() -> Iterator[str]:
    lists, added = read_lists(), sorted(set(EXTRAS) - {"train"})
    for name in lists:
        head, _, body = (ROOT / "requirements" / f"{name}.txt").read_text().partition("\n")
        if "Written by `make lock`" not in head or ENTRY.sub("", body):
            yield f"requirements/{name}.txt has an entry without a version or a hash"
        if len(lists[name]) != len(ENTRY.findall(body)):
            yield f"requirements/{name}.txt has a package with two versions"
    if sorted(lists) != sorted([*added, "build", "tools", "train", "uv"]):
        yield f"requirements/ has {sorted(lists)}"
    for package in set(chain.from_iterable(lists.values())):
        if len({pins[package] for pins in lists.values() if package in pins}) > 1:
            yield f"{package} has two versions"
    yield from (
        f"{extra} repeats a package of train"
        for extra in added
        if lists["train"].keys() & lists[extra].keys()
    )


def find_packages_that_lists_lack() -> Iterator[str]:
    lists = read_lists()
    every_image = PYPROJECT["project"]["dependencies"] + EXTRAS["train"]
    yield from unmet(every_image, lists["train"])
    yield from unmet(PYPROJECT["build-system"]["requires"], lists["build"])
    yield from unmet(["pip"], lists["tools"])
    for extra in sorted(set(EXTRAS) - {"train"}):
        yield from unmet(every_image + EXTRAS[extra], lists["train"] | lists[extra])


def find_floors_above_pins() -> Iterator[str]:
    required = [
        Requirement(text) for text in sum(EXTRAS.values(), PYPROJECT["project"]["dependencies"])
    ]
    floors = [requirement for requirement in required if requirement.specifier]
    if len({floor.name for floor in floors}) != len(floors):
        yield "the oldest version of a package is written twice in pyproject.toml"
    pins = dict(chain.from_iterable(pins.items() for pins in read_lists().values()))
    for floor in floors:
        if not floor.specifier.contains(pins[canonicalize_name(floor.name)]):
            yield f"{floor}: {pins[canonicalize_name(floor.name)]} is pinned"


def unmet(texts: list[str], pins: dict[str, str]) -> Iterator[str]:
    """Yield what a list lacks or breaks of these requirements and, recursively, of theirs."""
    seen, queue = set(), [("jaxlaunch", text) for text in texts]
    while queue:
        asker, text = queue.pop()
        wanted = Requirement(text)
        name = canonicalize_name(wanted.name)
        if name == "jaxlaunch":
            queue += [("jaxlaunch", listed) for extra in wanted.extras for listed in EXTRAS[extra]]
            continue
        if name not in pins or not wanted.specifier.contains(pins[name], prereleases=True):
            yield f"{asker} wants {text}, the list has {pins.get(name)}"
            continue
        for extra in wanted.extras | {""}:
            if (name, extra) not in seen:
                seen.add((name, extra))
                queue += [
                    (f"{name} {pins[name]}", str(requirement).split(";")[0].strip())
                    for requirement in read_requirements(name)
                    if requirement.marker is None or requirement.marker.evaluate({"extra": extra})
                ]


def read_requirements(name: str) -> list[Requirement]:
    """Return what an installed package requires, except for accelerators: uv has read those."""
    try:
        return [Requirement(text) for text in importlib.metadata.requires(name) or []]
    except importlib.metadata.PackageNotFoundError:
        return []


# --- k8s/ -----------------------------------------------------------------------------------------


def installed(kind: str, name: str) -> dict[str, Any]:
    """Return an object of k8s/install.yaml."""
    objects = yaml.safe_load_all((ROOT / "k8s" / "install.yaml").read_text())
    (document,) = [
        candidate
        for candidate in objects
        if (candidate["kind"], candidate["metadata"]["name"]) == (kind, name)
    ]
    assert isinstance(document, dict)
    return document


def find_wrong_rights_of_users() -> Iterator[str]:
    role = installed("ClusterRole", "jaxlaunch-user")

    def is_allowed(right: Right) -> bool:
        resource = (
            f"{right.kind.plural}/{right.subresource}" if right.subresource else right.kind.plural
        )
        return any(
            right.kind.group in rule["apiGroups"]
            and resource in rule["resources"]
            and right.verb in rule["verbs"]
            for rule in role["rules"]
        )

    used = [
        right for rights in namespace.command_rights(has_queue=True).values() for right in rights
    ]
    yield from (
        f"k8s/install.yaml does not give users {right}" for right in used if not is_allowed(right)
    )
    for document in yaml.safe_load_all((ROOT / "k8s" / "install.yaml").read_text()):
        for rule in document.get("rules", []):
            # The policy of install.yaml bounds which Secrets they create.
            if rule["resources"] == ["secrets"] and rule["verbs"] == ["create"]:
                continue
            if {"secrets", "*"} & {*rule["resources"], *rule["verbs"], *rule["apiGroups"]}:
                yield (
                    f"k8s/install.yaml: {document['metadata']['name']} reads secrets, or may "
                    "do everything"
                )


def find_other_names_in_k8s() -> Iterator[str]:
    config_map = installed("ConfigMap", cluster_defaults.CONFIG_MAP_NAME)
    is_default = defaults.read_config_map(config_map, "here").values == defaults.Defaults()
    if config_map["metadata"]["namespace"] != cluster_defaults.SYSTEM_NAMESPACE or not is_default:
        yield (
            "the cluster defaults of k8s/install.yaml are not where the commands look for them, "
            "or not empty"
        )
    job = yaml.safe_load((ROOT / "k8s" / "examples" / "kind-digits.yaml").read_text())
    team = list(yaml.safe_load_all((ROOT / "k8s" / "kind" / "team.yaml").read_text()))
    claims = [
        document["metadata"]["name"]
        for document in team
        if document["kind"] == "PersistentVolumeClaim"
    ]
    if claims != [job["volumes"][0]["claim"]]:
        yield "k8s/kind/team.yaml has not the claim that the job of the smoke test mounts"
    for name in ("jobset", "kueue"):
        pinned = re.search(
            rf"^{name}=(v\S+)$", (ROOT / "k8s" / "kind" / "up.sh").read_text(), re.MULTILINE
        )
        tested = re.search(
            rf"sigs\.k8s\.io/{name} (v\S+)", (ROOT / f"tests/cluster/go/{name}/go.mod").read_text()
        )
        if pinned is None or tested is None or pinned[1] != tested[1]:
            yield f"k8s/kind/up.sh installs another {name} than the tests run against"
