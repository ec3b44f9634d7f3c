"""What `plan` notes of a job that is accepted."""

from __future__ import annotations

import pytest

from launcher.job import load
from launcher.job.profile import ClusterDefaults
from launcher.manifests.resolve import resolve
from launcher.plan.notes import notes

H100 = "name: x\nimage: i\ncommand: [a]\naccelerator: {type: h100}\nplatform: gke\n"
MEGA = "node_selector: {cloud.google.com/gke-accelerator: nvidia-h100-mega-80gb}\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (H100 + "capacity: spot\ngrace: 25s\n", ["grace: 25 s, but GKE ends the pods of a Spot node after 15 s"]),
        (H100 + "capacity: spot\ngrace: 15s\n", []),
        (H100 + "grace: 60s\n", []),
        (H100 + "hosts: 2\n" + MEGA, ["network: the 2 hosts talk by TCP over one interface"]),
        (H100 + MEGA, []),
        (H100 + "hosts: 2\nnetwork: gpudirect-tcpxo\n", []),
    ],
)
def test_what_costs_time_or_progress_is_noted(text: str, said: list[str]) -> None:
    found = list(notes(resolve(load.parse(text), ClusterDefaults())))
    assert len(found) == len(said)
    for note, begins in zip(found, said, strict=True):
        assert note.startswith(begins)
