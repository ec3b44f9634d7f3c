"""Write the lists of this folder: each extra's packages with their versions and hashes.

`make lock` keeps the versions that are there and fit pyproject.toml; `make lock UPGRADE=--upgrade`
takes the newest of all, `UPGRADE='--upgrade-package jax'` of one. All extras are resolved together,
for every platform and every Python that pyproject.toml accepts, so that one list can be installed
with any other.
"""

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
PYPROJECT = HERE.parent / "pyproject.toml"
SITE = (
    HERE.parent / "tests" / "requirements" / "docs.txt"
)  # in an environment of its own: tests/environments.py
DOCUMENT = tomllib.loads(PYPROJECT.read_text())
EVERYWHERE = "train"  # the extra that every image holds
# Without a list: torch requires older CUDA libraries than JAX takes, also where it only runs on a
# CPU, so that one list for both would make JAX's older, too.
UNLISTED = ("transformers",)
ADDED = [
    extra
    for extra in DOCUMENT["project"]["optional-dependencies"]
    if extra not in (EVERYWHERE, *UNLISTED)
]


def compiled(output: Path, *options: str | Path, wanted: str | None = None) -> dict[str, str]:
    """Write the list `output` with uv, which keeps versions that fit; return its entries."""
    oldest = DOCUMENT["project"]["requires-python"].removeprefix(">=")
    command: list[str | Path] = [
        "uv",
        "pip",
        "compile",
        "--quiet",
        "--universal",
        "--python-version",
        oldest,
    ]
    command += [
        "--generate-hashes",
        "--no-annotate",
        "--no-header",
        *options,
        "--output-file",
        output,
    ]
    subprocess.run(command, input=wanted, text=True, check=True, stdout=subprocess.DEVNULL)
    return entries(output.read_text())


def entries(text: str) -> dict[str, str]:
    """Return the entries of a list by package: the line of its name, then those of its hashes."""
    entry_by_name: dict[str, str] = {}
    for line in text.splitlines(keepends=True):
        if not line.startswith((" ", "#")):
            name = line.partition("==")[0]
            # A package without support for an old Python has several entries, with markers.
            entry_by_name.setdefault(name, "")
        if not line.startswith("#"):
            entry_by_name[name] += line
    return entry_by_name


def write(path: Path, holds: str, listed: dict[str, str]) -> None:
    head = f"# {holds} Written by `make lock`; install with --require-hashes.\n"
    path.write_text(head + "".join(listed[name] for name in sorted(listed)))


def main(upgrade: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder, "pins.txt")
        pins.write_text(
            "".join(
                {text for path in HERE.glob("*.txt") for text in entries(path.read_text()).values()}
            )
        )
        compiled(pins, "--all-extras", *upgrade, PYPROJECT)

        def compile_extras(*extras: str) -> dict[str, str]:
            options = [word for extra in (EVERYWHERE, *extras) for word in ("--extra", extra)]
            return compiled(Path(folder, "list.txt"), *options, "--constraints", pins, PYPROJECT)

        base = compile_extras()
        write(
            HERE / "train.txt",
            "Every image holds these: the package's own requirements and [train].",
            base,
        )
        for extra in ADDED:
            added = {
                name: entry for name, entry in compile_extras(extra).items() if name not in base
            }
            write(HERE / f"{extra}.txt", f"[{extra}] adds these to train.txt.", added)
    build = "\n".join(DOCUMENT["build-system"]["requires"])
    for path, wanted, holds in (
        (
            HERE / "build.txt",
            build,
            "These build this package, and the packages that come as source alone.",
        ),
        (HERE / "tools.txt", "pip\nbuild", "These install the other lists, and build a release."),
        (
            HERE / "uv.txt",
            "uv",
            "uv installs the other lists, where it has a wheel for the platform.",
        ),
        (
            SITE.with_name("release.txt"),
            "cyclonedx-bom\ntwine",
            "These describe and check a release.",
        ),
        # pymdown-extensions 13 needs Python 3.11.5, and a list has one version of a package.
        (
            SITE,
            "zensical\npymdown-extensions<13",
            "These build the documentation's site: `make docs`.",
        ),
    ):
        write(path, holds, compiled(path, *upgrade, "-", wanted=wanted))


if __name__ == "__main__":
    main(sys.argv[1:])
