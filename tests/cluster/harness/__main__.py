"""Run the tests' cluster: python -m tests.cluster.harness up|down|env|status|build|images."""

import sys

from tests.cluster.harness import build, cluster, images, process
from tests.cluster.harness.places import ADMIN, KEPT


def start_cluster() -> int:
    cluster.start_cluster()
    KEPT.touch()
    return print_environment()


def print_environment() -> int:
    """Print kubectl and the cluster's kubeconfig for a shell's `eval`."""
    print(f"export KUBECONFIG={ADMIN}")
    print(f"export PATH={build.programs_folder()}:$PATH")
    return 0


def print_status() -> int:
    """Print what runs, by name; return 1 unless a whole cluster answers."""
    for name, pid in sorted(process.find_daemons().items()):
        print(f"{pid:>8} {name}")
    return 0 if cluster.is_up() else 1


def stop_cluster() -> int:
    cluster.stop_cluster()
    return 0


def build_programs() -> int:
    print(build.build_programs())
    return 0


def print_archives() -> int:
    """Print the archives of the pods' images, for `kind load image-archive FILE`."""
    print(images.base_archive(), images.bare_archive(), sep="\n")
    return 0


COMMANDS = {
    "up": start_cluster,
    "down": stop_cluster,
    "env": print_environment,
    "status": print_status,
    "build": build_programs,
    "images": print_archives,
}


def main(words: list[str]) -> int:
    if len(words) != 1 or words[0] not in COMMANDS:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        return COMMANDS[words[0]]()
    except (cluster.UnsupportedMachineError, build.MissingToolError, process.StartError) as error:
        print(error, file=sys.stderr)
        return 1


sys.exit(main(sys.argv[1:]))
