"""The cluster and a namespace for every test here.

TEST_KUBECONFIG names a cluster of the user, such as one of kind. KUBECONFIG is not read, since it
may name a production cluster. Without TEST_KUBECONFIG the tests use the harness's cluster: one that
`make cluster-up` started, which stays up, or one that lasts as long as the test session.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests import needs
from tests.cluster import nodes, preparations
from tests.cluster.access import Access
from tests.cluster.harness import build, images, places
from tests.cluster.harness import cluster as harness
from tests.cluster.harness import image as product
from tests.cluster.waiting import wait_until

# Files whose tests share what a module fixture makes, or change what others judge (the nodes, the
# kinds that are served): side by side with others (`pytest -n 4 tests/cluster`), those of one group
# go to one process. What computes and what waits by turns.
GROUPS = {
    "test_teardown.py": "before the cluster",
    "test_recovery.py": "recovery",
    "test_spares.py": "nodes",
    "test_situations.py": "nodes",
    "test_rare_situations.py": "nodes",
    "test_stops.py": "nodes",
    "test_doctor.py": "nodes",
    "test_node_kinds.py": "nodes",
    "test_chart.py": "chart",
    # Its tests install and remove objects of the whole cluster.
    "test_install.py": "install",
    "test_chart_admission.py": "chart admission",
    "test_exit_codes.py": "exit codes",
    "test_program_ends.py": "program ends",
    "test_scale.py": "scale",
    "test_profile.py": "profile",
    "test_prepare.py": "prepare",
    "test_logs.py": "logs",
    "test_admission.py": "admission",
    "test_unfit_hosts.py": "unfit hosts",
}
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests here last: first those that start clusters of their own, then the groups."""
    positions = {HERE / name: position_of for position_of, name in enumerate(GROUPS, 2)}

    def position_of(item: pytest.Item) -> int:
        if not item.path.is_relative_to(HERE):
            return 0
        return 1 if stops_clusters(item) else positions.get(item.path, 2 + len(positions))

    items.sort(key=position_of)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give every test to whichever process is free, and each group as a whole."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = config.rootpath / nodeid.partition("::")[0]
            return GROUPS.get(path.name, nodeid) if path.parent == HERE else nodeid

    config.option.loadscopereorder = False  # in the order of above
    return ByGroup(config, log)


@pytest.fixture(scope="session")
def programs(request: pytest.FixtureRequest) -> Path:
    """Return the folder of a cluster's programs, if this machine can run them."""
    if user_kubeconfig():
        pytest.skip("TEST_KUBECONFIG names another cluster to test with")
    needs.a_machine_for_a_cluster()
    with show_output(request):
        return build.build_programs()


@pytest.fixture(scope="session")
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Access]:
    if kubeconfig := user_kubeconfig():
        yield Access(kubeconfig, Path(needs.tool("kubectl", package="Kubernetes")), is_ours=False)
        return
    folder = request.getfixturevalue("programs")
    if hasattr(request.config, "workerinput") and any(map(stops_clusters, request.session.items)):
        wait_until(
            done_marker(tmp_path_factory).exists,
            bool,
            "the end of the tests that stop clusters",
            timeout_s=1800,
        )
    session = harness.use_cluster()
    with show_output(request):
        session.__enter__()
    yield Access(places.ADMIN, folder / "kubectl", is_ours=True)
    session.__exit__(None, None, None)


def stops_clusters(item: pytest.Item) -> bool:
    return item.get_closest_marker("before_the_cluster") is not None


def done_marker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file that exists once the tests that stop clusters have run, in any process."""
    return tmp_path_factory.getbasetemp().parent / "before-the-cluster"


def user_kubeconfig() -> Path | None:
    """Return the kubeconfig of the user's cluster."""
    path = os.environ.get("TEST_KUBECONFIG")
    return Path(path) if path else None


def show_output(request: pytest.FixtureRequest) -> AbstractContextManager[None]:
    """Show output at once in this context: a first build takes long and reports its progress."""
    return request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled()


@pytest.fixture
def namespace(cluster: Access, request: pytest.FixtureRequest) -> Iterator[str]:
    """Make a namespace at the restricted Pod Security level, or at the indirect parameter's."""
    name = preparations.make_namespace(cluster, getattr(request, "param", "restricted"))
    yield name
    preparations.remove_namespace(cluster, name)


@pytest.fixture
def checkpoints(cluster: Access, namespace: str) -> Path:
    """Return the folder behind the claim `checkpoints` of the namespace."""
    return preparations.make_claim(cluster, namespace)


@pytest.fixture
def steady_nodes() -> Iterator[None]:
    """Keep tests of other processes from changing the nodes."""
    with nodes.keep_nodes_steady():
        yield


@pytest.fixture(scope="session")
def base_image() -> str:
    """Return the image with Python and a shell."""
    return images.BASE


@pytest.fixture(scope="session")
def bare_image() -> str:
    """Return the image with Python and jax and nothing of jaxlaunch."""
    return images.BARE


@pytest.fixture(scope="session")
def image(cluster: Access) -> str:
    """Return the product's image, built from this checkout. A user's cluster has to load it."""
    if cluster.is_ours:
        needs.tool("buildah", package="the Debian package buildah")
        product.load_image()
    return product.IMAGE
