"""python -m tests.cluster.harness up | down | env | status | build | images"""

import sys

from tests.cluster.harness import build, cluster, images, process
from tests.cluster.harness.places import ADMIN, KEPT


def up() -> int:
    cluster.up()
    KEPT.touch()
    return environment()


def environment() -> int:
    """For a shell's `eval`: kubectl and the cluster's kubeconfig."""
    print(f"export KUBECONFIG={ADMIN}")
    print(f"export PATH={build.home()}:$PATH")
    return 0


def status() -> int:
    """What runs, by name; 1 unless a whole cluster answers."""
    for name, pid in sorted(process.leading().items()):
        print(f"{pid:>8} {name}")
    return 0 if cluster.is_up() else 1


def down() -> int:
    cluster.down()
    return 0


def built() -> int:
    print(build.binaries())
    return 0


def archives() -> int:
    """The images that the tests' pods run, for another cluster to load: `kind load image-archive FILE`."""
    print(images.base_archive(), images.bare_archive(), sep="\n")
    return 0


COMMANDS = {
    "up": up,
    "down": down,
    "env": environment,
    "status": status,
    "build": built,
    "images": archives,
}


def main(words: list[str]) -> int:
    if len(words) != 1 or words[0] not in COMMANDS:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        return COMMANDS[words[0]]()
    except (cluster.Unable, build.Missing, process.Down) as error:
        print(error, file=sys.stderr)
        return 1


sys.exit(main(sys.argv[1:]))
