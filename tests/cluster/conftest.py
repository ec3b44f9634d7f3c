"""The cluster and a namespace in it, for every test here.

TEST_KUBECONFIG names a cluster of the user's own, kind for one; KUBECONFIG is not read, for it may name a production
cluster. Without it the harness's is used: one that `make cluster-up` started, and left up afterwards, or one that lasts
as long as the test session.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests import needs
from tests.cluster import preparations
from tests.cluster.access import Access
from tests.cluster.harness import build, images, places
from tests.cluster.harness import cluster as harness
from tests.cluster.harness import image as product


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests here come last, so that no other test shares the machine with a cluster; and first of them those that
    start and stop clusters of their own."""
    here = Path(__file__).parent

    def turn(item: pytest.Item) -> int:
        if not item.path.is_relative_to(here):
            return 0
        return 1 if item.get_closest_marker("before_the_cluster") else 2

    items.sort(key=turn)


@pytest.fixture(scope="session")
def programs(request: pytest.FixtureRequest) -> Path:
    """The folder of a cluster's programs, on a machine that can run them."""
    if given():
        pytest.skip("TEST_KUBECONFIG names another cluster to test with")
    needs.a_machine_for_a_cluster()
    with uncaptured(request):
        return build.binaries()


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Iterator[Access]:
    if kubeconfig := given():
        yield Access(kubeconfig, Path(needs.tool("kubectl", of="Kubernetes")), is_ours=False)
        return
    folder = request.getfixturevalue("programs")
    session = harness.used()
    with uncaptured(request):
        session.__enter__()
    yield Access(places.ADMIN, folder / "kubectl", is_ours=True)
    session.__exit__(None, None, None)


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
