"""The cluster and a namespace in it, for every test here.

TEST_KUBECONFIG names a cluster of the user's own, kind for one; KUBECONFIG is not read, for it may
name a production cluster. Without it the harness's is used: one that `make cluster-up` started, and
left up afterwards, or one that lasts as long as the test session.
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
from tests.cluster.waiting import until

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
    "test_chart_admission.py": "chart admission",
    "test_exit_codes.py": "exit codes",
    "test_scale.py": "scale",
    "test_profile.py": "profile",
    "test_prepare.py": "prepare",
    "test_logs.py": "logs",
    "test_admission.py": "admission",
    "test_unfit_hosts.py": "unfit hosts",
}
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests here come last in a run of everything; first of them those that start and stop clusters of their own,
    then the groups."""
    turns = {HERE / name: turn for turn, name in enumerate(GROUPS, 2)}

    def turn(item: pytest.Item) -> int:
        if not item.path.is_relative_to(HERE):
            return 0
        return 1 if is_before_the_cluster(item) else turns.get(item.path, 2 + len(turns))

    items.sort(key=turn)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With pytest-xdist every test goes to whichever process is free, and a group goes as a whole."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = config.rootpath / nodeid.partition("::")[0]
            return GROUPS.get(path.name, nodeid) if path.parent == HERE else nodeid

    config.option.loadscopereorder = False  # in the order of above
    return ByGroup(config, log)


@pytest.fixture(scope="session")
def programs(request: pytest.FixtureRequest) -> Path:
    """The folder of a cluster's programs, on a machine that can run them."""
    if given():
        pytest.skip("TEST_KUBECONFIG names another cluster to test with")
    needs.a_machine_for_a_cluster()
    with uncaptured(request):
        return build.binaries()


@pytest.fixture(scope="session")
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Access]:
    if kubeconfig := given():
        yield Access(kubeconfig, Path(needs.tool("kubectl", of="Kubernetes")), is_ours=False)
        return
    folder = request.getfixturevalue("programs")
    if hasattr(request.config, "workerinput") and any(
        map(is_before_the_cluster, request.session.items)
    ):
        until(
            those_before(tmp_path_factory).exists,
            bool,
            "the end of the tests that stop clusters",
            within=1800,
        )
    session = harness.used()
    with uncaptured(request):
        session.__enter__()
    yield Access(places.ADMIN, folder / "kubectl", is_ours=True)
    session.__exit__(None, None, None)


def is_before_the_cluster(item: pytest.Item) -> bool:
    return item.get_closest_marker("before_the_cluster") is not None


def those_before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exists once the tests that stop clusters have run, in whichever process of pytest-xdist."""
    return tmp_path_factory.getbasetemp().parent / "before-the-cluster"


def given() -> Path | None:
    """The kubeconfig of the user's own cluster."""
    named = os.environ.get("TEST_KUBECONFIG")
    return Path(named) if named else None


def uncaptured(request: pytest.FixtureRequest) -> AbstractContextManager[None]:
    """While it lasts output is seen at once: a first build takes long, and says what it does."""
    return request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled()


@pytest.fixture
def namespace(cluster: Access, request: pytest.FixtureRequest) -> Iterator[str]:
    """A fresh namespace at the restricted Pod Security level; another by `parametrize(..., indirect=True)`."""
    name = preparations.make_namespace(cluster, getattr(request, "param", "restricted"))
    yield name
    preparations.remove_namespace(cluster, name)


@pytest.fixture
def checkpoints(cluster: Access, namespace: str) -> Path:
    """The folder behind the claim `checkpoints` of the namespace."""
    return preparations.make_claim(cluster, namespace)


@pytest.fixture
def steady_nodes() -> Iterator[None]:
    """No test of another process changes the nodes meanwhile."""
    with nodes.steady():
        yield


@pytest.fixture(scope="session")
def base_image() -> str:
    """Python and a shell."""
    return images.BASE


@pytest.fixture(scope="session")
def bare_image() -> str:
    """Python and jax, and nothing of ours."""
    return images.BARE


@pytest.fixture(scope="session")
def image(cluster: Access) -> str:
    """The product's own, built from the Dockerfile of this checkout. On a cluster of the user's, theirs to load."""
    if cluster.is_ours:
        needs.tool("buildah", of="the Debian package buildah")
        product.load()
    return product.IMAGE
