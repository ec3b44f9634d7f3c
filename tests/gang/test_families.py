"""Published families, split over meshes of two processes: the losses of one device.

`python -m tests.gang.families` trains every family on every mesh, in one process too.
"""

from __future__ import annotations

import pytest

from tests import needs
from tests.gang import families
from tests.trainer.references import FIXTURES

pytestmark = [pytest.mark.computes, pytest.mark.extended]


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Those of all rows, by one start of two processes."""
    for _, _, case in families.COVERING:
        needs.arrays(FIXTURES / case / "weights.safetensors")
    return families.trained(families.COVERING, tmp_path_factory.mktemp("families"))


@pytest.mark.parametrize("row", families.COVERING, ids=families.key)
def test_a_family_on_a_mesh_of_two_processes_gives_the_losses_of_one_device(
    row: families.Row, losses: dict[str, list[float]]
) -> None:
    found, alone = losses[families.key(row)], losses[families.key(("1-process", families.ONE, row[2]))]
    assert len(found) == 20 and found[-1] <= 0.8 * found[0], "it learns"
    assert families.distance(found, alone) <= 1e-5


def test_the_command_trains_every_family_on_every_mesh() -> None:
    rows = families.table()
    assert all(row in rows or row[1] == {"fsdp": 4, "mp": 2} for row in families.COVERING)
    assert len(rows) == 2 * (9 * len(families.MESHES) + 3 * (len(families.MESHES) + len(families.OF_EXPERTS)))
